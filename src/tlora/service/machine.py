"""The GPUs of this machine, asked of the driver's own program: the server imports no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Literal

from tlora.errors import ConfigError
from tlora.service.config import ServerConfig

NAMES = {"cuda": ("GPU", "GPUs"), "cpu": ("CPU process", "CPU processes")}  # one place of a device, and several
_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Places:
    """GPUs by their numbers, or as many processes on a CPU. `memory_bytes`: of the largest of the GPUs, or of the machine."""

    device: Literal["cuda", "cpu"]
    gpus: tuple[int, ...]
    memory_bytes: int | None = None


def find_places(config: ServerConfig) -> Places:
    """What the config names, else all GPUs, else one process on the CPU. Raises ConfigError for GPUs that there are not."""
    if config.device == "cpu":
        return Places("cpu", tuple(range(len(config.gpus))) if config.gpus else (0,), _host_bytes())
    memory = list_gpus()
    found = _visible(tuple(memory))
    if not found:
        if config.device == "cuda" or config.gpus:
            raise ConfigError("device: there is no GPU that nvidia-smi lists. Use device: cpu, or repair the driver")
        return Places("cpu", (0,), _host_bytes())
    for gpu in config.gpus or ():
        if gpu not in found:
            raise ConfigError(f"gpus: there is no GPU {gpu}; there are {', '.join(map(str, found))}")
    gpus = found if config.gpus is None else tuple(config.gpus)
    return Places("cuda", gpus, max(memory[gpu] for gpu in gpus) or None)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def list_gpus() -> dict[int, int]:
    """All GPUs by their numbers, with their bytes of memory (0: the driver does not tell); none without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[int, int] = {}
    for line in ended.stdout.splitlines():
        number, _, mebibytes = (part.strip() for part in line.partition(","))
        if number.isdecimal():
            found[int(number)] = int(mebibytes) << 20 if mebibytes.isdecimal() else 0
    return found


def _visible(gpus: tuple[int, ...]) -> tuple[int, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; ids that are no numbers are not understood, and leave all."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return gpus
    numbers = [part.strip() for part in wanted.split(",") if part.strip()]
    if not all(part.isdecimal() for part in numbers):
        return gpus if numbers != ["-1"] else ()
    return tuple(int(part) for part in numbers if int(part) in gpus)
