"""What must hold of any simulation, or is known in closed form."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from tests.cases import in_every_run
from tests.sim.small_clusters import FREE_MOVES, POLICY_CASES, even_cost, made_job
from tlora.protocol import JobGroup, ParallelPlan
from tlora.scheduler.draft import Draft
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.state import ClusterState
from tlora.shape.hardware import cost_model
from tlora.sim.arrivals import at_load, first
from tlora.sim.bounds import lower_bounds, work_of
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import BASES, MappedJob, mapped_jobs
from tlora.sim.records import SimulationResult
from tlora.sim.simulate import simulate
from tlora.sim.trace import read_trace

FREE = Conditions(moves=FREE_MOVES)
PLAIN, FUSED = cost_model("h200", "peft", BASES), cost_model("h200", "tlora", BASES)


def trace_jobs(name: str, count: int, gpus: int, load: float) -> list[MappedJob]:
    return mapped_jobs(at_load(first(read_trace(name), count), gpus, load), PLAIN, seed=0)


@pytest.mark.parametrize("name", in_every_run(["ee9e8c", "synth_sft"], 1))
def test_exclusive_replay_without_the_kernels_gain_is_the_recorded_durations(name: str):
    jobs = mapped_jobs(first(read_trace(name), 1511), PLAIN, seed=0)
    result = simulate(jobs, ClusterShape(64, 8, tick_seconds=math.inf), POLICIES["fifo"](), PLAIN, FREE)
    assert {record.state for record in result.jobs} <= {"done", "cancelled", "failed"}
    for job, record in zip(jobs, result.jobs, strict=True):
        run_seconds = record.finished_seconds - record.started_seconds
        assert record.started_seconds == record.submitted_seconds  # there are GPUs for everybody
        assert run_seconds == pytest.approx(job.replayed_seconds, rel=1e-9)
        assert abs(run_seconds - job.recorded_seconds) <= max(
            0.5, 1 - job.recorded_seconds / job.alone_step_seconds
        ) * job.alone_step_seconds * (1 + 1e-6)
        assert record.windows == job.job.profile.steps // 10 and not record.windows_beyond
        assert record.windows == 0 or record.worst_slowdown == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICY_CASES)
def test_gpu_seconds_and_tokens_are_neither_made_nor_lost(policy: str):
    jobs = trace_jobs("ee9e8c", 150, 64, 0.9)
    result = simulate(jobs, ClusterShape(8, 8), POLICIES[policy](), FUSED, FREE)
    held = math.fsum(record.gpu_seconds for record in result.jobs)
    assert held == pytest.approx(math.fsum(len(span.gpus) * (span.end_seconds - span.start_seconds) for span in result.spans))
    assert held == pytest.approx(integral(result, [float(sample.allocated_gpus) for sample in result.samples]))
    assert all(sample.allocated_gpus <= 64 for sample in result.samples)
    work = math.fsum(record.steps * record.tokens_per_step for record in result.jobs)
    trained = integral(result, [sample.tokens_per_second for sample in result.samples])
    # Whoever leaves a group loses the step under way: at most one each time.
    lost = math.fsum(record.regroupings * record.tokens_per_step for record in result.jobs)
    assert work * (1 - 1e-9) <= trained <= (work + lost) * (1 + 1e-9)
    useful = integral(result, [sample.useful_share for sample in result.samples])
    assert useful * 64 * FUSED.constants["llama-3-8b"].tokens_per_second == pytest.approx(trained)


def integral(result: SimulationResult, values: Sequence[float]) -> float:
    """Over time, of what each sample says until the next."""
    times = [sample.seconds for sample in result.samples]
    assert times == sorted(times)
    return math.fsum(value * (end - start) for value, (start, end) in zip(values, itertools.pairwise(times), strict=False))


@pytest.mark.parametrize("load", [0.5, 1.1])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.slow
def test_no_policy_beats_the_bounds(policy: str, load: float):
    jobs = trace_jobs("synth_sft", 300, 32, load)
    result = simulate(jobs, ClusterShape(4, 8), POLICIES[policy](), FUSED, FREE)
    bounds = lower_bounds(work_of(result.jobs, FUSED, 32, 8), 32)
    done = [record for record in result.jobs if record.state == "done"]
    assert len(done) > 100
    assert fmean(record.finished_seconds - record.submitted_seconds for record in done) >= bounds.mean_jct_seconds * (1 - 1e-9)
    assert max(r.finished_seconds for r in done) - min(r.submitted_seconds for r in done) >= bounds.makespan_seconds * (1 - 1e-9)


# -- queues that are known in closed form -----------------------------------------------------------------------------


def stream(count: int, gap_seconds: float, size_at: Callable[[float], float], seed: int) -> list[MappedJob]:
    """Poisson arrivals, sizes of any distribution by its quantiles, for one GPU. Both are even quantiles in random order, so that means
    are exact and what is left to chance is the order; sizes are whole steps of a second."""
    dice = random.Random(seed)
    middles = [(k + 0.5) / count for k in range(count)]
    gaps, sizes = [-gap_seconds * math.log(1 - q) for q in middles], [max(1, round(size_at(q))) for q in middles]
    dice.shuffle(gaps)
    dice.shuffle(sizes)
    now, jobs = 0.0, list[MappedJob]()
    for k, (gap, size) in enumerate(zip(gaps, sizes, strict=True)):
        now += gap
        jobs.append(made_job(str(k), size, now))
    return jobs


def mean_jct(jobs: list[MappedJob], policy: Callable[[ClusterState], list[JobGroup]]) -> float:
    result = simulate(jobs, ClusterShape(1, 1, tick_seconds=math.inf), policy, even_cost(), FREE)
    return fmean(record.finished_seconds - record.submitted_seconds for record in result.jobs)


def everybody_shares(state: ClusterState) -> list[JobGroup]:
    """Processor sharing: whoever comes joins the one group there is."""
    if not state.pending:
        return []
    draft = Draft(state)
    waiting = [state.jobs[name] for name in state.pending]
    plan = ParallelPlan(1, 1000)
    if state.groups:
        (name,) = state.groups
        group = state.groups[name].group
        draft.change(name, [*draft.members(name), *waiting], group.gpus, plan)
    else:
        gpus = draft.allocate(1)
        assert gpus is not None
        draft.open(waiting, gpus, plan)
    return draft.wanted()


def exponential(mean: float) -> Callable[[float], float]:
    return lambda q: -mean * math.log(1 - q)


def two_sizes(small: float, large: float, share: float) -> Callable[[float], float]:
    return lambda q: small if q >= share else large


def test_one_gpu_first_in_first_out_is_lindleys_recursion():
    jobs = stream(2000, 2000.0, exponential(1400.0), seed=1)
    result = simulate(jobs, ClusterShape(1, 1, tick_seconds=math.inf), POLICIES["fifo"](), even_cost(), FREE)
    free_at = 0.0
    for job, record in zip(jobs, result.jobs, strict=True):
        free_at = max(free_at, job.submit_seconds) + job.recorded_seconds
        assert record.finished_seconds == pytest.approx(free_at, rel=1e-12)


def test_sharing_by_everybody_is_processor_sharing_job_by_job():
    jobs = stream(1000, 2000.0, two_sizes(300.0, 3800.0, 0.2), seed=1)
    result = simulate(jobs, ClusterShape(1, 1, tick_seconds=math.inf), everybody_shares, even_cost(), FREE)
    # In time that runs as slowly as there are jobs, each ends its own size after it came: a heap of ends suffices.
    clock, now, ends, ended = 0.0, 0.0, list[tuple[float, str]](), dict[str, float]()
    for job in [*jobs, None]:
        until = math.inf if job is None else job.submit_seconds
        while ends and now + (ends[0][0] - clock) * len(ends) <= until:
            now += (ends[0][0] - clock) * len(ends)
            clock, name = heapq.heappop(ends)
            ended[name] = now
        if job is not None:
            clock += (until - now) / len(ends) if ends else 0.0
            now = until
            heapq.heappush(ends, (clock + job.recorded_seconds, job.job.job_id))
    assert [record.finished_seconds for record in result.jobs] == pytest.approx([ended[job.job.job_id] for job in jobs], rel=1e-9)


def mm1(count: int) -> float:
    """Mean time in the system over what M/M/1 says: 1 / (mu - lambda)."""
    return mean_jct(stream(count, 2000.0, exponential(1000.0), seed=0), POLICIES["fifo"]()) / 2000.0


def mg1_ps(count: int, size_at: Callable[[float], float], seed: int) -> float:
    """Mean time in the system over what M/G/1-PS says: E[S] / (1 - rho), whatever the distribution of sizes."""
    return mean_jct(stream(count, 2000.0, size_at, seed), everybody_shares) / 2000.0


SIZES = {"exponential": exponential(1000.0), "equal": lambda q: 1000.0, "two sizes": two_sizes(500.0, 3000.0, 0.2)}


@pytest.mark.slow
def test_exponential_jobs_first_in_first_out_are_m_m_1():
    assert mm1(10000) == pytest.approx(1, abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [pytest.param(sizes, marks=[] if sizes == "two sizes" else pytest.mark.slow) for sizes in SIZES])
def test_sharing_by_everybody_is_m_g_1_ps(sizes: str):
    assert mg1_ps(8000, SIZES[sizes], seed=3) == pytest.approx(1, abs=0.03)


@pytest.mark.soak
def test_the_closed_forms_over_more_jobs():
    assert mm1(100_000) == pytest.approx(1, abs=0.02)
    for size_at in SIZES.values():
        assert mg1_ps(40_000, size_at, seed=4) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(("max_slowdown", "beyond"), [(2.5, 100), (3.0, 0)])
def test_three_that_share_are_three_times_slower(max_slowdown: float, beyond: int):
    jobs = [made_job(name, 1000) for name in "abc"]
    jobs = [replace(job, job=replace(job.job, max_slowdown=max_slowdown)) for job in jobs]
    result = simulate(jobs, ClusterShape(1, 1, tick_seconds=math.inf), everybody_shares, even_cost(), FREE)
    assert [record.finished_seconds for record in result.jobs] == pytest.approx([3000.0] * 3)
    assert [(record.windows, record.windows_beyond) for record in result.jobs] == [(100, beyond)] * 3
