"""`residual_capacity` between tenants: GPU time that was used counts, decayed, and a tenant that has had less than its share is next."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.cases import in_every_run
from tests.scheduler.mirror import made_settings, made_spec
from tests.scheduler.timeline import Timeline, made_timeline
from tlora.protocol import GpusLost, JobFinished, JobSubmitted, MemoryFound, NodeAdded
from tlora.scheduler.settings import Settings
from tlora.scheduler.tenants import DAY_SECONDS, Tenants

LIVE = made_settings(elastic=False)  # what a server has by default
MANY = 200


def alone(name: str, seconds: float, gpus: int = 1, **others: Any) -> JobSubmitted:
    """Too large to share, of so many seconds."""
    values = {"steps": max(1, round(seconds / 1.5)), "parameters": 13 * 10**8, "longest": 1000, "max_slowdown": 1.0} | others
    return made_spec(name, gpus, 1000.0 * gpus, **values)


def sharing(name: str, seconds: float, **others: Any) -> JobSubmitted:
    """Small, and content with a sixth of its speed, so that several share a GPU."""
    return made_spec(name, tokens=200.0, steps=max(1, round(seconds / 0.7)), **({"max_slowdown": 6.0} | others))


def until_b_starts(timeline: Timeline) -> tuple[int, int]:
    """Jobs of others that start from now on before `b` does, and those that end before."""
    now = timeline.now
    while "b" not in timeline.started_at:
        assert timeline.now < 30 * DAY_SECONDS and timeline.scheduler.state.jobs
        timeline.until(timeline.now + 1.0)
    at = timeline.started_at["b"]
    return sum(now < start < at for start in timeline.started_at.values()), sum(now < end < at for end in timeline.ended_at.values())


@pytest.mark.parametrize("settings", [LIVE, made_settings(preemption=False, elastic=False)])
@pytest.mark.parametrize("gpus", in_every_run([1, 2], 1))
@pytest.mark.parametrize("made", [alone, sharing])
@pytest.mark.parametrize("length", [0.2, 20.0])
def test_one_job_after_200_of_another_tenant_is_the_next_to_start(settings: Settings, gpus: int, made: Any, length: float) -> None:
    """Whether it is shorter or longer than theirs, and where a place in a group is what opens."""
    timeline = made_timeline(gpus, settings=settings)
    timeline.tell(*[made(f"a{index}", 600.0 + 10.0 * (7 * index % 31), tenant="a") for index in range(MANY)])
    timeline.until(1500.0)
    timeline.tell(made("b", 600.0 * length, tenant="b"))
    started, ended = until_b_starts(timeline)
    assert started == 0 and ended == 0


@pytest.mark.parametrize("hours", [0.0, 30.0])
def test_jobs_that_have_waited_too_long_do_not_go_before_a_tenant_below_its_share(hours: float) -> None:
    timeline = made_timeline(1, settings=LIVE)
    timeline.tell(*[alone(f"a{index}", 1000.0, tenant="a") for index in range(MANY)])
    timeline.until(hours * 3600.0 + 300.0)
    timeline.tell(alone("b", 5000.0, tenant="b"))
    assert until_b_starts(timeline)[0] == 0


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_job_over_another_base_gets_the_gpu_that_a_shared_group_leaves(gpus: int) -> None:
    """No further job of the other tenant joins the group meanwhile, though these are shorter than all there: it would never end."""
    timeline = made_timeline(gpus, settings=LIVE)
    timeline.tell(*[sharing(f"a{index}", 600.0 + 50.0 * (index % 7), tenant="a", max_slowdown=2.5) for index in range(MANY)])
    timeline.until(1500.0)
    assert all(len(known.group.job_ids) > 1 for known in timeline.scheduler.state.groups.values())
    timeline.tell(sharing("b", 60_000.0, base_model="south", tenant="b"))
    timeline.tell(*[sharing(f"short{index}", 60.0, tenant="a", max_slowdown=2.5) for index in range(MANY)])
    assert until_b_starts(timeline)[0] == 0


def idle_gpu_seconds(timeline: Timeline, until: float) -> float:
    """To a second, while there are jobs that wait."""
    idle = 0.0
    while timeline.now < until:
        assert timeline.scheduler.state.pending
        timeline.until(timeline.now + 1.0)
        idle += timeline.scheduler.state.pool.num_free
    return idle


@pytest.mark.parametrize("settings", [LIVE, made_settings()])
def test_no_gpus_are_kept_for_a_job_that_those_there_cannot_hold(settings: Settings) -> None:
    """It asks for two nodes and one is lost. The other tenant's jobs go on, until the node is back."""
    timeline = made_timeline(4, 4, settings=settings)
    timeline.tell(*[alone(f"a{index}", 600.0, tenant="a") for index in range(MANY)])
    timeline.until(700.0)
    timeline.tell(GpusLost((4, 5, 6, 7)), alone("b", 600.0, gpus=8, tenant="b"))
    assert timeline.scheduler.state.pool.num_gpus == 4 and idle_gpu_seconds(timeline, 6000.0) == 0
    timeline.tell(NodeAdded("n1", (4, 5, 6, 7), "r0"))
    assert until_b_starts(timeline)[0] == 0


