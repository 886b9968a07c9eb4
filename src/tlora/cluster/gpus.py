"""Which GPUs this process may use, by nvidia-smi's numbers, which workers get in CUDA_VISIBLE_DEVICES and users see. Does not import
torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil

from tlora.errors import ConfigError
from tlora.shape import CPU_SHARE, GPU_SHARE

_SECONDS = 30.0  # for the driver to answer


def count_as_the_driver_does() -> None:
    """In this process and those that it starts from now on, unless the environment says otherwise. CUDA's own order is by speed: on a host
    with different GPUs another one than nvidia-smi's. CUDA reads it when it is first used.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_bytes` 0: unknown to the driver, which calls it `name`."""

    memory_bytes: int
    uuid: str
    name: str = ""


def list_gpus() -> dict[int, Gpu]:
    """All GPUs by their numbers; none without a driver."""
    found: dict[int, Gpu] = {}
    for line in _ask_driver("--query-gpu=index,memory.total,uuid,name", "--format=csv,noheader,nounits").splitlines():
        number, mebibytes, uuid, name = (part.strip() for part in (*line.split(",", 3), "", "", "")[:4])
        if number.isdecimal():
            found[int(number)] = Gpu(int(mebibytes) << 20 if mebibytes.isdecimal() else 0, uuid, name)
    return found


def list_links() -> dict[tuple[int, int], str]:
    """What joins each two GPUs, the lower number first, as `nvidia-smi topo -m` says it: NV18, PIX, SYS. Empty without a driver."""
    found: dict[tuple[int, int], str] = {}
    rows = [line.split() for line in _ask_driver("topo", "-m").replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines()]
    heads = [row for row in rows if row and _gpu_number(row[0]) is not None and "X" not in row]  # X: a GPU with itself
    for row in rows if heads else ():
        first = _gpu_number(row[0]) if row and row is not heads[0] else None
        for name, kind in zip(heads[0], row[1:], strict=False):
            second = _gpu_number(name)
            if first is not None and second is not None and first < second:
                found[first, second] = kind
    return found


def _gpu_number(name: str) -> int | None:
    return int(name[3:]) if name.startswith("GPU") and name[3:].isdecimal() else None


def _ask_driver(*arguments: str) -> str:
    """What nvidia-smi prints; "" if it is not there, or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def room_of(gpus: Sequence[int], known: Mapping[int, Gpu], memory_limit: int | Literal["auto"]) -> tuple[int, ...]:
    """Bytes that may be planned for on each of `gpus` before a worker reports what is free; 0 if neither the driver nor `memory_limit`
    tells.
    """
    found: list[int] = []
    for gpu in gpus:
        own = known[gpu].memory_bytes if gpu in known else 0
        limits = [int(GPU_SHARE * own)] if own else []
        found.append(min(limits if memory_limit == "auto" else [*limits, memory_limit], default=0))
    return tuple(found)


def larger_room(rooms: Sequence[int]) -> int:
    """That of the largest GPU; 0 where it is the first, but for the 1 % by which GPUs of one model may differ."""
    return most if (most := max(rooms)) > 1.01 * rooms[0] else 0


def host_room(places: int, memory_limit: int | Literal["auto"]) -> int:
    """As `room_of`, for processes on a CPU, which share its memory."""
    return memory_limit if memory_limit != "auto" else int(CPU_SHARE * psutil.virtual_memory().available) // places


def visible(gpus: Mapping[int, Gpu]) -> tuple[int, ...]:
    """Those of `list_gpus` that CUDA_VISIBLE_DEVICES leaves, in its order: numbers, or prefixes of UUIDs. As in CUDA, the first unknown one
    ends the list. Raises ConfigError for parts of GPUs (MIG).
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not gpus:
        return tuple(gpus)
    found: list[int] = []
    for name in (part.strip() for part in wanted.split(",") if part.strip()):
        if name.startswith("MIG-"):
            raise ConfigError(f"CUDA_VISIBLE_DEVICES: {name} is a part of a GPU, and whole GPUs are used. Name GPUs by number or UUID")
        number = int(name) if name.isdecimal() else None
        alike = [gpu for gpu, facts in gpus.items() if gpu == number or (name.startswith("GPU-") and facts.uuid.startswith(name))]
        if len(alike) != 1:
            break
        found += alike
    return tuple(found)


def left_visible() -> tuple[int, ...] | None:
    """The numbers of the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; None if it is not set."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return None
    names = [part.strip() for part in wanted.split(",") if part.strip()]
    return tuple(map(int, names)) if all(name.isdecimal() for name in names) else visible(list_gpus())


def see_only(gpus: Sequence[int]) -> None:
    """Make only those GPUs visible to this process, before it imports torch: Slurm and containers may set CUDA_VISIBLE_DEVICES for a whole
    allocation. Raises ConfigError if it hides one of them.
    """
    left = left_visible()
    hidden = [gpu for gpu in gpus if left is not None and gpu not in left]
    if hidden:
        there = f"it leaves GPU {', '.join(map(str, left))}" if left else "it leaves none"
        raise ConfigError(
            f"--gpus {','.join(map(str, gpus))}: CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} hides GPU "
            f"{', '.join(map(str, hidden))} ({there}, by nvidia-smi's numbers). Name GPUs that it leaves, or make more visible"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))


def numbers_of(indices: Sequence[int]) -> tuple[int, ...]:
    """The numbers of torch's GPUs cuda:`index` here. Raises ConfigError if CUDA_VISIBLE_DEVICES has neither number nor UUID."""
    there = left_visible()
    if there is None:
        return tuple(indices)
    if max(indices) >= len(there):
        wanted = os.environ["CUDA_VISIBLE_DEVICES"]
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={wanted}: which GPUs these are cannot be determined. Name them by the numbers of nvidia-smi"
        )
    return tuple(there[index] for index in indices)
