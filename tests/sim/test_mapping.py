"""From rows to LoRA jobs: what is drawn, that it depends on the row alone, and that exclusive replay gives the recorded run times."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist, fmean, median

import pytest

from tests.cases import in_every_run
from tlora.errors import ConfigError
from tlora.protocol import (
    GpusAsked,
    JobGroup,
    JobProfile,
    JobSubmitted,
    NodeAdded,
    ParallelPlan,
    RejectJob,
    StartGroup,
    Tick,
    to_json,
)
from tlora.scheduler.admission import why_unsound
from tlora.shape.cost import BaseConstants, CostModel
from tlora.shape.hardware import cost_model
from tlora.sim.arrivals import compressed, first
from tlora.sim.mapping import (
    BASES,
    MOST_TOKENS,
    RULES,
    LoraDraw,
    adapter_parameters,
    draw_lora,
    logged_jobs,
    mapped_jobs,
    sample_lengths,
)
from tlora.sim.run import run_scenario
from tlora.sim.scenario import Scenario
from tlora.sim.trace import SHIPPED, Trace, TraceJob, read_trace

ROUND = BaseConstants(
    tokens_per_second=10_000.0,
    launch_seconds=0.01,
    member_seconds=0.001,
    exchange_seconds=0.01,
    exchange_between_nodes_seconds=0.03,
    base_bytes=16e9,
    activation_bytes_per_token=3e6,
    gpu_bytes=150e9,
    source={},
)
ANCHOR = CostModel(dict.fromkeys(BASES, ROUND))
DEFAULT = RULES["default"]


def row(job_id: str, gpus: int = 1, duration_seconds: float = 1000.0, user: str = "") -> TraceJob:
    return TraceJob(job_id, 0.0, gpus, duration_seconds, user, "vc", "SFT", "FAILED")


# -- what is drawn -----------------------------------------------------------------------------------------------------


def test_one_job_exactly() -> None:
    """Frozen: another hash, key or order of the tables would make every published number another one."""
    assert draw_lora("ee9e8c", row("philly-31601", 8), 0, DEFAULT) == LoraDraw("llama-3-8b-instruct", 16, 4, 961, "all-linear", 1.2)
    (mapped,) = mapped_jobs(Trace("ee9e8c", (row("philly-31601", 8, 771_324),)), ANCHOR, 0)
    # 4 samples * 8 GPUs * 961 tokens in one micro-batch: 0.01 + 0.01 + 30752 / 80,000 seconds
    assert mapped.alone_step_seconds == pytest.approx(0.4044, rel=1e-12)
    histogram = (0, 0, 0, 0, 0, 0, 0, 3, 25, 56, 37, 7)
    profile = JobProfile(30_752.0, 1_907_329, 3844, 41_943_040, histogram)
    assert mapped.job == JobSubmitted("philly-31601", "llama-3-8b-instruct", 8, profile, tenant="vc", max_slowdown=1.2)
    assert (mapped.submit_seconds, mapped.recorded_seconds) == (0.0, 771_324)


def test_neither_order_nor_subset_nor_arrivals_matter() -> None:
    trace = read_trace("6c71a0+b436b2")
    whole = {mapped.job.job_id: mapped.job for mapped in mapped_jobs(first(trace, 2000), ANCHOR, 1)}
    shuffled = list(trace.jobs[:2000])
    random.Random(0).shuffle(shuffled)
    for part in (
        replace(trace, jobs=tuple(shuffled)),
        replace(trace, jobs=tuple(job for job in trace.jobs[:2000] if job.vc == "b436b2")),
        compressed(first(trace, 50), 3),
    ):
        mapped = mapped_jobs(part, ANCHOR, 1)
        assert mapped and all(one.job == whole[one.job.job_id] for one in mapped)


def test_seed_trace_and_job_all_matter() -> None:
    drawn = {draw_lora(trace, row(job), seed, DEFAULT) for trace in ("s", "t") for job in ("a", "b") for seed in (0, 1)}
    assert len(drawn) == 8


def test_a_user_stays_with_one_base_and_jobs_without_a_user_draw_their_own() -> None:
    own = {draw_lora("t", row(f"j{k}", user="ann"), 0, DEFAULT).base_model for k in range(50)}
    assert len(own) == 1
    assert {draw_lora("t", row(f"j{k}"), 0, DEFAULT).base_model for k in range(50)} == set(BASES)
    assert {draw_lora("t", row("j", user=f"u{k}"), 0, DEFAULT).base_model for k in range(50)} == set(BASES)


def shares(values: list[object]) -> dict[object, float]:
    return {value: count / len(values) for value, count in Counter(values).items()}


@cache
def draw_many(count: int) -> list[LoraDraw]:
    return [draw_lora("t", row(str(k)), 0, DEFAULT) for k in range(count)]


@pytest.mark.parametrize(
    ("field", "wanted"),
    [
        ("base_model", {"llama-3-8b": 0.5, "llama-3-8b-instruct": 0.5}),
        ("rank", {4: 0.10, 8: 0.25, 16: 0.30, 32: 0.20, 64: 0.15}),
        ("batch_per_gpu", {1: 0.25, 2: 0.25, 4: 0.25, 8: 0.25}),
        ("targets", {"all-linear": 0.7, "attention": 0.3}),
        ("max_slowdown", {1.2: 0.25, 1.5: 0.5, 2.0: 0.25}),
    ],
)
def test_draws_have_the_stated_shares(field: str, wanted: dict[object, float]) -> None:
    count = 20_000
    drawn = shares([getattr(each, field) for each in draw_many(count)])
    assert set(drawn) == set(wanted)
    for value, share in wanted.items():
        assert drawn[value] == pytest.approx(share, abs=4.5 * math.sqrt(share * (1 - share) / count))


def test_mean_lengths_are_lognormal_and_clipped() -> None:
    tokens = [draw_lora("t", row(str(k)), 0, DEFAULT).mean_tokens for k in range(20_000)]
    assert min(tokens) == 64 and max(tokens) == 4096
    assert median(tokens) == pytest.approx(512, rel=0.03)
    assert fmean(t <= 512 * math.exp(0.8) for t in tokens) == pytest.approx(NormalDist().cdf(1), abs=0.012)
    beyond = fmean(t == 4096 for t in tokens)
    assert beyond == pytest.approx(1 - NormalDist().cdf(math.log(8) / 0.8), abs=0.003)


@pytest.mark.parametrize("mean", [64, 100, 512, 1024, 1025, 3000, 4096])
def test_sample_lengths_keep_the_mean_and_end_at_the_longest(mean: int) -> None:
    lengths = sample_lengths(mean)
    assert len(lengths) == 128 and list(lengths) == sorted(lengths) and lengths[0] >= 1
    assert lengths[-1] == min(4 * mean, MOST_TOKENS)
    assert fmean(lengths) == pytest.approx(mean, rel=0.01)  # the last share's middle is less than its mean


@pytest.mark.parametrize(
    ("base", "a_rank"),
    [
        ("qwen3-0.6b", 28 * (2 * (1024 + 2048) + 2 * (1024 + 1024) + 3 * (1024 + 3072))),
        ("qwen3-1.7b", 28 * (2 * (2048 + 2048) + 2 * (2048 + 1024) + 3 * (2048 + 6144))),
        ("llama-3-8b", 2_621_440),
        ("llama-3-70b", 80 * (2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 28672))),
    ],
)
def test_adapters_have_the_parameters_of_their_base(base: str, a_rank: int) -> None:
    assert adapter_parameters(4, "all-linear", base) == 4 * a_rank > adapter_parameters(4, "attention", base)


# -- anchored replay ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", in_every_run(SHIPPED, 0))
def test_exclusive_replay_gives_the_recorded_run_times_within_half_a_step(name: str) -> None:
    anchor = cost_model(kernels="peft", bases=BASES)
    trace = read_trace(name)
    jobs = mapped_jobs(trace, anchor, 0)
    assert [one.job.job_id for one in jobs] == [one.job_id for one in trace.jobs]
    for one, recorded in zip(jobs, trace.jobs, strict=True):
        profile, nodes = one.job.profile, -(-recorded.gpus // 8)
        step_seconds = anchor.alone_step_seconds(one.job.base_model, profile.tokens_per_step, recorded.gpus, nodes)
        assert step_seconds == one.alone_step_seconds and one.replayed_seconds == profile.steps * step_seconds
        slack = step_seconds if recorded.duration_seconds < step_seconds else step_seconds / 2
        assert abs(one.replayed_seconds - recorded.duration_seconds) <= slack * (1 + 1e-9)
        assert profile.longest_sample_tokens <= MOST_TOKENS and sum(profile.length_histogram) == 128
    wrong = sum(one.job.gpus * abs(one.replayed_seconds - one.recorded_seconds) for one in jobs)
    assert wrong < 1e-4 * sum(one.job.gpus * one.recorded_seconds for one in jobs)
    assert sum(one.recorded_seconds < one.alone_step_seconds for one in jobs) <= 5


def test_a_job_lies_on_as_few_nodes_as_hold_it() -> None:
    job = (row("a", 8),)
    one = mapped_jobs(Trace("t", job), ANCHOR, 0, gpus_per_node=8)[0].alone_step_seconds
    two = mapped_jobs(Trace("t", job), ANCHOR, 0, gpus_per_node=4)[0].alone_step_seconds
    assert two - one == pytest.approx(0.02)  # between nodes 0.03 s, within one 0.01 s


def test_tokens_per_step_are_samples_times_gpus_times_mean_length() -> None:
    drawn = draw_lora("t", row("a", 8, user="ann"), 3, DEFAULT)
    (mapped,) = mapped_jobs(Trace("t", (row("a", 8, user="ann"),)), ANCHOR, 3)
    assert mapped.job.profile.tokens_per_step == drawn.batch_per_gpu * 8 * drawn.mean_tokens
    assert mapped.job.tenant == "ann" and mapped.job.gpus == 8


# -- event logs --------------------------------------------------------------------------------------------------------


def test_jobs_of_an_event_log_are_taken_as_they_are_and_once() -> None:
    profile = JobProfile(2000.0, 30, 512, 1000)
    submitted = JobSubmitted("a", "llama-3-8b", 2, profile, tenant="x", priority=2.0, max_slowdown=1.7)
    log = [(0.0, NodeAdded("n0", (0, 1))), (5.0, submitted), (6.0, Tick()), (7.0, submitted)]
    (mapped,) = logged_jobs(log, ANCHOR)
    assert mapped.job is submitted and mapped.submit_seconds == 5.0
    assert mapped.alone_step_seconds == pytest.approx(0.01 + 0.01 + 2000 / 20_000)
    assert mapped.recorded_seconds == mapped.replayed_seconds == 30 * mapped.alone_step_seconds


def test_an_order_that_was_rejected_gives_way_to_the_one_that_was_mended() -> None:
    """As a person does who reads why, changes the job and starts the cluster again."""
    good = JobSubmitted("a", "llama-3-8b", 1, JobProfile(2000.0, 30, 512, 1000))
    bad, other = replace(good, gpus=64), replace(good, job_id="b")
    rejected = RejectJob("a", "it asks for 64 GPUs and the cluster has 2. Ask for fewer")
    log = [(1.0, bad), (1.0, rejected), (2.0, other), (3.0, good), (3.5, other), (4.0, bad)]
    assert [(job.submit_seconds, job.job) for job in logged_jobs(log, ANCHOR)] == [(2.0, other), (3.0, good)]
    assert [job.job for job in logged_jobs(log[:2], ANCHOR)] == [bad]


def test_a_job_of_an_event_log_is_replayed_on_the_gpus_that_it_asked_for_last_before_it_began() -> None:
    """It was replayed on all that it ordered before the first host, of which there may be too few."""
    wide = JobSubmitted("wide", "llama-3-8b", 8, JobProfile(2000.0, 30, 512, 1000))
    start = StartGroup(JobGroup("g0", "llama-3-8b", (0, 1), ParallelPlan(2, 1024), ("wide",), (1.0,)))
    log = [(1.0, wide), (2.0, GpusAsked("wide", 1)), (3.0, GpusAsked("wide", 2)), (3.0, start), (9.0, wide), (9.5, GpusAsked("wide", 4))]
    (mapped,) = logged_jobs([(0.5, GpusAsked("wide", 3)), *log], ANCHOR)
    assert mapped.job == replace(wide, gpus=2) and mapped.submit_seconds == 1.0
    (known,) = logged_jobs([(1.0, mapped.job)], ANCHOR)
    assert mapped == known, "as one that ordered so many"
    (cut,) = logged_jobs([(1.0, wide), (2.0, GpusAsked("wide", 2, 2))], ANCHOR)
    assert cut.job == replace(wide, gpus=2, least_gpus=2), "as one whose base needs so many"


SOUND = JobSubmitted("b", "llama-3-8b", 1, JobProfile(2000.0, 30, 512, 1000))
UNSOUND = [
    replace(SOUND, job_id="a", gpus=0),
    replace(SOUND, job_id="a", gpus=-1),
    replace(SOUND, job_id="a", gpus=10**400),
    replace(SOUND, job_id="a", max_slowdown=0.5),
    replace(SOUND, job_id="a", base_model="gpt-2"),
    *(
        replace(SOUND, job_id="a", profile=replace(SOUND.profile, tokens_per_step=tokens))
        for tokens in (0.0, -1.0, math.nan, math.inf, -math.inf)
    ),
    *(replace(SOUND, job_id="a", profile=replace(SOUND.profile, steps=steps)) for steps in (0, -1, 10**400)),
    replace(SOUND, job_id="a", profile=replace(SOUND.profile, adapter_parameters=10**400)),
]


@pytest.mark.parametrize("order", UNSOUND, ids=range(len(UNSOUND)))
def test_a_job_that_no_cluster_can_run_is_replayed_as_rejected_and_the_others_as_ever(order: JobSubmitted, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    rows = [(0.0, order), (5.0, SOUND), (9.0, replace(SOUND, job_id="c"))]
    path.write_text("".join(json.dumps({"seconds": seconds, **to_json(item)}) + "\n" for seconds, item in rows))
    result = run_scenario(Scenario(trace=str(path), policy="sjf", nodes=1, gpus_per_node=1)).result
    assert [(job.job_id, job.state) for job in result.jobs] == [("a", "rejected"), ("b", "done"), ("c", "done")]
    assert math.isfinite(result.load)
    alone = run_scenario(Scenario(trace=str(path), policy="sjf", nodes=1, gpus_per_node=1, delta=2.0)).result
    assert [job.state for job in alone.jobs] == ["rejected", "done", "done"]


@pytest.mark.parametrize("order", UNSOUND, ids=range(len(UNSOUND)))
def test_a_log_of_which_no_job_can_run_is_refused_with_the_first_ones_reason(order: JobSubmitted) -> None:
    reason = why_unsound(ANCHOR, order)
    assert reason is not None
    with pytest.raises(ConfigError) as error:
        logged_jobs([(0.0, order), (1.0, replace(order, job_id="z"))], ANCHOR)
    assert str(error.value) == f"no job of this event log can be replayed. 'a', the first, is rejected: {reason}"
