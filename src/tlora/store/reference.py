"""The adapter that a job's objective compares with, copied into the job's directory at the start: `adapter_path` may change or vanish."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tlora import durable
from tlora.adapters.peft import load_params, write_weights
from tlora.adapters.state import AdapterLayout
from tlora.errors import CheckpointError

REFERENCE_DIRECTORY = "reference"


def write_reference(directory: Path, layout: AdapterLayout, params: Tensor) -> None:
    """Keep the start of the job in `directory`, durably. Raises CheckpointError."""
    durable.write_directory(directory / REFERENCE_DIRECTORY, lambda scratch: write_weights(scratch, layout, params))


def has_reference(directory: Path) -> bool:
    """Whether the job in `directory` has kept its start."""
    return (directory / REFERENCE_DIRECTORY).is_dir()


def read_reference(directory: Path, layout: AdapterLayout, dtype: torch.dtype) -> Tensor:
    """Read what `write_reference` kept, to the host. Raises CheckpointError if it is missing or damaged."""
    path = directory / REFERENCE_DIRECTORY
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: is gone, and with it the adapter that this job began with and compares with. Put it back, or use a new output_dir"
        )
    if (damage := durable.find_damage(path)) is not None:
        raise CheckpointError(
            f"{path}: is damaged ({damage}), and holds the adapter that this job compares with. Put it back, or use a new output_dir"
        )
    return load_params(path, layout, dtype)
