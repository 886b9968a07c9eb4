"""What a rank keeps of jobs that others compute too, where no other rank is needed to see it. With others: `tests/cluster`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, PrefixStore

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.messages import Faulty, Meet, Spread
from tlora.engine.ranks.spanning_jobs import RankContext, SpanningJobs
from tlora.errors import RankError
from tlora.job import JobSpec
from tlora.planning.planned_job import PlannedJob
from tlora.worker_protocol import Join

SPEC = JobSpec.model_validate({"name": "a", "data": "d.jsonl", "gpus": 2, "batch_size": 4})
SPAN = ReplicaPlacement(2, (1, 0))


class Group:
    """Of a driver, what is asked for."""

    def __init__(self) -> None:
        self.group, self.runs, self.left = self, {"a": None}, list[str]()
        self.model, self.bank, self.device, self.sum_dtype = self, self, "cpu", torch.float32

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


def test_a_rank_that_dies_as_a_jobs_ranks_meet_is_told_with_that_job(tmp_path: Path) -> None:
    """The other rank has met this one, and has ended since."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    parts = SpanningJobs(RankContext(0, store=str(tmp_path / "store")), lambda _: None)
    namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    PrefixStore("meeting 3", FileStore(str(tmp_path / "store"))).set("process/1", json.dumps([ended.pid, namespace, "name"]))
    with pytest.raises(RankError, match="rank 1 has died while the ranks that job a spans were connected"):
        parts.meet(Meet("a", ReplicaPlacement(2, (0, 1)), 64, 3), Group())  # type: ignore[arg-type]
