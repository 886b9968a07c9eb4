"""A checkpoint is a PEFT directory plus optimizer and progress files; it appears whole or not at all (`durable.py`).

Tensors are safetensors, the rest JSON: nothing is ever unpickled. The adapter that an objective compares with lies in the job's directory
as it was at the start, since `adapter_path` may change or go.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tlora import durable
from tlora.adapters.layout import AdapterLayout
from tlora.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, load_params, write_adapter, write_tensors, write_weights
from tlora.adapters.state import AdapterState
from tlora.errors import CheckpointError
from tlora.group.isolation import Failure, try_call
from tlora.group.reports import TrainingProgress
from tlora.job import LoraConfig
from tlora.json_file import read_object
from tlora.kernels.transfer import download

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


OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "state.json"
_ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
_COUNTERS = ("updates", "skipped")  # of AdapterState, in STATE_FILE
_SMALL_FILES_BYTES = 64 << 10  # config, manifest, state, and what file systems round up: together far below


def adapter_bytes(layout: AdapterLayout, element_bytes: int) -> int:
    """The size of an adapter's files on disk."""
    return layout.numel * element_bytes + _SMALL_FILES_BYTES


def checkpoint_bytes(layout: AdapterLayout, element_bytes: int) -> int:
    """The size of a checkpoint on disk: the adapter and its two moments."""
    return adapter_bytes(layout, element_bytes) + 2 * layout.numel * element_bytes


def save(
    directory: Path,
    state: AdapterState,
    progress: TrainingProgress,
    lora: LoraConfig,
    base_model: str,
    failpoint: durable.Failpoint = durable.no_failpoint,
) -> None:
    """Write `directory` durably. Raises CheckpointError (disk full, no permission) with nothing half-written."""

    def write(scratch: Path) -> dict[str, str]:
        digests = write_adapter(scratch, state.layout, state.params, lora, base_model)
        moments = {"exp_avg": state.exp_avg.cpu(), "exp_avg_sq": state.exp_avg_sq.cpu()}
        digests[OPTIMIZER_FILE] = write_tensors(scratch / OPTIMIZER_FILE, moments)
        (scratch / STATE_FILE).write_text(json.dumps(asdict(progress) | {key: getattr(state, key) for key in _COUNTERS}) + "\n")
        return digests

    durable.write_directory(directory, write, failpoint=failpoint)


def load(directory: Path, layout: AdapterLayout, dtype: torch.dtype) -> tuple[AdapterState, TrainingProgress]:
    """Read what `save` wrote, to the host. Raises CheckpointError or ModelError when it does not belong to `layout`."""
    durable.verify(directory)
    progress, counters = _read_state(directory / STATE_FILE)
    moments = _read_moments(directory / OPTIMIZER_FILE, layout)
    params = load_params(directory, layout, dtype)
    # copies: safetensors returns views of the mapped file, and truncating that file would kill the process
    exp_avg, exp_avg_sq = (moments[name].to(dtype, copy=True) for name in ("exp_avg", "exp_avg_sq"))
    return AdapterState(layout, params, exp_avg, exp_avg_sq, progress.step, **counters), progress


def _read_moments(path: Path, layout: AdapterLayout) -> dict[str, Tensor]:
    try:
        moments = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is no whole safetensors file ({error}). Remove this checkpoint; the one before is taken") from None
    if moments.keys() != {"exp_avg", "exp_avg_sq"}:
        raise CheckpointError(f"{path}: holds {sorted(moments)}, not exp_avg and exp_avg_sq. Resume with the version that wrote it")
    for name, tensor in moments.items():
        if tensor.numel() != layout.numel:
            raise CheckpointError(
                f"{path}: {name} has {tensor.numel()} numbers, and this job's adapter {layout.numel}. "
                "The job's rank or target_modules changed since; use a new output_dir"
            )
    return moments


def read_progress(directory: Path) -> TrainingProgress:
    """The progress in a verified checkpoint. Raises CheckpointError when another version of this program wrote it."""
    return _read_state(directory / STATE_FILE)[0]


def _read_state(path: Path) -> tuple[TrainingProgress, dict[str, int]]:
    try:
        content = read_object(path)
        counters = {key: int(content.pop(key)) for key in _COUNTERS}
        content |= {key: tuple(content.get(key, ())) for key in ("losses", "unlogged", "replica_weights")}
        return TrainingProgress(**content), counters
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not of this version ({error}). Resume with the version that wrote it, or start anew") from None


def export_bytes(checkpoint: Path) -> int:
    """The most bytes that `export` writes: on a file system without hard links."""
    weights = checkpoint / WEIGHTS_FILE
    return (weights.stat().st_size if weights.is_file() else 0) + _SMALL_FILES_BYTES


def save_alone(
    directory: Path, state: AdapterState, lora: LoraConfig, base_model: str, failpoint: durable.Failpoint = durable.no_failpoint
) -> None:
    """Make the adapter of `state` the job's result in `directory`, without a checkpoint. Raises CheckpointError."""
    with durable.scratch_directory(directory) as scratch:
        write_adapter(scratch, state.layout, state.params, lora, base_model)
        for name in _ADAPTER_FILES:
            durable.link_file(scratch / name, directory / name, failpoint=failpoint)


def export(checkpoint: Path, directory: Path, *, known_whole: bool, failpoint: durable.Failpoint = durable.no_failpoint) -> None:
    """Make the adapter of a checkpoint the job's result in `directory`: config first, then the weights, each atomically. They are the
    checkpoint's own files under a second name where the file system has hard links, and copies elsewhere.

    Without `known_whole` the two are read and compared with the checkpoint's manifest first. Raises CheckpointError when they are damaged
    or cannot be written.
    """
    if not known_whole:
        durable.verify(checkpoint, _ADAPTER_FILES)
    for name in _ADAPTER_FILES:
        durable.link_file(checkpoint / name, directory / name, failpoint=failpoint)


@dataclass(frozen=True)
class Snapshot:
    """A private copy of a job's state at the time of its save: on the host, or still on the device, which has written it once `after` has
    passed.
    """

    state: AdapterState
    progress: TrainingProgress
    after: torch.Event | None = None

    def on_host(self) -> Snapshot:
        """The same state on the host, copied by the calling thread while the device works on."""
        if self.after is None:
            return self
        state = self.state
        moved = [f.result() for f in download([state.params, state.exp_avg, state.exp_avg_sq], state.params.device, self.after)]
        return Snapshot(replace(state, params=moved[0], exp_avg=moved[1], exp_avg_sq=moved[2]), self.progress)


def on_host(snapshot: Snapshot | Failure) -> Snapshot | Failure:
    return snapshot if isinstance(snapshot, Failure) else try_call(snapshot.on_host)
