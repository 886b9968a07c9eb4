"""A base in stages on unequal GPUs: what the scheduler counts is what a worker's cut leaves, and a job that fits in an unequal cut alone is
let in.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.scheduler.mirror import BASES, Mirror, made_cost, made_settings, made_spec, tell
from tests.shape.test_base_parts import LAYERS, MB, PARTS
from tlora.protocol import (
    Event,
    GpusLost,
    GroupLost,
    GroupReady,
    JobFinished,
    JobSubmitted,
    KindsFound,
    MemoryFound,
    NodeAdded,
    RejectJob,
    Tick,
)
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.shape.base_parts import with_stages
from tlora.shape.memory import ADAPTER_BYTES, MOST_GPUS, base_memory

WHOLE = base_memory(PARTS.memory, [PARTS.memory.base_bytes] * MOST_GPUS, 0)
MEMORY = with_stages(WHOLE, PARTS, ordered=True)
SMALL, LARGE = 300 * MB, 1500 * MB  # half of the base, 400 MB, is too large for the smaller


def made(policy: Policy, cards: tuple[int, ...], speeds: tuple[float, ...], hosts: int = 1) -> tuple[Scheduler, Mirror]:
    cost = made_cost()
    cost.memory = dict.fromkeys(BASES, MEMORY)
    scheduler, mirror, gpus = Scheduler(policy, cost), Mirror(), tuple(range(len(cards)))
    tell(scheduler, mirror, KindsFound(gpus, tuple(f"kind {speed}" for speed in speeds), speeds), 0.0)
    for host in range(hosts):
        tell(scheduler, mirror, NodeAdded(f"n{host}", gpus[host::hosts]), 0.0)
    tell(scheduler, mirror, MemoryFound(gpus, cards), 0.0)
    return scheduler, mirror


def staged(name: str, **others: object) -> JobSubmitted:
    return made_spec(name, **{"parameters": 10**5, "longest": 512, "tokens": 4000.0, "gpus": 2, "least_gpus": 2, **others})  # type: ignore[arg-type]


def all_fit(scheduler: Scheduler) -> None:
    """Each stage of each group, as its worker cuts the base: the host of the first GPU has the last stages."""
    state = scheduler.state
    for known in state.groups.values():
        group = known.group
        first = state.pool.node_of[min(group.gpus)]
        order = sorted(group.gpus, key=lambda gpu: (state.pool.node_of[gpu] == first, gpu))
        limits = [state.memory.room_bytes[gpu] for gpu in order]
        cuts = PARTS.cut_for_any([state.kinds.speed_of(gpu) for gpu in order], limits)
        assert [cut[0] for cut in cuts] == [0, *[end for (_, end), _ in pairwise(cuts)]] and cuts[-1][1] == LAYERS
        parameters = sum(state.jobs[name].spec.profile.adapter_parameters for name in group.job_ids)
        tokens = group.plan.token_budget // len(group.gpus)
        for stage, (cut, limit) in enumerate(zip(cuts, limits, strict=True)):
            memory = PARTS.stage_memory(*cut, stage, len(cuts))
            taken = memory.base_bytes + memory.activation_bytes(tokens, LAYERS) + ADAPTER_BYTES * parameters * (cut[1] - cut[0]) / LAYERS
            assert taken <= limit, f"stage {stage} of {group}: {taken} of {limit}"


@pytest.mark.parametrize("name", LIVE_POLICIES)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("cards", [(SMALL, LARGE), (LARGE, SMALL)])
def test_a_job_that_fits_in_an_unequal_cut_alone_is_placed(name: str, hosts: int, cards: tuple[int, int]) -> None:
    scheduler, mirror = made(LIVE_POLICIES[name](), cards, (1.0, 2.0), hosts)
    assert scheduler.state.memory.smallest_room(scheduler.state.cost, staged("job")) != SMALL, "not in equal stages"
    tell(scheduler, mirror, staged("job"), 1.0)
    (group,) = [known.group for known in scheduler.state.groups.values()]
    assert group.gpus == (0, 1) and group.job_ids == ("job",)
    all_fit(scheduler)
    tell(scheduler, mirror, staged("second"), 2.0)
    tell(scheduler, mirror, JobFinished("job"), 3.0)
    assert scheduler.state.jobs["second"].group_id is not None
    all_fit(scheduler)


@pytest.mark.parametrize("name", LIVE_POLICIES)
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("cards", [(SMALL, LARGE, SMALL), (SMALL, SMALL, LARGE), (LARGE, SMALL, SMALL)])
def test_a_job_that_one_large_and_one_of_two_small_cards_hold_is_placed_there(name: str, hosts: int, cards: tuple[int, ...]) -> None:
    """It was told to ask for all three, as the two that it got might be the small ones."""
    scheduler, mirror = made(LIVE_POLICIES[name](), cards, (1.0, 1.0, 1.0), hosts)
    tell(scheduler, mirror, staged("job"), 1.0)
    (group,) = [known.group for known in scheduler.state.groups.values()]
    small = min(gpu for gpu, card in enumerate(cards) if card == SMALL)
    assert group.gpus == tuple(sorted((cards.index(LARGE), small))) and group.job_ids == ("job",)
    all_fit(scheduler)
    tell(scheduler, mirror, staged("second"), 2.0)
    tell(scheduler, mirror, JobFinished("job"), 3.0)
    assert scheduler.state.jobs["second"].group_id is not None
    (rejected,) = tell(scheduler, mirror, staged("never", parameters=10**8), 4.0)
    assert isinstance(rejected, RejectJob)


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_a_base_that_equal_gpus_hold_in_stages_of_unequal_seconds_is_trained(name: str) -> None:
    """By seconds the last has two layers of eight, as the head takes long, and six do not fit. A worker cuts by memory then; jobs over such
    a base were refused.
    """
    parts = replace(PARTS, head_weights=sum(PARTS.layer_weights) // 2)
    assert parts.cut_alike(2) == ((0, 6), (6, 8)) and parts.cut_for_any((1.0, 1.0), (500 * MB, 500 * MB)) == ((0, 4), (4, 8))
    scheduler, mirror = made(LIVE_POLICIES[name](), (500 * MB,) * 4, (1.0,) * 4)
    scheduler.state.cost.memory = dict.fromkeys(BASES, with_stages(WHOLE, parts, ordered=True))
    assert not any(isinstance(each, RejectJob) for each in tell(scheduler, mirror, staged("job"), 1.0))
    tell(scheduler, mirror, staged("second"), 2.0)
    assert {len(known.group.gpus) for known in scheduler.state.groups.values()} == {2}
    assert {name for known in scheduler.state.groups.values() for name in known.group.job_ids} == {"job", "second"}
    (rejected,) = tell(scheduler, mirror, staged("third", parameters=10**8), 3.0)
    assert isinstance(rejected, RejectJob)


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_hosts_that_come_in_any_order_are_counted_as_a_worker_counts_them(name: str) -> None:
    """The second host is there first: the first one was lost and came back."""
    scheduler, mirror = made(LIVE_POLICIES[name](), (520 * MB, 400 * MB), (1.0, 3.0), 2)
    for event in (GpusLost((0,)), NodeAdded("n0", (0,)), MemoryFound((0,), (520 * MB,)), staged("job")):
        tell(scheduler, mirror, event, 1.0)
    (group,) = [known.group for known in scheduler.state.groups.values()]
    assert sorted(group.gpus) == [0, 1]
    all_fit(scheduler)


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_a_job_that_fits_in_no_cut_is_refused_with_the_stage(name: str) -> None:
    scheduler, mirror = made(LIVE_POLICIES[name](), (SMALL, LARGE), (1.0, 1.0))
    (rejected,) = tell(scheduler, mirror, staged("job", parameters=10**8), 1.0)
    assert isinstance(rejected, RejectJob) and "on each of 2 equal stages" in rejected.reason


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [*LIVE_POLICIES, "all"])
def test_whatever_happens_all_stages_fit(name: str, seed: int) -> None:
    policy = residual_capacity(made_settings()) if name == "all" else LIVE_POLICIES[name]()
    chance = random.Random(seed)
    cards = tuple(chance.choice((SMALL, 600 * MB, LARGE)) for _ in range(4))
    scheduler, mirror = made(policy, cards, tuple(chance.choice((1.0, 1.0, 3.0)) for _ in cards), chance.choice((1, 2)))
    placed = 0
    for step in range(60):
        living = sorted(scheduler.state.jobs)
        event: Event = Tick()
        match chance.randrange(6):
            case 0 | 1 | 2:
                fields = {"parameters": chance.choice((10**5, 10**6, 10**7)), "longest": chance.choice((512, 3000, 9000))}
                event = staged(f"j{step}", gpus=chance.choice((2, 3, 4)), priority=chance.choice((0, 0, 1)), **fields)
            case 3 if living:
                event = JobFinished(chance.choice(living))
            case 4 if scheduler.state.groups:
                event = GroupReady(chance.choice(sorted(scheduler.state.groups)))
            case 5 if scheduler.state.groups and chance.random() < 0.3:
                event = GroupLost(chance.choice(sorted(scheduler.state.groups)), "test")
            case _:
                pass
        tell(scheduler, mirror, event, 30.0 * step)
        all_fit(scheduler)
        placed += len(scheduler.state.groups)
    assert placed
