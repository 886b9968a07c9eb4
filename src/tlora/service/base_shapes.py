"""Shapes of bases, each worked out once by a process with torch (`planning/base_outline.py`): for a server, and for `tlora plan`."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tlora import durable
from tlora.adapter_shape import ExpertJobs, LoraShape
from tlora.adapters.targets import resolve, trained_parameters
from tlora.errors import CheckpointError, ModelError
from tlora.json_file import read_object, value_of
from tlora.shape.base_shape import BaseShape
from tlora.version import __version__

if TYPE_CHECKING:
    from tlora.service.config import ServerConfig

_SECONDS = 600.0  # for a hub's config to come and torch to be imported on a busy machine


@dataclass(frozen=True, slots=True)
class Precision:
    """How bases are held, and on what. `gpu` and `capability` (89 for 8.9): of a GPU that need not be here; `rank`: of the largest adapter
    that activations are counted for, `adapts_experts`: whether it adapts these too.
    """

    dtype: str = "auto"
    base_precision: str | None = None
    device: str = "cuda"
    unused_weights: str = "refuse"
    layout: str = "auto"
    gpu: str = ""
    capability: int = 0
    rank: int = 64
    adapts_experts: ExpertJobs = False
    deterministic: bool = False


def precision_of(config: ServerConfig, device: str) -> Precision:
    held = config.dtype, config.base_precision, device, config.unused_weights, config.layout
    return Precision(*held, deterministic=config.deterministic)


def find_outline(directory: Path, base_model: str, precision: Precision) -> BaseShape:
    """From `directory` if it is there and its config.json is as it was, else made there. Raises ModelError, and CheckpointError for what
    the file system refuses, where `durable.is_full` tells a disk that is full now.
    """
    durable.make_directory(directory)
    path = directory / f"{_key(base_model, precision)}.json"
    if not path.is_file():
        _make(base_model, path, precision)
    try:
        return value_of(BaseShape, read_object(path))
    except (OSError, ValueError):  # damaged: made once more
        path.unlink(missing_ok=True)
        _make(base_model, path, precision)
        return value_of(BaseShape, read_object(path))


def known_outline(directory: Path, base_model: str, precision: Precision) -> BaseShape | None:
    """As `find_outline`, but none is made."""
    try:
        return value_of(BaseShape, read_object(directory / f"{_key(base_model, precision)}.json"))
    except (OSError, ValueError):
        return None


def _key(base_model: str, precision: Precision) -> str:
    """Changes with the base's config.json, with this program and transformers, whose model it is, and with how the base is held."""
    config = Path(base_model) / "config.json"
    content = config.read_bytes() if config.is_file() else b""
    facts = [base_model, asdict(precision), __version__, _transformers(), hashlib.sha256(content).hexdigest()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


@functools.cache
def _transformers() -> str:
    return version("transformers")


def _make(base_model: str, path: Path, precision: Precision) -> None:
    command = [sys.executable, "-P", "-m", "tlora.planning.base_outline", base_model, str(path), json.dumps(asdict(precision))]
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"base_model {base_model}: its shape was not found out within {_SECONDS:g} seconds. Is its hub reachable?"
        ) from None
    if ended.returncode or not path.is_file():
        lines = ended.stderr.strip().splitlines()
        if ended.returncode == errno.ENOSPC:
            full = CheckpointError(lines[-1] if lines else f"no room for {path}")
            full.errno = errno.ENOSPC
            raise full
        raise ModelError(lines[-1] if lines else f"base_model {base_model}: the process that reads its shape ended with {ended.returncode}")


def adapter_parameters(base: BaseShape, lora: LoraShape) -> int:
    """How many numbers an adapter trains, of its rows of the embedding too. Raises TloraError for what is not there."""
    return trained_parameters(resolve(base.linears, base.modules, base.experts, lora, base.parameters), lora, base.embedding[2])
