"""GPUs of unequal memory: each group fits on each GPU that it has, and a job that fits on the large ones alone gets one of these."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.scheduler.mirror import BASES, Mirror, made_cost, made_settings, made_spec, tell
from tlora.protocol import (
    Event,
    GpusLost,
    GroupLost,
    GroupReady,
    JobFinished,
    JobSubmitted,
    MemoryFound,
    NodeAdded,
    RejectJob,
    StartGroup,
    Tick,
)
from tlora.scheduler.gpu_memory import GpuMemory
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.shape.cost import CostModel
from tlora.shape.memory import BaseMemory
from tlora.shape.token_cost import recompute_factor

GB = 10**9
CARDS = (24 * GB, 80 * GB, 24 * GB, 48 * GB)
SMALL_CARDS = (24 * GB,) * 4
MEMORY = BaseMemory((16 * GB, 9 * GB, 7 * GB, 6 * GB), 0.5 * GB, 1e6, 1e5)
"""24 GB hold the base and micro-batches of 4,096 tokens; 48 and 80 GB the largest."""


def costs() -> CostModel:
    cost = made_cost()
    cost.memory = dict.fromkeys(BASES, MEMORY)
    return cost


def made(policy: Policy, *cards: int) -> tuple[Scheduler, Mirror]:
    scheduler, mirror = Scheduler(policy, costs()), Mirror()
    tell(scheduler, mirror, NodeAdded("n", tuple(range(len(cards)))), 0.0)
    tell(scheduler, mirror, MemoryFound(tuple(range(len(cards))), cards), 0.0)
    return scheduler, mirror


def small(name: str, **others: object) -> JobSubmitted:
    return made_spec(name, **{"parameters": 10**7, "longest": 512, "tokens": 8000.0, **others})  # type: ignore[arg-type]


def all_fit(scheduler: Scheduler) -> None:
    """Base, adapters and micro-batch of each group on each of its GPUs."""
    state = scheduler.state
    for known in state.groups.values():
        group = known.group
        jobs = [state.jobs[name].spec for name in group.job_ids]
        parameters = sum(spec.profile.adapter_parameters for spec in jobs)
        longest = max(spec.profile.longest_sample_tokens for spec in jobs)
        tokens, count = group.plan.token_budget // len(group.gpus), len(group.gpus)
        assert tokens >= longest
        for gpu in group.gpus:
            room = state.memory.room_bytes[gpu]
            of = state.cost.least_bytes if tokens == longest else state.cost.memory_bytes  # a lone sample's layers are computed again
            assert of(group.base_model, parameters, tokens, count, room) <= room, f"{group} does not fit on GPU {gpu}"


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_a_job_that_fits_on_large_cards_alone_gets_one(name: str) -> None:
    """Also where all of these are busy when it comes: it waits, and small jobs that come after it do not wait for it."""
    scheduler, mirror = made(LIVE_POLICIES[name](), *CARDS)
    tell(scheduler, mirror, small("wide", longest=16384, tokens=16384.0, parameters=2 * 10**9), 1.0)  # 36 GB of adapter
    (group,) = [known.group for known in scheduler.state.groups.values() if "wide" in known.group.job_ids]
    assert group.gpus == (1,), "the only GPU on which it fits"
    tell(scheduler, mirror, small("second", longest=16384, tokens=16384.0, parameters=2 * 10**9), 2.0)
    tell(scheduler, mirror, small("third"), 3.0)
    assert "second" in scheduler.state.pending
    assert name == "fifo" or scheduler.state.jobs["third"].group_id is not None
    all_fit(scheduler)
    tell(scheduler, mirror, JobFinished("wide"), 4.0)
    (group,) = [known.group for known in scheduler.state.groups.values() if "second" in known.group.job_ids]
    assert group.gpus == (1,)
    all_fit(scheduler)


def test_one_more_gpu_with_the_memory_of_all_others_forgets_no_prediction() -> None:
    """A thousand hosts come GPU by GPU while thousands of jobs wait. What jobs of several GPUs may hope for follows all the same."""
    scheduler, mirror = Scheduler(LIVE_POLICIES["residual_capacity"](), costs()), Mirror()
    tell(scheduler, mirror, NodeAdded("n", (0, 1, 2)), 0.0)
    tell(scheduler, mirror, MemoryFound((0,), (80 * GB,)), 0.0)
    for name, gpus in (("one", 1), ("two", 2), ("three", 3)):
        tell(scheduler, mirror, small(name, gpus=gpus), 1.0)
    state = scheduler.state
    corrected = state.cost.times_corrected
    for gpu in (1, 2):
        tell(scheduler, mirror, MemoryFound((gpu,), (80 * GB,)), 2.0)
        for job in state.jobs.values():
            assert job.least_room == state.memory.least_room(state.cost, job.spec, state.pool.most_gpus) == 0.0
    assert state.cost.times_corrected == corrected
    tell(scheduler, mirror, NodeAdded("m", (3,)), 3.0)
    tell(scheduler, mirror, MemoryFound((3,), (24 * GB,)), 3.0)
    assert state.cost.times_corrected > corrected, "another room"


def test_gpus_that_differ_by_some_bytes_count_as_one_kind_and_none_as_larger_than_it_is() -> None:
    """As one model's do. A model of its own, and one that lost a third of its memory to others, are found all the same."""
    draw = random.Random(7)
    memory, found, changes = GpuMemory(), dict[int, int](), 0
    for count in range(2000):
        gpu = draw.randrange(400)
        most = 24 * GB if gpu % 4 == 0 else 80 * GB
        found[gpu] = most - draw.randrange(100_000_000) - (most // 3 if count % 500 == 499 else 0)
        memory._most.pop(gpu, None)  # so that it may grow again
        before = memory.rooms
        memory.find((gpu,), (found[gpu],))
        changes += memory.rooms != before
        assert all(room <= found[known] <= room * 1.01 for known, room in memory.room_bytes.items())
        assert set(memory.rooms) == set(memory.room_bytes.values()) <= set(found.values()), "each is what a GPU has"
    assert memory.room_bytes.keys() == found.keys() and 2 <= len(memory.rooms) <= 6
    assert changes < 60, "of 2,000: a new least, and one that goes"


def test_a_job_waits_until_it_is_known_that_a_new_gpu_has_room_for_it() -> None:
    """Of two kinds; one more of the smaller forgets no prediction."""
    scheduler, mirror = made(LIVE_POLICIES["residual_capacity"](), 24 * GB, 80 * GB)
    state = scheduler.state
    for name in ("one", "two"):
        tell(scheduler, mirror, small(name, longest=16384, tokens=16384.0, parameters=2 * 10**9), 1.0)
    corrected = state.cost.times_corrected
    for gpu, room in ((2, 24 * GB + 4096), (3, 80 * GB + 4096)):
        assert len(state.pending) == 1 and state.cost.times_corrected == corrected, "it fits on large ones alone"
        tell(scheduler, mirror, NodeAdded(f"m{gpu}", (gpu,)), 2.0)
        tell(scheduler, mirror, MemoryFound((gpu,), (room,)), 2.0)
    assert not state.pending and [state.memory.room_bytes[gpu] for gpu in (2, 3)] == [24 * GB, 80 * GB]
    all_fit(scheduler)


def test_small_jobs_leave_large_cards_to_others() -> None:
    scheduler, mirror = made(LIVE_POLICIES["residual_capacity"](), *CARDS)
    for index in range(3):
        tell(scheduler, mirror, small(f"j{index}", tokens=1e5, max_slowdown=1.0), 1.0)
    assert sorted(gpu for known in scheduler.state.groups.values() for gpu in known.group.gpus) == [0, 2, 3]


def test_budgets_are_those_of_the_cards_that_are_there() -> None:
    """The same job on a card of 24 GB and on one of 80 GB."""
    budgets = {}
    for card in (24 * GB, 80 * GB):
        scheduler, mirror = made(LIVE_POLICIES["residual_capacity"](), card)
        (start,) = tell(scheduler, mirror, small("a", tokens=16384.0), 1.0)
        assert isinstance(start, StartGroup)
        budgets[card] = start.group.plan.token_budget
    assert budgets == {24 * GB: 4096, 80 * GB: 16384}


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_a_card_of_which_nothing_is_known_counts_as_the_smallest_that_is(name: str) -> None:
    """Not as the one on which its base's constants were measured."""
    scheduler, mirror = Scheduler(LIVE_POLICIES[name](), costs()), Mirror()
    tell(scheduler, mirror, NodeAdded("n", (0, 1)), 0.0)
    tell(scheduler, mirror, MemoryFound((0,), (24 * GB,)), 0.0)
    for job in "ab":
        tell(scheduler, mirror, small(job, tokens=16384.0, max_slowdown=1.0), 1.0)
    groups = [known.group for known in scheduler.state.groups.values()]
    assert sorted(gpu for group in groups for gpu in group.gpus) == [0, 1]
    assert {group.plan.token_budget // len(group.gpus) for group in groups} == {4096}


def test_a_group_planned_with_layers_recomputed_is_predicted_slower() -> None:
    """A card with room for the base, the adapter and 700 tokens, or 512 of samples that are all as long with 9 of 31 layers recomputed."""
    memory, seconds = replace(MEMORY, bytes_by_gpus=(16 * GB, 16 * GB), num_layers=31), list[float]()
    for room in (7e8, 3.6e8):
        scheduler, mirror = made(LIVE_POLICIES["residual_capacity"]())
        tell(scheduler, mirror, NodeAdded("n", (0,)), 0.0)
        scheduler.state.cost.memory = dict.fromkeys(BASES, memory)
        tell(scheduler, mirror, MemoryFound((0,), (int(16.5 * GB + 18e7 + room),)), 0.0)
        scheduler.state.memory.room_bytes[0] = int(16.5 * GB + 18e7 + room)
        (start,) = tell(scheduler, mirror, small("a"), 1.0)
        assert isinstance(start, StartGroup) and start.group.plan.token_budget == 512
        seconds += scheduler.state.groups[start.group.group_id].step_seconds
        layers = start.group.plan.recomputed_layers
        assert layers == (0 if room == 7e8 else math.ceil((512 * 1e6 - room) / (512 * 9e5 / 30)))
        assert scheduler.state.jobs["a"].step_seconds == seconds[-1]
    assert seconds[1] == pytest.approx(seconds[0] * recompute_factor(layers, 31)) and layers == 10


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_what_fits_on_no_card_is_rejected_with_the_numbers(name: str) -> None:
    scheduler, mirror = made(LIVE_POLICIES[name](), *SMALL_CARDS)
    (rejected,) = tell(scheduler, mirror, small("a", parameters=2 * 10**9), 1.0)
    assert isinstance(rejected, RejectJob) and "take 48.94 GiB" in rejected.reason
    assert "at most 22.35 GiB may be used of a GPU here" in rejected.reason
    scheduler, mirror = made(LIVE_POLICIES[name](), *CARDS)
    (rejected,) = tell(scheduler, mirror, small("a", parameters=2 * 10**9, gpus=2), 1.0)
    assert isinstance(rejected, RejectJob) and "1 of those here has so much. Ask for 1" in rejected.reason
    assert tell(scheduler, mirror, small("b", parameters=2 * 10**9, gpus=1), 2.0), "the remedy"


def test_less_is_free_than_the_driver_says() -> None:
    """What a worker finds counts for what is planned next, and a job that waits and has room nowhere any more is told so."""
    scheduler, mirror = made(LIVE_POLICIES["fifo"](), 80 * GB)
    tell(scheduler, mirror, small("runs", tokens=16384.0), 1.0)
    tell(scheduler, mirror, small("waits", parameters=2 * 10**9), 2.0)
    tell(scheduler, mirror, small("small", tokens=16384.0), 3.0)
    (rejected,) = tell(scheduler, mirror, MemoryFound((0,), (24 * GB,)), 4.0)
    assert isinstance(rejected, RejectJob) and rejected.job_id == "waits"
    (_, start) = tell(scheduler, mirror, JobFinished("runs"), 5.0)
    assert isinstance(start, StartGroup) and start.group.plan.token_budget == 4096
    tell(scheduler, mirror, MemoryFound((0,), (90 * GB,)), 6.0)
    assert scheduler.state.memory.room_bytes == {0: 80 * GB}, "never more than the card has"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", [*LIVE_POLICIES, "all"])
def test_whatever_happens_all_groups_fit(name: str, seed: int) -> None:
    policy = residual_capacity(made_settings()) if name == "all" else LIVE_POLICIES[name]()
    random_of = random.Random(seed)
    scheduler, mirror = made(policy, *CARDS, *CARDS)
    for step in range(60):
        now = 30.0 * step
        living = sorted(scheduler.state.jobs)
        event: Event = Tick()
        match random_of.randrange(6):
            case 0 | 1 | 2:
                parameters = random_of.choice((10**7, 10**8, 10**9, 2 * 10**9))
                longest, gpus = random_of.choice((512, 3000, 9000)), random_of.choice((1, 1, 2, 3))
                tokens = random_of.choice((1000.0, 16384.0))
                event = small(
                    f"j{step}", parameters=parameters, longest=longest, gpus=gpus, tokens=tokens, priority=random_of.choice((0, 0, 1))
                )
            case 3 if living:
                event = JobFinished(random_of.choice(living))
            case 4 if scheduler.state.groups:
                event = GroupReady(random_of.choice(sorted(scheduler.state.groups)))
            case 5 if scheduler.state.groups and random_of.random() < 0.3:
                event = GroupLost(random_of.choice(sorted(scheduler.state.groups)), "test")
            case _:
                pass
        tell(scheduler, mirror, event, now)
        all_fit(scheduler)


@pytest.mark.parametrize("name", ["srtf", "las", "residual_capacity"])
@pytest.mark.parametrize(("hosts", "gpus"), [(((80, 24), (24, 80)), 2), (((80,), (24, 24), (80, 80)), 3), (((80, 24), (80, 24, 80)), 2)])
def test_those_on_large_cards_give_way_to_a_job_that_these_alone_hold_together(
    name: str, hosts: tuple[tuple[int, ...], ...], gpus: int
) -> None:
    """They lie on several hosts: no room was made on them."""
    scheduler, mirror = Scheduler(LIVE_POLICIES[name](), costs()), Mirror()
    for host, cards in enumerate(hosts):
        own = tuple(range(10 * host, 10 * host + len(cards)))
        tell(scheduler, mirror, MemoryFound(own, tuple([card * GB for card in cards])), 0.0)
        tell(scheduler, mirror, NodeAdded(f"n{host}", own), 0.0)
    state = scheduler.state
    for gpu in sorted(state.pool.node_of):
        tell(scheduler, mirror, small(f"long{gpu}", steps=10**6, max_slowdown=1.0), 1.0)
    assert not state.pool.num_free
    tell(scheduler, mirror, small("wide", gpus=gpus, longest=512, parameters=2 * 10**9), 50_000.0)
    (group,) = [known.group for known in state.groups.values() if "wide" in known.group.job_ids]
    assert len(group.gpus) == gpus and all(state.memory.room_bytes[gpu] == 80 * GB for gpu in group.gpus)
    assert len(state.pending) == gpus, "no others give way"
    all_fit(scheduler)


@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_a_job_for_large_cards_alone_gets_them_wherever_they_lie(name: str) -> None:
    """It was rejected, as hosts of four are too few of which two have two cards."""
    scheduler, mirror = Scheduler(LIVE_POLICIES[name](), costs()), Mirror()
    for first, size, card in ((0, 4, 80), (10, 2, 80), (20, 2, 80), (30, 1, 24)):
        tell_host(scheduler, mirror, first, size, card * GB)
    tell(scheduler, mirror, small("wide", gpus=8, longest=512, parameters=2 * 10**9), 1.0)
    (group,) = [known.group for known in scheduler.state.groups.values()]
    large = (0, 1, 2, 3, 10, 11, 20, 21)
    assert group.gpus == large or (name == "residual_capacity-growth" and set(group.gpus) < set(large))
    all_fit(scheduler)


def tell_host(scheduler: Scheduler, mirror: Mirror, first: int, size: int, card: int) -> None:
    gpus = tuple(range(first, first + size))
    tell(scheduler, mirror, MemoryFound(gpus, (card,) * size), 0.0)
    tell(scheduler, mirror, NodeAdded(f"n{first}", gpus), 0.0)


@pytest.mark.parametrize("large_is", ["lost", "busy"])
@pytest.mark.parametrize(("size", "gpus", "least_gpus"), [(2, 3, 1), (2, 4, 4), (4, 8, 1), (4, 6, 5)])
@pytest.mark.parametrize("name", LIVE_POLICIES)
def test_a_job_wider_than_a_host_waits_for_hosts_with_room_for_it(name: str, size: int, gpus: int, least_gpus: int, large_is: str) -> None:
    """It fits on two hosts alone, of which one is lost or busy. It gets no GPU of a smaller one, and others start meanwhile."""
    scheduler, mirror = Scheduler(LIVE_POLICIES[name](), costs(), on_wait=lambda *_: None), Mirror()
    large = {"parameters": 2 * 10**9, "longest": 512}
    for first in (0, 10):
        tell_host(scheduler, mirror, first, size, 80 * GB)
    if large_is == "lost":
        tell(scheduler, mirror, GpusLost(tuple(range(10, 10 + size))), 1.0)
    else:
        tell(scheduler, mirror, made_spec("busy", size, 8000.0 * size, 10**6, max_slowdown=1.0, **large), 1.0)
    for first in (20, 30, 40):
        tell_host(scheduler, mirror, first, size, 24 * GB)
    tell(scheduler, mirror, made_spec("wide", gpus, 8000.0 * gpus, least_gpus=least_gpus, **large), 2.0)
    for now in range(10, 2000, 500):
        tell(scheduler, mirror, Tick(), float(now))
    all_fit(scheduler)
    tell(scheduler, mirror, small("small"), 3000.0)
    assert name == "fifo" or scheduler.state.jobs["small"].group_id is not None
    if large_is == "lost":
        tell_host(scheduler, mirror, 10, size, 80 * GB)
    else:
        tell(scheduler, mirror, JobFinished("busy"), 3001.0)
    for now in range(4000, 40000, 500):
        if scheduler.state.jobs["wide"].group_id is None and "small" in scheduler.state.jobs:
            tell(scheduler, mirror, JobFinished("small"), float(now))
        tell(scheduler, mirror, Tick(), float(now))
    assert scheduler.state.jobs["wide"].group_id is not None
    all_fit(scheduler)
