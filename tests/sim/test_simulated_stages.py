"""Bases in stages in a simulated cluster: seconds that can be worked out by hand, who is let in, and that nothing is held twice."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import in_every_run
from tests.scheduler.invariants import check
from tests.scheduler.test_unequal_stages import MEMORY
from tests.shape.test_predicted_constants import SHAPES as COUNTED
from tests.sim.small_clusters import BASE, FREE_MOVES, events_of, group_of, made_job, until
from tlora.cluster.controller import run
from tlora.errors import ConfigError
from tlora.protocol import Action, BaseAdded, Event, JobFinished, JobProfile, JobSubmitted, RejectJob, StartGroup, to_json
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import BaseConstants, CostModel
from tlora.shape.memory import ADAPTER_BYTES
from tlora.shape.stages import LATENCY_SECONDS
from tlora.sim.backend import SimulatedCluster
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import SHAPES, MappedJob
from tlora.sim.records import SimulationResult
from tlora.sim.run import run_scenario
from tlora.sim.scenario import Scenario, cost_of, layout_named, memory_of, scene_of
from tlora.sim.simulate import simulate, simulated_cluster
from tlora.sim.stages import parts_of

FREE = Conditions(moves=FREE_MOVES)
ROOM = 650 * 10**6  # the base has 800 MB: half of it fits


def staged_cost(room: float = ROOM) -> CostModel:
    """A GPU trains 1,024 tokens/s of a base of eight layers in two stages or more; so much of one may be planned for."""
    gpu_bytes = room / 0.92
    cost = CostModel({BASE: BaseConstants(1024.0, 0.0, 0.0, 1.0, 1.0, 8e8, 0.0, gpu_bytes, {})}, fill_share=1.0)
    cost.memory[BASE] = MEMORY
    return cost


def staged_job(name: str, steps: int = 100, tokens: float = 2048.0, at: float = 0.0, gpus: int = 2, parameters: int = 10**5) -> MappedJob:
    job = made_job(name, steps, at, gpus, tokens)
    profile = replace(job.job.profile, adapter_parameters=parameters)
    return replace(job, job=replace(job.job, profile=profile, least_gpus=2, max_slowdown=10.0))


def simulated(*jobs: MappedJob, policy: str = "fifo", nodes: int = 1, per_node: int = 2, conditions: Conditions = FREE) -> SimulationResult:
    return simulate(jobs, ClusterShape(nodes, per_node), LIVE_POLICIES[policy](), staged_cost(), conditions)


def started(cluster: SimulatedCluster) -> Iterator[tuple[float, Event]]:
    """Jobs a and b in one group over two stages, in micro-batches of 2,048 tokens at most."""
    events = events_of(cluster)
    for _ in range(2):
        until(events, JobSubmitted)
    cluster.execute(StartGroup(group_of("g0", "a", "b", gpus=(0, 1), budget=2048)))
    return events


def test_a_lone_job_ends_when_its_bubbles_let_it() -> None:
    """A step is two micro-batches of 1,024 tokens, half a second in a stage: three halves, where two GPUs make it in one second."""
    (record,) = simulated(staged_job("a")).jobs
    step = 3 * 0.5 + 3 * LATENCY_SECONDS
    assert record.finished_seconds == pytest.approx(100 * step)
    assert 100 * 2048 / 2048 < record.finished_seconds < 100 * 2048 / 1024, "faster than one GPU, and less than twice as fast"
    assert record.alone_seconds == pytest.approx(record.finished_seconds), "it is slowed down by nothing"


def test_two_jobs_that_fill_each_others_bubbles_take_as_long_as_full_stages() -> None:
    cluster = simulated_cluster([staged_job("a"), staged_job("b")], ClusterShape(1, 2, tick_seconds=math.inf), staged_cost(), FREE)
    events = started(cluster)
    first, event = until(events, JobFinished)
    assert isinstance(event, JobFinished) and first == pytest.approx(100 * 2.0, rel=1e-3), "4,096 tokens at 2,048 a second"
    alone = simulated(staged_job("a"), staged_job("b")).jobs
    assert alone[1].finished_seconds == pytest.approx(2 * alone[0].finished_seconds) and alone[1].finished_seconds > 1.4 * first


def test_one_that_is_left_alone_has_bubbles_again() -> None:
    cluster = simulated_cluster([staged_job("a", 100), staged_job("b", 50)], ClusterShape(1, 2, tick_seconds=math.inf), staged_cost(), FREE)
    events = started(cluster)
    first, _ = until(events, JobFinished)
    second, _ = until(events, JobFinished)
    assert first == pytest.approx(50 * 2.0, rel=1e-3)
    assert second - first == pytest.approx(50 * (1.5 + 3 * LATENCY_SECONDS), rel=1e-3)


@pytest.mark.parametrize("policy", LIVE_POLICIES)
def test_the_simulated_scheduler_lets_in_what_stages_hold(policy: str) -> None:
    """Up to the last parameter, as a live one does; on one GPU nothing fits."""
    room = int(staged_cost().room_bytes(BASE))
    together = MEMORY.room_on((1.0, 1.0), (room, room))  # where each GPU has the part of the adapter that its layers take
    most = int((together - MEMORY.bytes_on(2, 1024, room, recomputed=True)) / ADAPTER_BYTES)
    jobs = [staged_job("fits", parameters=most), staged_job("large", parameters=most + 2)]
    whole = staged_job("whole")
    jobs.append(replace(whole, job=replace(whole.job, gpus=1, least_gpus=1)))
    fits, large, on_one = simulated(*jobs, policy=policy).jobs
    assert (fits.state, large.state, on_one.state) == ("done", "rejected", "rejected")


@pytest.mark.parametrize("policy", in_every_run(list(LIVE_POLICIES), 2))
@pytest.mark.parametrize("seed", range(3))
def test_jobs_join_leave_and_grow_and_no_gpu_is_held_twice(policy: str, seed: int) -> None:
    """Also where nodes fail, and speeds are not as believed. No group has fewer GPUs than hold its base."""
    chance, nodes = random.Random(seed), 3
    tokens, gpus = (512.0, 2048.0, 20_000.0), (2, 2, 3, 6)
    jobs = [
        staged_job(f"j{k}", chance.randint(1, 300), chance.choice(tokens), chance.uniform(0, 500), chance.choice(gpus)) for k in range(25)
    ]
    conditions = Conditions(seed=seed, speed_error=0.15, delay=0.5, mtbf_hours=2.0, repair_hours=0.1, moves=FREE_MOVES)
    scheduler = Scheduler(LIVE_POLICIES[policy](), staged_cost())
    cluster = simulated_cluster(jobs, ClusterShape(nodes, 4), staged_cost(), conditions)
    run(_Checked(scheduler), cluster)
    assert {record.state for record in cluster.jobs.values()} == {"done"}
    assert all(len(span.gpus) >= 2 for span in cluster.spans)


class _Checked:
    """A scheduler whose state is looked at after each event."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def handle(self, event: Event, now: float) -> list[Action]:
        actions = self._scheduler.handle(event, now)
        assert not any(isinstance(action, RejectJob) for action in actions)
        check(self._scheduler.state)
        return actions


