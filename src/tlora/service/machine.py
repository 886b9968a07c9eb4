"""The GPUs of this machine, asked of the driver's own program: the server imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from tlora.cluster.gpus import list_gpus, visible
from tlora.errors import ConfigError
from tlora.service.config import ServerConfig

NAMES = {"cuda": ("GPU", "GPUs"), "cpu": ("CPU process", "CPU processes")}  # one place of a device, and several


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
    gpus = list_gpus()
    found = visible(gpus)
    if not found:
        if config.device == "cuda" or config.gpus:
            raise ConfigError(
                "device: there is no GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves. Use device: cpu, or repair the driver"
            )
        return Places("cpu", (0,), _host_bytes())
    for gpu in config.gpus or ():
        if gpu not in found:
            hidden = " (CUDA_VISIBLE_DEVICES hides it)" if gpu in gpus else ""
            raise ConfigError(f"gpus: there is no GPU {gpu}{hidden}. Choose among: {', '.join(map(str, found))}")
    chosen = found if config.gpus is None else tuple(config.gpus)
    return Places("cuda", chosen, max(gpus[gpu].memory_bytes for gpu in chosen) or None)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
