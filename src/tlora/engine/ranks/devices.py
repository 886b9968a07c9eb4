"""What `--gpus` and `--device` mean on this machine: the device of each rank."""

from __future__ import annotations

import os
import re

import torch

from tlora.errors import ConfigError
from tlora.planning.work import rate_here
from tlora.wording.numbers import quantity

_FORMS = "Give all, a number of GPUs, or their indices (0,2)"


def count_elsewhere(gpus: str | int | None, device: str | None, gpu: str) -> int | None:
    """How many GPUs a plan is for that are the `gpu` of another machine; None where that is left open. Raises ConfigError."""
    if device not in (None, "cuda"):
        raise ConfigError(f"--gpu {gpu} with --device {device}: it plans for a GPU. Leave --device out")
    if gpus is None:
        return None
    text = str(gpus).strip()
    if not re.fullmatch(r"[1-9]\d{0,2}", text):
        raise ConfigError(f"--gpus {text} with --gpu {gpu}: must be a number of such GPUs. Give --gpus 2, or leave it out")
    return int(text)


def rank_devices(gpus: str | int | None, device: str | None) -> tuple[str, ...]:
    """The devices of a run, one for each rank: with one, the run is a single process. Empty without `gpus`: the user leaves it open.

    `gpus`: "all", a number, or indices with commas ("0,2"; "1," is the second one alone), as CUDA numbers the GPUs that are visible. On a
    CPU a number of processes. Raises ConfigError.
    """
    if gpus is None:
        return ()
    text = str(gpus).strip()
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cuda", "cpu"):
        raise ConfigError(f"--gpus {text} with --device {kind}: --gpus chooses the GPUs. Leave --device out")
    if kind == "cpu":
        if not re.fullmatch(r"[1-9]\d*", text):
            raise ConfigError(f"--gpus {text} on a CPU: must be a number of processes. Give --gpus 2, or leave it out")
        return ("cpu",) * int(text)
    there = torch.cuda.device_count()
    if text == "all":
        chosen = list(range(there))
    elif "," in text:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if not parts or not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
            raise ConfigError(f"--gpus {text}: must be different indices. {_FORMS}")
        chosen = [int(part) for part in parts]
    elif re.fullmatch(r"[1-9]\d*", text):
        chosen = list(range(int(text)))
    else:
        raise ConfigError(f"--gpus {text}: is not a choice of GPUs. {_FORMS}")
    if not chosen or max(chosen) >= there:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        because = f" (CUDA_VISIBLE_DEVICES={hidden} hides others)" if hidden is not None else ""
        counted = f"{quantity(there, 'GPU')}{because}"
        raise ConfigError(f"--gpus {text}: this process sees {counted}. Ask for no more than that, or make more visible")
    return tuple(f"cuda:{index}" for index in chosen)


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def training_flops(device: torch.device) -> float:
    """As `tlora check` predicts it; 0 of a CPU."""
    return rate_here(device).flops or 0.0
