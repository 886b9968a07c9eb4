"""`residual_capacity`: jobs that are wider than a node take GPUs from others anywhere; a decision looks at a bounded number of nodes."""

from __future__ import annotations

import pytest

from tests.scheduler.mirror import made_settings, made_spec
from tests.scheduler.timeline import Timeline, made_timeline, wanted
from tlora.protocol import JobSubmitted, StopGroup
from tlora.scheduler.decision import Decision

RESTED = 1800.0  # more than a rest
LONG = 1_000_000


def made_job(name: str, gpus: int, steps: int, samples: int = 1, bound: float = 1.0) -> JobSubmitted:
    """Too large to share, of so many samples for each GPU."""
    return made_spec(name, gpus, 1000.0 * gpus, steps, 13 * 10**8, 1000 // samples, max_slowdown=bound)


def nodes_of(timeline: Timeline, name: str) -> set[str]:
    return {timeline.scheduler.state.pool.node_of[gpu] for gpu in timeline.gpus_of(name)}


def test_a_job_of_more_than_sixteen_nodes_stops_longer_ones() -> None:
    timeline = made_timeline(*[2] * 40)
    timeline.tell(*[made_job(f"j{index}", 2, LONG) for index in range(40)])
    timeline.until(RESTED)
    actions = timeline.tell(made_job("wide", 50, 100))
    assert len(timeline.gpus_of("wide")) == 50 and sum(isinstance(action, StopGroup) for action in actions) == 25


def test_those_that_are_far_less_urgent_are_stopped_and_no_others() -> None:
    timeline = made_timeline(*[2] * 24)
    timeline.tell(*[made_job(f"short{index}", 2, 1500) for index in range(4)], *[made_job(f"long{index}", 2, LONG) for index in range(20)])
    timeline.until(RESTED)
    timeline.tell(made_job("too wide", 42, 1000))
    assert not timeline.gpus_of("too wide") and all(timeline.gpus_of(f"short{index}") for index in range(4))
    timeline.tell(made_job("wide", 40, 1000))
    assert len(timeline.gpus_of("wide")) == 40 and all(timeline.gpus_of(f"short{index}") for index in range(4))


def test_a_group_on_several_nodes_stops_where_it_cannot_give_as_many_as_are_wanted() -> None:
    """The bound of the long one lets it give one node; the short one needs all four."""
    timeline = made_timeline(4, 4, 4, 4)
    timeline.tell(made_job("long", 16, LONG, samples=4, bound=1.5))
    timeline.until(RESTED)
    timeline.tell(made_job("short", 16, 100))
    assert len(timeline.gpus_of("short")) == 16 and not timeline.gpus_of("long")
    timeline.until(RESTED + 600.0)
    assert timeline.gpus_of("long")


def test_a_group_gives_several_nodes_that_it_has_beyond_its_share() -> None:
    timeline = made_timeline(4, 4, 4, 4)
    timeline.tell(made_job("grown", 4, LONG, samples=8, bound=2.0))
    timeline.until(3 * RESTED)
    assert len(timeline.gpus_of("grown")) == 16
    (group,) = [group for group in wanted(timeline.tell(made_job("wide", 12, LONG))) if group.job_ids == ("grown",)]
    assert len(group.gpus) == 4 and len(nodes_of(timeline, "wide")) == 3


def test_nobody_is_stopped_for_more_gpus_than_a_job_asks_for() -> None:
    timeline = made_timeline(4, 4, 4, 4)
    timeline.tell(*[made_job(f"j{index}", 4, LONG) for index in range(4)])
    timeline.until(RESTED)
    timeline.tell(made_job("wide", 8, 2000, samples=8))
    assert len(timeline.gpus_of("wide")) == 8 and sum(bool(timeline.gpus_of(f"j{index}")) for index in range(4)) == 2


@pytest.mark.parametrize("waiting", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_a_decision_looks_at_a_bounded_number_of_nodes(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[list[int]] = []
    plain, made = Decision.may_look_at, Decision.__init__

    def counted(self: Decision, nodes: int) -> bool:
        allowed = plain(self, nodes)
        looks[-1].append(nodes if allowed else 0)
        return allowed

    def noted(self: Decision, *arguments: object) -> None:
        looks.append([])
        made(self, *arguments)  # type: ignore[arg-type]

    timeline = made_timeline(*[2] * 200, settings=made_settings(sharing=False))
    timeline.tell(*[made_job(f"j{index}", 2, LONG) for index in range(200)])
    timeline.until(RESTED)
    monkeypatch.setattr(Decision, "__init__", noted)
    monkeypatch.setattr(Decision, "may_look_at", counted)
    timeline.tell(*[made_job(f"w{index}", 2 + index % 399, LONG) for index in range(waiting)])
    assert max(sum(each) for each in looks) <= 4096 and max(sum(each) for each in looks) > 1000
