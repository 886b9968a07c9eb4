"""The order and times that are foreseen for a queue, against those in which its jobs then start in a simulated cluster."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.sim.small_clusters import even_cost, made_job
from tlora.cluster.controller import run
from tlora.protocol import Action, ChangeGroup, Event, StartGroup
from tlora.scheduler.forecast import MOST_STARTS, Start, forecast
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.moves import MoveCosts
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import MappedJob
from tlora.sim.simulate import simulated_cluster

START_SECONDS = 20.0
MOVES = MoveCosts(cold_start_seconds=START_SECONDS, warm_start_seconds=START_SECONDS, standing_start_seconds=START_SECONDS)


def some_jobs(count: int, seed: int, **others: float) -> list[MappedJob]:
    """Of two tenants, all there at the start: of 5 to 60 minutes alone, some with room to share."""
    dice = random.Random(seed)
    jobs = [made_job(f"j{number}", dice.randrange(300, 3600)) for number in range(count)]
    bounds = [dice.choice((1.0, 1.5, 4.0)) for _ in jobs]
    return [
        replace(job, job=replace(job.job, tenant=dice.choice("ab"), max_slowdown=bound, **others))
        for job, bound in zip(jobs, bounds, strict=True)
    ]


class Watched:
    """What is foreseen at each of `moments`, once all that was known then has been decided on, and what then happens."""

    def __init__(
        self, policy: str, jobs: list[MappedJob], gpus: int, moments: tuple[float, ...], conditions: Conditions | None = None
    ) -> None:
        self.policy, self.moments, self.always = policy, list(moments), not moments
        self.foreseen: list[tuple[float, list[Start]]] = []
        self.started: dict[str, float] = {}
        cost = even_cost()
        self.scheduler = Scheduler(LIVE_POLICIES[policy](), cost)
        self.cluster = simulated_cluster(jobs, ClusterShape(1, gpus), cost, conditions or Conditions(moves=MOVES))
        self.now, self.execute = self.cluster.now, self.cluster.execute
        run(self.scheduler, self, self.see)

    def poll(self) -> list[Event]:
        now = self.now()
        if self.always or (self.moments and now >= self.moments[0]):
            self.moments = self.moments[1:]
            self.foreseen.append((now, forecast(self.scheduler.state, LIVE_POLICIES[self.policy](), START_SECONDS)))
        return self.cluster.poll()

    def see(self, now: float, item: Event | Action) -> None:
        if isinstance(item, StartGroup | ChangeGroup):
            for name in item.group.job_ids:
                self.started.setdefault(name, now)


@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=[] if name in ("fifo", "residual_capacity") else pytest.mark.slow) for name in LIVE_POLICIES]
)
def test_the_job_that_starts_was_said_to_be_the_next_and_nearly_when(policy: str, gpus: int) -> None:
    """At the last look before, each time until the queue is empty. A tick may come up to a minute sooner or later than is foreseen, and a
    policy may act on it; one start in a run may be off by more.
    """
    watched = Watched(policy, some_jobs(24, gpus), gpus, ())
    off: list[float] = []
    for name, at in watched.started.items():
        looks = [(now, starts) for now, starts in watched.foreseen if now < at and any(start.job_id == name for start in starts)]
        if not looks:
            continue  # it started as soon as it came
        now, starts = looks[-1]
        at_once = sum(other == at for other in watched.started.values())
        said = [start.job_id for start in starts if watched.started[start.job_id] > now]  # others ran before, and wait again
        assert name in said[:at_once], (at, starts[:5])
        off.append(abs(next(start.at for start in starts if start.job_id == name) - at))
    assert len(off) >= 20 and sorted(off)[-2] <= 65.0


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("policy", ["fifo", "backfill", "sjf"])
def test_without_sharing_and_stopping_the_whole_queue_starts_as_foreseen(policy: str, gpus: int) -> None:
    watched = Watched(policy, some_jobs(24, gpus), gpus, (100.0, 3000.0, 9000.0))
    assert len(watched.foreseen) == 3 and len(watched.started) == 24
    for now, starts in watched.foreseen:
        assert len(starts) >= 5
        for start in starts:
            assert start.at - now == pytest.approx(watched.started[start.job_id] - now, rel=0.01, abs=1.0)
        times = [watched.started[start.job_id] for start in starts]
        assert times == sorted(times)


def test_the_forecast_changes_nothing() -> None:
    """Neither the state nor what the policy does: with and without, the same happens."""
    with_it, without = (Watched("residual_capacity", some_jobs(20, 3), 2, moments) for moments in ((50.0, 500.0, 5000.0), (math.inf,)))
    assert with_it.started == without.started and with_it.foreseen and not without.foreseen


def test_starts_beyond_the_horizon_are_left_open() -> None:
    jobs = [made_job(f"j{number}", 60) for number in range(MOST_STARTS + 20)]
    watched = Watched("fifo", jobs, 1, (10.0,))
    ((_, starts),) = watched.foreseen
    assert [start.job_id for start in starts] == [f"j{number}" for number in range(1, MOST_STARTS + 20)]
    assert [start.at < math.inf for start in starts] == [True] * MOST_STARTS + [False] * 19


def test_without_a_queue_nothing_is_foreseen() -> None:
    watched = Watched("residual_capacity", [made_job("only", 100)], 1, (10.0,))
    assert watched.foreseen == [(START_SECONDS, [])]
