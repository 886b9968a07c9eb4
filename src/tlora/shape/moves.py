"""What starting, joining, leaving and a change of GPUs cost: a scheduler decides by it, and a simulated cluster takes as long.

Seconds were measured with an 8B on one H200; what a change is, docs/adr/042-elastic-layouts.md says.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from tlora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """In seconds. A worker stands on when its group has ended: the next group of its base on just its GPUs needs no start, and its jobs
    join. A group whose GPUs change goes on in its worker where that `can_change`; else its jobs are checkpointed and another worker starts.

    Measured: a start from launch to the first optimizer step, 35.4 s where nothing was compiled before on that machine and 8-11 s where
    it was (one H200, Llama-3-8B shape). Scaled by bytes to 0.5 GB of rank 16's state, and rounded up: a join from a checkpoint, 0.7 s
    for 0.2 GB, and a checkpoint, 0.2 s (one H200, Qwen3-1.7B shape, `bench.joins`; the others waited 0.1 to 0.2 s: a micro-batch at
    8B). A job that goes to a GPU that has just come stands still for `new_gpu_seconds` more: four jobs over an 8B stood still for 12 to
    14 s as their worker got a second H200, and for 3 s as it gave it back (`bench.growth`). The interval between checkpoints is chosen.
    Raises ConfigError.
    """

    cold_start_seconds: float = 35.4
    warm_start_seconds: float = 10.0
    join_seconds: float = 2.0
    join_micro_batches: float = 1.0
    checkpoint_seconds: float = 1.0
    checkpoint_interval_seconds: float = 600.0
    standing_start_seconds: float = 0.0
    new_gpu_seconds: float = 11.0

    def __post_init__(self) -> None:
        for each in fields(self):
            cost: float = getattr(self, each.name)
            if not 0 <= cost < math.inf:
                raise ConfigError(f"{each.name} is {cost}: what a move costs is a number, 0 or more")

    @property
    def of_processes_of_one_job(self) -> MoveCosts:
        """The same where each job has a process of its own, as with PEFT: nothing stands on for the next."""
        return replace(self, standing_start_seconds=self.warm_start_seconds)

    @property
    def restart_seconds(self) -> float:
        """That a job stands still where another worker goes on from its checkpoint, at most: kernels may have to be compiled there."""
        return self.checkpoint_seconds + self.cold_start_seconds

    def change_seconds(self, grows: bool) -> float:
        """That a job stands still where its worker gives up GPUs, or gets some: it leaves its ranks at its last step, and joins on those
        that stay or have come. These have loaded the base before, while it trained.
        """
        return self.checkpoint_seconds + self.join_seconds + (self.new_gpu_seconds if grows else 0.0)


MOVE_SOURCES = {
    "cold_start_seconds": "one H200, Llama-3-8B shape, nothing compiled before",
    "warm_start_seconds": "one H200, Llama-3-8B shape, 8 to 11 s",
    "join_seconds": "bench/results/h200_38e8bab_joins.json, scaled by bytes and rounded up",
    "checkpoint_seconds": "bench/results/h200_38e8bab_joins.json, scaled by bytes and rounded up",
    "new_gpu_seconds": "bench/results/h200x2_c749aac_growth_8b.json, 12 to 14 s less checkpoint and join",
}


def can_change(before: Collection[int], after: Collection[int], nodes: int, whole: bool) -> bool:
    """Whether a worker goes from GPUs to others while its jobs train: a worker is of one node, keeps one of its GPUs, and has its base
    `whole` on each. `nodes`: on which all of them lie.
    """
    return whole and nodes == 1 and not set(before).isdisjoint(after)