# -- scenarios -----------------------------------------------------------------------------------------------------------

SMALL = Scenario(gpu="h200-from-128", mixed=True, jobs=60, nodes=2, layout="stages", memory_limit=40 << 30)


@pytest.mark.parametrize("name", SHAPES)
def test_stages_of_a_base_with_constants_are_its_layers_and_ends(name: str) -> None:
    """Nothing is lost or counted twice, but for a head that is the embedding, of which each end has one."""
    cost = cost_of(SMALL, "tlora")
    shape, constants, counted = SHAPES[name], cost.constants[name], cost.memory[name]
    assert counted.stages is not None and counted.in_stages and counted.stages.boundary_bytes == 2 * shape.hidden
    ends = 2 * shape.vocabulary * shape.hidden
    for stages, fullest in enumerate(counted.bytes_by_gpus[1:], 2):
        total = constants.base_bytes + (ends if shape.tied else 0)
        assert total / stages <= fullest <= total / stages + ends + total / shape.layers, stages
        assert counted.stages.slowest(stages) >= 1.0, stages
    assert counted.stages.slowest(2) < 1.1
    if not shape.tied:  # of those whose head is small, so that it leaves each stage half of the layers
        open_at_first = 1.5 * constants.activation_bytes_per_token + 8 * shape.hidden  # three micro-batches, and the boundary's buffers
        assert counted.bytes_on(2, 4096, 0) == pytest.approx(counted.bytes_by_gpus[1] + 4096 * open_at_first, rel=0.06)


@pytest.mark.parametrize("name", SHAPES)
def test_the_shapes_are_those_that_were_counted_from_the_bases(name: str) -> None:
    layers, weights, features, head, head_features, width, *_ = COUNTED[name]
    shape, parts = SHAPES[name], parts_of(SHAPES[name], 1e12, 1e6)
    assert (shape.layers, shape.hidden) == (layers, width) and parts.layer_weights == (weights,) * layers
    assert parts.layer_features == (features,) * layers and (parts.head_weights, parts.head_features) == (head, head_features)


