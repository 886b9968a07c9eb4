"""What `tlora calibrate` has measured of the GPUs of this machine: one file for each name of a GPU, in the user's cache directory.

Whoever predicts for a GPU that is here asks `gpu_here`: the file goes before the table of GPUs. Does not import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from tlora.cache_directory import cache_dir, gpu_file_name
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.shape.gpu_models import GpuModel, find_gpu, gpu_by_name_alone, gpu_called
from tlora.version import __version__

_SAME_MEMORY = 0.05  # drivers of one GPU differ by less
_AGAIN = "run `tlora calibrate` to measure it"


@dataclass(frozen=True)
class GpuHere:
    """A GPU of this machine as predictions take it: `model` None where it is neither measured nor in the table. `measured`: by the file.
    `told`: a line about the file, empty where there is none.
    """

    model: GpuModel | None
    measured: bool = False
    told: str = ""


def calibration_path(name: str) -> Path:
    """Where what was measured of a GPU lies that its driver calls so, on the machine that has it."""
    return cache_dir() / "gpus" / gpu_file_name(name)


def versions() -> dict[str, str]:
    """Of what measurements depend on: other kernels train at another speed."""
    try:
        return {"torch": version("torch"), "tlora": __version__}
    except PackageNotFoundError:
        return {"tlora": __version__}


def gpu_here(name: str, capability: int | None = None, memory_bytes: int | None = None) -> GpuHere:
    """The GPU that its driver calls `name`, with the table's figures where there is no file, or one that is of no use: of another GPU, of
    other versions of the program or of torch, or damaged. What is not given is not compared.
    """
    path = calibration_path(name)
    try:
        found = path.stat()
    except OSError:
        return GpuHere(gpu_called(name))
    return _read(path, found.st_mtime_ns, found.st_size, name, capability, memory_bytes)


def training_speed(name: str) -> float:
    """Of training on the GPU that its driver calls so, against an H200; by a guess where nothing but the name is known."""
    return _named(name).flops / find_gpu("h200").flops


def slowest_here(names: Iterable[str]) -> GpuModel | None:
    """Of GPUs that their driver calls so, the slowest; None where there are none."""
    return min((_named(name) for name in dict.fromkeys(names)), key=lambda gpu: gpu.flops, default=None)


def speed_here(names: Iterable[str]) -> tuple[float, tuple[str, ...]]:
    """Of training on the slowest of the GPUs that their driver calls so, against an H200; 1 where there are none. With the lines that
    `gpu_here` tells of them, and which are guessed.
    """
    names = tuple(dict.fromkeys(names))
    told = [each.told or (_guessed(name) if each.model is None else "") for name in names for each in (gpu_here(name),)]
    return min(map(training_speed, names), default=1.0), tuple(filter(None, told))


def _named(name: str) -> GpuModel:
    return gpu_here(name).model or gpu_by_name_alone(name)


def _guessed(name: str) -> str:
    speed = training_speed(name)
    return f"the GPU {name or 'here'!r} is not in the table of GPUs: {speed:.2f} of an H200's speed is guessed; {_AGAIN}"


@functools.lru_cache(maxsize=32)
def _read(path: Path, changed: int, size: int, name: str, capability: int | None, memory_bytes: int | None) -> GpuHere:
    known = gpu_called(name)
    try:
        gpu, facts = find_gpu(str(path)), cast(dict[str, Any], read_object(path).get("measured") or {})
    except (ConfigError, OSError, ValueError) as error:
        return GpuHere(known, told=f"{path} is ignored, it cannot be read ({error}): {_AGAIN}")
    if why := _of_another(gpu, name, capability, memory_bytes) or _outdated(facts):
        return GpuHere(known, told=f"{path} is ignored, {why}: {_AGAIN}")
    return GpuHere(gpu, True, f"speeds of {name} are those that `tlora calibrate` measured on {facts.get('at', 'this machine')} ({path})")


def _of_another(gpu: GpuModel, name: str, capability: int | None, memory_bytes: int | None) -> str:
    if gpu.name != name:
        return f"it is of a {gpu.name}, and the GPU here is a {name}"
    if capability is not None and gpu.capability != capability:
        return f"it is of compute capability {gpu.capability / 10}, and the GPU here has {capability / 10}"
    if memory_bytes and abs(gpu.memory_bytes / memory_bytes - 1) > _SAME_MEMORY:
        return f"it is of a GPU with {gpu.memory_bytes >> 20:,} MiB, and the one here has {memory_bytes >> 20:,}"
    return ""


def _outdated(facts: Mapping[str, Any]) -> str:
    other = [f"{what} {facts.get(what, 'unknown')}, and here is {here}" for what, here in versions().items() if facts.get(what) != here]
    return f"it was measured with {'; '.join(other)}" if other else ""
