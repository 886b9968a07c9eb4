"""The GPUs of this machine, asked of the driver's own program: the server imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from tlora.cluster.gpus import host_room, list_gpus, room_of, visible
from tlora.errors import ConfigError
from tlora.service.config import ServerConfig
from tlora.shape.gpu_files import slowest_here, speed_here
from tlora.shape.gpu_models import GpuModel, find_gpu


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs by their numbers, or as many processes on a CPU. `memory_bytes`: of the largest of the GPUs, or of the machine; `room_bytes`:
    what may be planned for on each place, where that is known. `speed`: of training against an H200, `told`: lines on
    where that is from. `kinds`: what the GPUs are, as their driver calls them. `engine_gpus`: how many more are here, for the workers
    of an engine.
    """

    device: Literal["cuda", "cpu"]
    gpus: tuple[int, ...]
    memory_bytes: int | None = None
    room_bytes: tuple[int, ...] = ()
    speed: float = 1.0
    told: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    engine_gpus: int = 0

    @property
    def model(self) -> GpuModel | None:
        """The GPU that speeds are predicted for until workers have measured: the slowest of those here, an H200 where only other hosts
        train; None for a CPU, and where nothing is known of one.
        """
        return None if self.device == "cpu" else slowest_here(self.kinds) if self.gpus else find_gpu("h200")


def find_places(config: ServerConfig) -> Devices:
    """What the config names, else all GPUs, else one process on the CPU. None where only other hosts train, of whose device nothing is
    known but what the config says. Raises ConfigError for GPUs that there are not.
    """
    if config.gpus == [] or config.ray_address is not None:
        return Devices(config.device or "cuda", ())
    if config.device == "cpu":
        return _on_cpu(tuple(range(len(config.gpus))) if config.gpus else (0,), config)
    gpus = list_gpus()
    found = visible(gpus)
    if not found:
        if config.device == "cuda" or config.gpus:
            raise ConfigError(
                "device: there is no GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES leaves. Use device: cpu, or repair the driver"
            )
        return _on_cpu((0,), config)
    for gpu in config.gpus or ():
        if gpu not in found:
            hidden = " (CUDA_VISIBLE_DEVICES hides it)" if gpu in gpus else ""
            raise ConfigError(f"gpus: there is no GPU {gpu}{hidden}. Choose among: {', '.join(map(str, found))}")
    chosen = found if config.gpus is None else tuple(config.gpus)
    room = room_of(chosen, gpus, config.memory_limit)
    memory_bytes = max(gpus[gpu].memory_bytes for gpu in chosen) or None
    kinds = tuple(gpus[gpu].name for gpu in chosen)
    return Devices("cuda", chosen, memory_bytes, room, *speed_here(kinds), kinds=kinds if all(kinds) else ())


def _on_cpu(numbers: tuple[int, ...], config: ServerConfig) -> Devices:
    return Devices("cpu", numbers, _host_bytes(), (host_room(len(numbers), config.memory_limit),) * len(numbers))


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
