"""Stages of a base that was made for a test, whose layers nobody knows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tlora.shape.memory import BaseMemory


@dataclass(frozen=True)
class MadeStages:
    """As `shape.memory.StageRooms`. The fullest of 2, 3, ... takes so many bytes, and a micro-batch on each as much as on one GPU."""

    fullest_bytes: tuple[int, ...]
    whole: BaseMemory
    boundary_bytes: int = 0

    def slowest(self, stages: int) -> float:
        return 1.0

    def equal(self, stages: int, tokens: float, recomputed: int) -> float:
        each = self.whole.least_token_bytes if recomputed else self.whole.token_bytes
        return self.fullest_bytes[min(stages, len(self.fullest_bytes) + 1) - 2] + self.whole.fixed_bytes + each * tokens

    def room(self, speeds: tuple[float, ...], limits: tuple[int, ...], recomputed: int) -> float:
        return min(limits)


def with_made_stages(memory: BaseMemory, *fullest_bytes: int, boundary_bytes: int = 0) -> BaseMemory:
    """Which GPUs of several hosts may hold, each as much of the work."""
    return replace(memory, stages=MadeStages(fullest_bytes, memory, boundary_bytes))
