"""How long ranks wait for each other, against what a controller bears of a worker."""

from __future__ import annotations

from typing import Any

from tlora.batching.replicas import Span
from tlora.cluster.crew import Limits
from tlora.engine.messages import Meet
from tlora.engine.pulse import Pulse
from tlora.engine.team import parts
from tlora.engine.trainer import Trainer


def test_a_meeting_outlasts_whatever_a_late_rank_may_be_at() -> None:
    limits = Limits()
    assert max(limits.starting, limits.loading, limits.compiling, limits.training) < parts._MEETING_SECONDS


def test_a_rank_that_has_come_to_a_meeting_waits_and_does_not_train() -> None:
    """Else it would be what is killed when another compiles for longer than a micro-batch may take."""
    seen: list[str] = []
    trainer: Any = object.__new__(Trainer)
    trainer._pulse, trainer._driver = Pulse("training"), None

    class Together:
        def obey(self, command: object, driver: object) -> None:
            seen.append(trainer._pulse.phase)

    class Calibration:
        def step_aside(self) -> None:
            seen.append("has room")

    trainer._parts, trainer._calibration = Together(), Calibration()
    trainer._obey(Meet("a", Span(2, (0, 1)), 100, 1))
    assert seen == ["has room", "waiting"]
