"""Decoder layers in the host's memory, from which one process streams them to its device.

Next to a GPU the memory is pinned, so that copies run by themselves. On a CPU it is plain memory under the same interface.
"""

from __future__ import annotations

import math
import mmap
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from tlora.errors import CapacityError, ConfigError
from tlora.processes import control_groups
from tlora.wording.numbers import gib

_MOST_OF_FREE = 0.9  # of the host's free memory; the rest is for blocks that are read, data and checkpoints
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}  # by the groups' version
_ANOTHER_FIT = "take a base, a base_precision or a GPU with which the base fits there"


@dataclass(frozen=True)
class Streaming:
    """A base whose decoder layers lie in the host's memory. `slots`: layers on the device at a time, 2 at least: one runs, the others are
    on their way, or stay until they are read again. `ordered`: by `layout: streamed`, which can be taken out; else a plan chose it.
    """

    slots: int = 2
    ordered: bool = False

    def __post_init__(self) -> None:
        if self.slots < 2:
            raise ConfigError(f"slots is {self.slots}, and must be 2 or more: one layer runs while the next is fetched. Give 2 or 3")


class Alone:
    """What `Peers` is to ranks, for one process that streams its base: there is no other to agree with."""

    rank, world_size = 0, 1

    def __init__(self, streaming: Streaming) -> None:
        self.slots, self.ordered = streaming.slots, streaming.ordered

    def telling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agree(self, key: str, value: Any, what: str) -> None:
        pass

    def exchange(self, key: str, value: Any) -> list[Any]:
        return [value]


class HostMemory:
    """`own`: `num_bytes` of the host's memory, pinned where `device` is a GPU. Unpinned and freed with this object.

    Raises CapacityError where the host has too little, or does not pin it; `ordered` as of `Streaming`.
    """

    def __init__(self, num_bytes: int, device: torch.device, ordered: bool = False) -> None:
        if problem := host_problem(num_bytes):
            raise CapacityError(problem)
        self.own = own_pages(num_bytes)
        if device.type == "cuda" and num_bytes:
            _pin(self.own, device, self, "layers are streamed", "take layout: streamed out" if ordered else _ANOTHER_FIT)

    def read(self, peer: int, start: int, target: Tensor) -> None:
        """Copy the bytes from `start` on into `target`. A GPU queues it on its current stream."""
        target.copy_(self.own[start : start + target.numel()], non_blocking=True)


def own_pages(num_bytes: int) -> Tensor:
    """Zeros that take no room until they are written, in pages that hold nothing else: they can be pinned and unpinned alone."""
    # not torch's pinned allocator, which takes the next power of two, and keeps it
    region = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without huge pages
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)[:num_bytes]


def host_problem(num_bytes: int) -> str | None:
    """Why `num_bytes` of base weights cannot be held in the host's memory, with a remedy; None where they can."""
    free = free_host_bytes()
    if num_bytes <= _MOST_OF_FREE * free:
        return None
    return (
        f"the base's decoder layers have {gib(num_bytes)} to be streamed from the host's memory, and must take at most "
        f"{_MOST_OF_FREE:.0%} of the {gib(free)} that are free there. Free host memory, give the container more, or take a smaller base "
        "or base_precision"
    )


def free_host_bytes() -> int:
    """Of the host's memory, what this process may still take: what is free, and no more than its control groups leave."""
    return int(min(psutil.virtual_memory().available, _left_by_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))))


def _left_by_groups(memberships: Path, root: Path) -> float:
    """Bytes below the limits of the control groups named in `memberships` and of all above them; infinite where none has one."""
    groups = control_groups("memory", memberships, root)
    return min((_left_by(directory, *_FILES[version]) for directory, version in groups), default=math.inf)


def _left_by(directory: Path, limit: str, usage: str) -> float:
    """Of one control group; infinite where it has no limit or its files cannot be seen. Pages of files that were read are given up."""
    try:
        most = (directory / limit).read_text(encoding="ascii").strip()
        if most == "max":
            return math.inf
        taken = int((directory / usage).read_text(encoding="ascii"))
        stat = dict(line.split() for line in (directory / "memory.stat").read_text(encoding="ascii").splitlines())
        files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return max(0, int(most) - taken + files)
    except (OSError, ValueError):
        return math.inf


def pin(memory: Tensor, device: torch.device, owner: object) -> None:
    """Pin memory that processes share, as long as `owner` lives. Raises CapacityError where the driver refuses."""
    _pin(memory, device, owner, "GPUs copy", "use GPUs that read each other's memory")


def _pin(memory: Tensor, device: torch.device, owner: object, use: str, otherwise: str) -> None:
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context must be there
        status = runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(status) != 0:
        why = runtime.cudaGetErrorString(status)
        raise CapacityError(
            f"{gib(memory.numel())} of the host's memory cannot be pinned (cudaHostRegister: {why}), and {use} from pinned memory. "
            f"Free host memory, raise the container's limits, or {otherwise}"
        )
    weakref.finalize(owner, _unpin, memory).atexit = False  # the driver unpins what a process leaves


def _unpin(memory: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())
