"""What a rank keeps of jobs that others compute too, where no other rank is needed to see it. With others: `tests/cluster`."""

from __future__ import annotations

from typing import Any

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.messages import Faulty, Spread
from tlora.engine.ranks.spanning_jobs import RankContext, SpanningJobs
from tlora.job import JobSpec
from tlora.planning.plan import PlannedJob
from tlora.worker_protocol import Join

SPEC = JobSpec.model_validate({"name": "a", "data": "d.jsonl", "gpus": 2, "batch_size": 4})
SPAN = ReplicaPlacement(2, (1, 0))


class Group:
    """Of a driver, what is asked for."""

    def __init__(self) -> None:
        self.group, self.runs, self.left = self, {"a": None}, list[str]()

    def leave(self, name: str) -> None:
        self.left.append(name)


def made() -> tuple[SpanningJobs, list[Any]]:
    told: list[Any] = []
    return SpanningJobs(RankContext(0, 2), told.append), told


def test_a_part_with_problems_is_told_and_not_opened() -> None:
    parts, told = made()
    follow = Spread(Join(SPEC), SPAN)
    parts.follow(follow)
    parts.planned(follow, PlannedJob(SPEC, problems=["no such file", "too long"]))
    assert told == [Faulty("a", "no such file; too long")]


def test_a_part_that_has_left_is_not_opened() -> None:
    parts, told = made()
    first = Spread(Join(SPEC, attempt=1), SPAN)
    parts.follow(first)
    parts.unfollow("a", Group())  # type: ignore[arg-type]
    parts.planned(first, PlannedJob(SPEC, problems=["why"]))
    parts.follow(Spread(Join(SPEC, attempt=2), SPAN))
    parts.planned(first, PlannedJob(SPEC, problems=["why"]))
    assert not told and parts.is_here("a")


def test_a_part_leaves_the_group() -> None:
    parts, _ = made()
    parts.follow(Spread(Join(SPEC), SPAN))
    group = Group()
    parts.unfollow("a", group)  # type: ignore[arg-type]
    parts.unfollow("a", group)  # type: ignore[arg-type]
    assert group.left == ["a"] and not parts.is_here("a")


def test_a_job_that_has_ended_spans_no_longer() -> None:
    parts, _ = made()
    parts.spread(Spread(Join(SPEC), SPAN))
    assert parts.span_of("a") == SPAN
    parts.end("a"), parts.end("a")
    assert parts.span_of("a") is None