@pytest.mark.parametrize("settings", [LIVE, made_settings()])
def test_gpus_are_kept_where_the_job_has_room_and_not_on_smaller_ones(settings: Settings) -> None:
    timeline = made_timeline(1, 1, 1, settings=settings)
    timeline.tell(MemoryFound((0, 1, 2), (80 * 10**9, 140 * 10**9, 80 * 10**9)))
    timeline.tell(*[alone(f"a{index}", 600.0 + 100.0 * (index % 7), tenant="a") for index in range(MANY)])
    timeline.until(1500.0)
    timeline.tell(alone("b", 600.0, tenant="b", parameters=10**9, longest=16000))
    assert timeline.job("b").least_room > 80 * 10**9
    free_at = min(
        timeline.now + job.remaining_seconds(timeline.now)
        for job in timeline.scheduler.state.jobs.values()
        if job.group_id and 1 in timeline.gpus_of(job.spec.job_id)
    )
    assert idle_gpu_seconds(timeline, free_at + 60.0) == 0 and timeline.started_at["b"] == pytest.approx(free_at)


def test_priority_goes_before_shares() -> None:
    timeline = made_timeline(1, settings=LIVE)
    timeline.tell(*[alone(f"a{index}", 600.0, tenant="a", priority=1.0) for index in range(5)])
    timeline.until(100.0)
    timeline.tell(alone("b", 600.0, tenant="b"))
    assert until_b_starts(timeline) == (4, 4)


@pytest.mark.slow
def test_a_long_job_is_not_stopped_for_a_tenant_that_has_had_more() -> None:
    """Theirs are shorter, and would be far more urgent."""
    timeline = made_timeline(1, settings=LIVE)
    timeline.tell(*[alone(f"a{index}", 600.0, tenant="a") for index in range(MANY)])
    timeline.until(20_000.0)
    timeline.tell(alone("b", 15_000.0, tenant="b"))
    timeline.until(30 * DAY_SECONDS)
    assert timeline.ended_at["b"] - timeline.started_at["b"] < 15_100.0 and "b" not in timeline.moves


@pytest.mark.parametrize("lengths", in_every_run([((300.0, 300.0),), ((300.0, 3000.0),), ((3000.0, 300.0),)], 1))
def test_tenants_whose_jobs_wait_get_equal_gpu_time_whatever_these_last(lengths: tuple[float, float]) -> None:
    timeline = made_timeline(2, settings=LIVE)
    timeline.tell(
        *[alone(f"{tenant}{index}", own, tenant=tenant) for tenant, own in zip("ab", lengths, strict=True) for index in range(MANY)]
    )
    timeline.until(30_000.0)
    used = timeline.scheduler.state.tenants.used_at(timeline.now)
    assert set(used) == {"a", "b"} and 0.8 < used["a"] / used["b"] < 1.25


