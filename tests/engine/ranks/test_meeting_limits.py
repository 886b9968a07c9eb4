"""How long ranks wait for each other, against what a controller bears of a worker."""

from __future__ import annotations

from typing import Any

from tlora.batching.replicas import ReplicaPlacement
from tlora.cluster.worker_pool import Limits
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import Meet
from tlora.engine.ranks import spanning_jobs
from tlora.engine.trainer import Trainer


def test_a_meeting_outlasts_whatever_a_late_rank_may_be_at() -> None:
    limits = Limits()
    assert max(limits.starting, limits.loading, limits.compiling, limits.training) < spanning_jobs._MEETING_SECONDS


def test_a_rank_that_has_come_to_a_meeting_waits_and_does_not_train() -> None:
    """Else it would be what is killed when another compiles for longer than a micro-batch may take."""
    seen: list[str] = []
    trainer: Any = object.__new__(Trainer)
    trainer._heartbeat, trainer._driver = Heartbeat("training"), None

    class Together:
        def meet(self, command: object, driver: object) -> None:
            seen.append(trainer._heartbeat.phase)

    class Calibration:
        def step_aside(self) -> None:
            seen.append("has room")

    trainer._parts, trainer._calibration = Together(), Calibration()
    trainer.obey(Meet("a", ReplicaPlacement(2, (0, 1)), 100, 1))
    assert seen == ["has room", "waiting"]
