"""Which GPUs a worker has, their devices, and how far it is on the way to others that it shall have. Who starts and ends ranks does as this
says.

First ranks come for all GPUs that are missing, while jobs train on as before; when all of them have loaded the base, jobs move; a rank
ends when no job is left on it.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from tlora.errors import ConfigError

JOIN_SECONDS = 1800.0  # for a rank to load the base beside those that train


class GpuChange:
    """`gpu_of` has the GPU of each rank, `joining` those that load the base for the first time, `wanted` the GPUs that the worker shall
    have, None where it has them. `placed`: jobs have been placed anew for these; `ending`: ranks that were told to end.
    """

    def __init__(self, gpus: tuple[int, ...]) -> None:
        self.gpu_of = dict(enumerate(gpus))
        self.joining: dict[int, float] = {}  # since when
        self.wanted: tuple[int, ...] | None = None
        self._unloaded = set(self.gpu_of)  # of the ranks that came first, and together
        self.ending: set[int] = set()
        self.placed = False

    @property
    def all_loaded(self) -> bool:
        """The ranks that came first have loaded the base."""
        return not self._unloaded

    @property
    def gpus(self) -> tuple[int, ...]:
        """Those that the worker has, in ascending order."""
        return tuple(sorted(gpu for rank, gpu in self.gpu_of.items() if rank not in self.joining))

    @property
    def target(self) -> tuple[int, ...]:
        """Those that it shall have."""
        return self.gpus if self.wanted is None else self.wanted

    @property
    def taking(self) -> list[int]:
        """The ranks that jobs may come to. While others come, all that are there."""
        stay = [rank for rank in self.gpu_of if rank not in self.joining and rank not in self.ending]
        wanted = self.wanted
        return stay if wanted is None or self.awaits_ranks else [rank for rank in stay if self.gpu_of[rank] in wanted] or stay

    @property
    def missing(self) -> list[int]:
        """GPUs for which a rank has to be started."""
        return [gpu for gpu in self.wanted or () if gpu not in self.gpu_of.values()]

    @property
    def awaits_ranks(self) -> bool:
        """Ranks join or have to be started, also on a GPU whose last rank has not ended yet."""
        wanted = self.wanted or ()
        return bool(self.joining or self.missing) or any(self.gpu_of[rank] in wanted for rank in self.ending)

    @property
    def is_done(self) -> bool:
        return not self.joining and self.wanted == self.gpus and not self.ending

    def may_grow(self, visible: Collection[int]) -> bool:
        """Whether it can get one of those GPUs, and no change is under way."""
        return self.wanted is None and not set(visible) <= set(self.gpus)

    def want(self, gpus: tuple[int, ...]) -> None:
        assert gpus, "a worker has a GPU"
        self.wanted, self.placed = tuple(sorted(gpus)), False

    def begin(self, rank: int, gpu: int, now: float) -> None:
        """The rank was started."""
        self.gpu_of[rank], self.joining[rank] = gpu, now

    def begin_together(self, rank: int, gpu: int) -> None:
        """The rank was started as one of those that load the base first, and together."""
        self.gpu_of[rank] = gpu
        self._unloaded.add(rank)

    def loaded(self, rank: int) -> None:
        self._unloaded.discard(rank)
        self.joining.pop(rank, None)

    def late(self, now: float) -> list[int]:
        """Ranks that have been joining for too long; the first of them is enough to give up."""
        return [rank for rank, since in self.joining.items() if now - since > JOIN_SECONDS][:1]

    def not_wanted_after_all(self) -> list[int]:
        """Takes out ranks that still join and whose GPUs are no longer wanted."""
        gone = [rank for rank in self.joining if self.gpu_of[rank] not in (self.wanted or ())]
        for rank in gone:
            del self.joining[rank], self.gpu_of[rank]
        return gone

    def end_vacated(self, busy: Collection[int]) -> list[int]:
        """The ranks that shall end now: those whose GPUs are not wanted, and that are not `busy`."""
        ending = [rank for rank, gpu in self.gpu_of.items() if gpu not in self.target and rank not in busy and rank not in self.ending]
        self.ending.update(ending)
        return ending

    def ended(self, rank: int) -> None:
        self.ending.discard(rank)
        self.gpu_of.pop(rank, None)

    def give_up(self) -> list[int]:
        """No other GPUs are wanted than are there. Takes out the ranks that still join, and returns them."""
        self.wanted = None
        gone, self.joining = list(self.joining), {}
        for rank in gone:
            del self.gpu_of[rank]
        return gone

    stop = give_up


def worker_device(device: str, gpus: tuple[int, ...], gpu: int) -> str:
    """The torch device of the GPU that the cluster calls `gpu`, for a worker that was started with `gpus`: CUDA_VISIBLE_DEVICES names the
    GPUs that it may come to have, in any order. Raises ConfigError for one that is hidden.
    """
    if device != "cuda":
        return device
    there = visible_gpus(device, gpus)
    if gpu not in there:
        raise ConfigError(f"GPU {gpu}: CUDA_VISIBLE_DEVICES hides it from this worker, which sees {there}. Start a worker there")
    return f"cuda:{there.index(gpu)}"


def visible_gpus(device: str, gpus: tuple[int, ...]) -> list[int]:
    """The GPUs that a worker which was started with `gpus` may come to have, in the order of their devices; none on a CPU."""
    names = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    there = [int(name) for name in names] if names and all(name.isdecimal() for name in names) else list(gpus)
    return there if device == "cuda" else []
