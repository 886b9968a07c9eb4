"""Which GPUs a plan is for: models by name or file, or those of this machine as their driver calls them. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tlora.cluster.gpus import list_gpus, visible
from tlora.errors import ConfigError
from tlora.shape.gpu_files import gpu_here
from tlora.shape.gpu_models import GpuModel, find_gpu, name_gpus
from tlora.shape.memory import MOST_GPUS

_NAME_THEM = "name GPUs with --gpu, such as --gpu rtx4090, or describe one with --device-spec FILE"


def asked_gpus(count: int | None, names: str | None, device_spec: Path | None, note: Callable[[str], object]) -> list[GpuModel]:
    """Of `count` GPUs of the models in `names`, as many of each in this order, or of the one that a file describes; without either those
    of this machine, of which `note` is told where their speeds are measured. Raises ConfigError.
    """
    if count is not None and not 1 <= count <= MOST_GPUS:
        raise ConfigError(f"--gpus {count}: must be from 1 to {MOST_GPUS}, which is what a run on one host has. Give such a number")
    if names is not None and device_spec is not None:
        raise ConfigError("--gpu and --device-spec both say which GPUs to plan for; give one of the two")
    if device_spec is not None:
        return [find_gpu(str(device_spec), option="--device-spec")] * (count or 1)
    if names is None:
        return _here(count, note)
    return name_gpus(names, count)


def _here(count: int | None, note: Callable[[str], object]) -> list[GpuModel]:
    known = list_gpus()
    there = [known[number] for number in visible(known)]
    if not there:
        raise ConfigError(f"no GPU is here to plan for: {_NAME_THEM}")
    if count is not None and count > len(there):
        raise ConfigError(f"--gpus {count}: {len(there)} are here. Give --gpus {len(there)}, or {_NAME_THEM}")
    found: list[GpuModel] = []
    told: dict[str, None] = {}
    for gpu in there[:count]:
        here = gpu_here(gpu.name, memory_bytes=gpu.memory_bytes)
        told[here.told] = None
        if here.model is None:
            unknown = f"the GPU {gpu.name or 'here'!r} is not in the table of GPUs"
            raise ConfigError(f"{unknown}: measure it with `tlora calibrate`, or describe it with --device-spec FILE")
        found.append(replace(here.model, memory_bytes=gpu.memory_bytes or here.model.memory_bytes))
    for line in filter(None, told):
        note(line)
    return found
