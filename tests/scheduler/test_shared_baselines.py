"""Others' policies of sharing a base: by memory alone, and by joint throughput within bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from tests.scheduler.mirror import MOVES, Move, made_scheduler, made_spec, steps_through
from tlora.protocol import BaseMeasured, ChangeGroup, JobFinished, JobGroup, StartGroup, StopGroup, Tick
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.shared_baselines import memory_only, tlora_published
from tlora.scheduler.state import ClusterState
from tlora.shape.sharing import Member, group_step_seconds


def tokens_per_second(state: ClusterState, group: JobGroup) -> float:
    jobs = [state.jobs[name] for name in group.job_ids]
    members = [Member(job.spec.profile.tokens_per_step, job.weight) for job in jobs]
    nodes = state.pool.num_nodes(group.gpus)
    seconds = group_step_seconds(state.cost, group.base_model, group.plan.token_budget, len(group.gpus), nodes, members)
    return sum(member.tokens_per_step / own for member, own in zip(members, seconds, strict=True))


def members_of(scheduler: Scheduler) -> dict[str, tuple[str, ...]]:
    return {name: known.group.job_ids for name, known in scheduler.state.groups.items()}


# -- memory only -----------------------------------------------------------------------------------------------------------


def test_a_job_without_gpus_joins_whatever_becomes_of_the_bounds() -> None:
    scheduler = made_scheduler(memory_only(), 1)
    scheduler.handle(made_spec("a", tokens=20_000.0, max_slowdown=1.0), 0.0)
    (change,) = scheduler.handle(made_spec("b", 1, tokens=20_000.0, max_slowdown=1.0), 1.0)
    assert isinstance(change, ChangeGroup) and change.group.job_ids == ("a", "b") and change.group.gpus == (0,)
    assert min(scheduler.state.groups["g0"].step_seconds) > 1.9 * scheduler.state.jobs["a"].alone_step_seconds


def test_memory_alone_refuses_and_whoever_takes_less_passes() -> None:
    scheduler = made_scheduler(memory_only(), 1)
    scheduler.handle(made_spec("a", parameters=10**9), 0.0)  # 52 + 18 GB of 92
    assert scheduler.handle(made_spec("too large", parameters=13 * 10**8), 0.0) == []
    assert scheduler.handle(made_spec("as large", parameters=13 * 10**8), 0.0) == []
    assert scheduler.handle(made_spec("long", parameters=5 * 10**8, longest=16384), 0.0) == []
    assert len(scheduler.handle(made_spec("small", parameters=5 * 10**8), 0.0)) == 1
    assert members_of(scheduler) == {"g0": ("a", "small")}


@given(moves=MOVES)
def test_by_memory_nobody_waits_whom_a_group_could_hold(moves: list[Move]) -> None:
    for _, state, _ in steps_through(memory_only(), moves):
        for job in (state.jobs[name] for name in state.pending):
            for name in state.groups_of_base.get(job.spec.base_model, ()):
                profiles = [state.jobs[member].spec.profile for member in state.groups[name].group.job_ids] + [job.spec.profile]
                longest = max(profile.longest_sample_tokens for profile in profiles)
                budget = next(tokens for tokens in state.cost.budgets if tokens >= longest)
                parameters = sum(profile.adapter_parameters for profile in profiles)
                assert not state.cost.fits(job.spec.base_model, parameters, budget), f"{job.spec.job_id} could join {name}"


# -- tLoRA's ---------------------------------------------------------------------------------------------------------------


@given(moves=MOVES)
def test_every_member_keeps_its_bound(moves: list[Move]) -> None:
    """As predicted when it was put into its group: the rule plans nothing anew for a base that is measured later."""
    earlier: set[str] = set()
    for event, state, actions in steps_through(tlora_published(), moves):
        if isinstance(event, BaseMeasured):
            earlier |= state.groups.keys() - {action.group.group_id for action in actions if isinstance(action, StartGroup)}
        for name, known in state.groups.items():
            if len(known.group.job_ids) > 1 and name not in earlier:
                for name, seconds in zip(known.group.job_ids, known.step_seconds, strict=True):
                    job = state.jobs[name]
                    assert seconds <= job.spec.max_slowdown * job.alone_step_seconds * (1 + 1e-6)


@given(moves=MOVES)
def test_what_joins_or_merges_raises_joint_throughput(moves: list[Move]) -> None:
    before: dict[str, JobGroup] = {}
    for event, state, actions in steps_through(tlora_published(), moves):
        changes = [action.group for action in actions if isinstance(action, ChangeGroup) and action.group.group_id in before]
        lost = [action for action in actions if isinstance(action, StopGroup)]
        if isinstance(event, Tick) and not lost:
            for group in changes:
                came = set(group.job_ids) - set(before[group.group_id].job_ids)
                if came and len(group.gpus) == len(before[group.group_id].gpus):
                    assert tokens_per_second(state, group) > tokens_per_second(state, before[group.group_id])
        before = {name: known.group for name, known in state.groups.items()}


def test_a_job_that_would_not_raise_throughput_waits() -> None:
    scheduler = made_scheduler(tlora_published(), 1)
    scheduler.handle(made_spec("full", tokens=16384.0, max_slowdown=math.inf), 0.0)  # several fill a micro-batch to 95 % only
    assert scheduler.handle(made_spec("b", tokens=16384.0, max_slowdown=math.inf), 0.0) == []


# -- tLoRA's merges --------------------------------------------------------------------------------------------------------

LARGE, SMALL = 16_384.0, 60.0
"""Alone the large one makes a step in 16.9 s, the small one in 0.56 s. Pooled, micro-batches of 2,048 tokens take 1.53 s, or 1.68 s on
two nodes; the small one makes a step in each, the large one has its own in 13.3 or 14.6 s."""


@pytest.mark.parametrize(("bound", "merges"), [(2.8, True), (2.7, False)])
def test_a_group_that_opens_pools_gpus_where_that_raises_throughput_within_bounds(bound: float, merges: bool) -> None:
    scheduler = made_scheduler(tlora_published(), 2)
    scheduler.handle(made_spec("large", tokens=LARGE), 0.0)
    (action,) = scheduler.handle(made_spec("small", tokens=SMALL, max_slowdown=bound), 0.0)
    if merges:
        assert isinstance(action, ChangeGroup) and action.group.gpus == (0, 1) and set(action.group.job_ids) == {"large", "small"}
    else:
        assert isinstance(action, StartGroup) and action.group.job_ids == ("small",)


def test_merges_are_sought_on_the_node_then_in_the_rack_then_anywhere() -> None:
    def with_large_on(*nodes: int) -> Scheduler:
        """Four nodes of two GPUs in two racks, full but for GPU 0; a large job on each of `nodes`, the first being the most urgent."""
        scheduler = made_scheduler(tlora_published(), 2, 2, 2, 2)
        for gpu in range(8):
            scheduler.handle(made_spec(f"filler{gpu}", base_model="south", tokens=LARGE, max_slowdown=1.0), 0.0)
        for now, node in enumerate(nodes):
            (group_id,) = [name for name, known in scheduler.state.groups.items() if known.group.gpus == (2 * node + 1,)]
            (filler,) = scheduler.state.groups[group_id].group.job_ids
            scheduler.handle(JobFinished(filler), 10.0 * now)
            scheduler.handle(made_spec(f"large{node}", tokens=LARGE), 10.0 * now)
        (first,) = [known.group for known in scheduler.state.groups.values() if known.group.gpus == (0,)]
        scheduler.handle(JobFinished(first.job_ids[0]), 100.0)
        scheduler.handle(made_spec("small", tokens=SMALL, max_slowdown=3.1), 100.0)
        return scheduler

    for nodes, partner in (((3, 1, 0), 0), ((3, 1), 1), ((3,), 3)):
        scheduler = with_large_on(*nodes)
        (merged,) = [known.group for known in scheduler.state.groups.values() if "small" in known.group.job_ids]
        assert merged.gpus == (0, 2 * partner + 1) and set(merged.job_ids) == {"small", f"large{partner}"}


def test_gpus_that_no_member_asked_for_are_given_up_to_those_who_wait() -> None:
    scheduler = made_scheduler(tlora_published(), 4)
    scheduler.handle(made_spec("four", 4, tokens=500.0, max_slowdown=5.0), 0.0)
    scheduler.handle(made_spec("one", 1, tokens=500.0, max_slowdown=5.0), 0.0)
    assert members_of(scheduler) == {"g0": ("four", "one")}
    assert scheduler.handle(JobFinished("four"), 1.0) == []  # nobody waits: it keeps them
    change, start = scheduler.handle(made_spec("three", 3, base_model="south"), 2.0)
    assert isinstance(change, ChangeGroup) and change.group.gpus == (0,) and change.group.job_ids == ("one",)
    assert isinstance(start, StartGroup) and start.group.gpus == (1, 2, 3)