def test_of_several_tenants_the_one_that_has_used_least_is_next() -> None:
    """`c` has had one job of a few minutes, `b` none."""
    timeline = made_timeline(1, settings=LIVE)
    timeline.tell(*[alone(f"a{index}", 600.0, tenant="a") for index in range(MANY)])
    timeline.until(3100.0)
    timeline.tell(alone("c", 60.0, tenant="c"))
    timeline.until(6100.0)
    assert "c" in timeline.ended_at
    timeline.tell(alone("c2", 60.0, tenant="c"), alone("b", 6000.0, tenant="b"))
    timeline.until(30_000.0)
    assert (
        timeline.started_at["b"]
        < timeline.started_at["c2"]
        < min(at for at in timeline.started_at.values() if at > timeline.started_at["c2"])
    )


# -- what is counted -----------------------------------------------------------------------------------------------------


def test_use_fades_by_half_in_each_half_life() -> None:
    tenants = Tenants(half_life_seconds=1000.0)
    tenants.hold_gpus("a", 2.0, 0.0)
    tenants.hold_gpus("a", -2.0, 10.0)
    after = tenants.used_at(10.0)["a"]
    assert after == pytest.approx(20.0, rel=0.01)
    assert tenants.used_at(1010.0)["a"] == pytest.approx(after / 2) and tenants.used_at(4010.0)["a"] == pytest.approx(after / 16)
    assert tenants.used_at(1e6) == {}


def test_use_that_goes_on_nears_the_half_lifes_own_amount() -> None:
    """Each instant counts 2^(-age / half_life): the integral of one GPU for ever is half_life / ln 2; half of it after one half-life."""
    tenants = Tenants(half_life_seconds=1000.0)
    tenants.hold_gpus("a", 1.0, 0.0)
    for seconds, share in ((1000.0, 0.5), (2000.0, 0.75), (1e5, 1.0)):
        assert tenants.used_at(seconds)["a"] == pytest.approx(share * 1000.0 / math.log(2))


def test_levels_are_powers_of_two_of_the_share_between_those_with_open_jobs() -> None:
    tenants = Tenants()
    for tenant, used in (("a", 1300.0), ("b", 100.0), ("gone", 1e9)):
        tenants.recall(tenant, used, 0.0)
    tenants.add_job("a")
    assert tenants.levels(0.0) == {}, "it is alone"
    tenants.add_job("b")
    assert tenants.levels(0.0) == {"a": 0, "b": -3}
    tenants.add_job("c")
    assert tenants.levels(0.0) == {"a": 1, "b": -3, "c": -10}
    tenants.drop_job("a")
    tenants.drop_job("b")
    assert tenants.levels(0.0) == {}


def test_a_group_is_charged_to_its_members_in_equal_parts_and_lent_gpus_to_no_tenant() -> None:
    timeline = made_timeline(2, settings=made_settings())
    timeline.tell(sharing("a", 5000.0, tenant="a"))
    timeline.until(1000.0)
    held = len(timeline.gpus_of("a"))
    assert timeline.scheduler.state.tenants.used_at(1000.0) == {"a": pytest.approx(1000.0, rel=0.01)}, f"of {held} GPUs it asked for one"
    timeline = made_timeline(1, settings=LIVE)
    timeline.tell(sharing("a", 5000.0, tenant="a"), sharing("b", 5000.0, tenant="b"))
    timeline.until(1000.0)
    assert timeline.gpus_of("a") == timeline.gpus_of("b") == (0,)
    assert timeline.scheduler.state.tenants.used_at(1000.0) == {"a": pytest.approx(500.0, rel=0.01), "b": pytest.approx(500.0, rel=0.01)}


def test_what_is_charged_is_what_jobs_hold() -> None:
    """Through joins, ends, holds and moves: the sum over tenants is the time for which GPUs were held."""
    timeline = made_timeline(2, settings=LIVE)
    timeline.tell(*[sharing(f"{tenant}{index}", 300.0 + 40.0 * index, tenant=tenant) for index in range(10) for tenant in "abc"])
    timeline.until(200.0)
    timeline.tell(JobFinished("a0"))
    while timeline.scheduler.state.jobs:
        timeline.until(timeline.now + 100.0)
    tenants, ends = timeline.scheduler.state.tenants, max(timeline.ended_at.values())
    assert tenants.open_jobs == {} and not tenants.levels(timeline.now)
    charged = sum(tenants.used_at(timeline.now).values())
    assert ends < charged <= 2 * ends