def test_jobs_ask_for_as_many_gpus_as_hold_their_base() -> None:
    """A 70B in 8 bits has 73 GB, of 43 that may be used; others take the two that stages are."""
    plain, staged = scene_of(replace(SMALL, layout="auto", memory_limit=None)), scene_of(SMALL)
    assert [job.submit_seconds for job in staged.jobs] == [job.submit_seconds for job in plain.jobs]
    for before, now in zip(plain.jobs, staged.jobs, strict=True):
        assert now.job.profile == before.job.profile and now.alone_step_seconds == before.alone_step_seconds, "anchored alike"
        least = {"llama-3-70b": 3}.get(now.job.base_model, 2)
        assert now.job.least_gpus >= least and now.job.gpus == max(min(before.job.gpus, 80), now.job.least_gpus)
        assert now.job.least_gpus == 2 or now.job.base_model == "llama-3-70b"


def test_a_scenario_in_stages_is_simulated_in_stages() -> None:
    staged = run_scenario(SMALL)
    whole = run_scenario(replace(SMALL, layout="auto", memory_limit=None))
    assert staged.result.settings["layout"] == "stages" and staged.result.settings["memory limit"] == 40 << 30
    assert all(len(span.gpus) >= 2 for span in staged.result.spans)
    served = [record for record in staged.result.jobs if record.state not in ("rejected", "unfinished")]
    assert len(served) > 50
    assert all(record.alone_seconds > 0 for record in served)
    small = {record.job_id: record for record in whole.result.jobs}
    slower = [record.alone_seconds / record.steps > small[record.job_id].alone_seconds / small[record.job_id].steps for record in served]
    assert sum(slower) > len(slower) / 2, "bubbles cost most jobs more than a second GPU brings"


def test_the_kernels_gain_may_be_assumed_over_stages() -> None:
    assumed = cost_of(replace(SMALL, kappa=2.0), "tlora")
    assert assumed.is_cut("llama-3-8b", 2) and assumed.stage_rates == cost_of(SMALL, "tlora").stage_rates
    assert not cost_of(replace(SMALL, layout="auto"), "tlora").is_cut("llama-3-8b", 2)


def test_a_memory_limit_is_that_of_every_gpu() -> None:
    cost = cost_of(replace(SMALL, layout="auto"), "tlora")
    assert cost.room_bytes("llama-3-8b") == pytest.approx(40 << 30)
    assert cost.constants["llama-3-8b"].source["gpu_bytes"] == "memory limit of 40.00 GiB"
    assert memory_of("40GiB") == 40 << 30 and memory_of(None) is None and layout_named("stages") == "stages"
    with pytest.raises(ConfigError, match="memory limit 128.00 GiB: a run may use 127.88 GiB of a GPU. Give less"):
        cost_of(replace(SMALL, memory_limit=128 << 30), "tlora")
    with pytest.raises(ConfigError, match="memory limit '40 apples': is no number of bytes. Write such as 24GiB"):
        memory_of("40 apples")
    with pytest.raises(ConfigError, match="layout 'stage': bases are simulated whole on each GPU.*; did you mean 'stages'"):
        layout_named("stage")


def test_a_log_of_jobs_whose_base_was_in_parts_says_that_it_is_simulated_whole(tmp_path: Path) -> None:
    """Without a word it was: each GPU had the whole base, and computed as much as the others."""
    path, profile = tmp_path / "events.jsonl", JobProfile(8192.0, 100, 1024, 10**7)
    entries = [BaseAdded("big", 64 * 10**9), *[JobSubmitted(name, "big", 4, profile, least_gpus=4) for name in "ab"]]
    path.write_text("".join(json.dumps({"seconds": float(at), **to_json(entry)}) + "\n" for at, entry in enumerate(entries)))
    scenario = Scenario(trace=str(path), gpu="h200-from-128", nodes=1, gpus_per_node=4)
    (like, parts) = scene_of(scenario).warnings
    assert "costs what llama-3-70b does" in like
    assert parts.startswith("2 jobs asked for several GPUs to hold a base in parts, and are simulated with all of it on each. For stages")
    staged = replace(scenario, layout="stages", memory_limit=40 << 30)
    assert len(scene_of(staged).warnings) == 1 and cost_of(staged, "tlora").is_cut("big", 4)
    with pytest.raises(ConfigError, match="'a', the first, is rejected: its base takes 9 GPUs and the cluster has 4"):
        scene_of(replace(staged, memory_limit=22 << 30))
