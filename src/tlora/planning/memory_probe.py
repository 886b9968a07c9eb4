"""Measures, on a GPU with the base loaded and before any job runs, what a micro-batch takes; compiles the layers on the way.

A micro-batch has two phases, each with a peak of its own: head and loss (a chunk of logits, of fixed size) and the layers' backward
(which grows with the tokens). Both are straight lines in the tokens and in the recomputed layers, the higher of them is not: each is
measured by itself, at two numbers of tokens without and with recomputation, and of each kind of pass by itself (`kinds_of_passes`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tlora import durable
from tlora.cache_directory import cache_dir
from tlora.job import JobSpec, RunSpec, TrainConfig
from tlora.json_file import fields_of, value_of
from tlora.kernels.head import gpu_chunk_rows
from tlora.planning.plan import RunPlan, settle
from tlora.shape.memory import MemoryModel, Phase
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.supermodel import SuperModel
from tlora.version import __version__
from tlora.wording.numbers import gib

PROBE_TOKENS = ((256, 1024), (64, 256))  # the second where the first runs out of memory
SAMPLE_TOKENS = 256  # at most: rotary embeddings that change with the longest sample begin later


class Meter(Protocol):
    """What the device's allocator has given out, in bytes."""

    def allocated(self) -> int: ...
    def peak(self) -> int: ...
    def reset_peak(self) -> None: ...


class DeviceMeter:
    """torch's own counters. They follow the queue of the host, so that nothing has to be waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(frozen=True)
class Peaks:
    """One micro-batch: bytes at the peak of head and loss, and of everything else (forward, and the layers' backward)."""

    num_tokens: int
    recomputed_layers: int
    head: int
    layers: int


@dataclass(frozen=True)
class Probe:
    """`error_share`: the largest distance of a measured peak from the straight lines, as a share of the peak."""

    memory: MemoryModel
    peaks: tuple[Peaks, ...]
    error_share: float
    seconds: float


def probe(model: SuperModel, specs: Sequence[JobSpec], counted: MemoryModel, meter: Meter) -> Probe | None:
    """Measure with adapters like the largest two of `specs`, which join for this and leave again; None where memory does not do for it.

    `counted` gives what is not measured: the bytes of adapters. `model` must have no resident; its adapters' bits are not touched.
    """
    start, before = time.perf_counter(), model.recompute
    for sizes in PROBE_TOKENS:
        try:
            memory, peaks, error = _measure(model, specs, counted, meter, sizes)
        except torch.OutOfMemoryError:
            continue
        finally:
            model.recompute = before
        return Probe(memory, peaks, error, time.perf_counter() - start)
    return None


def compile_evaluation(model: SuperModel, specs: Sequence[JobSpec]) -> None:
    """Compile the layers as an evaluation runs them, which else the first evaluation would wait for."""
    with residents(model, specs[:1]) as names:
        model.evaluate(probe_batch(names, PROBE_TOKENS[-1][0], model))


def kinds_of_passes(model: SuperModel, specs: Sequence[JobSpec]) -> list[Sequence[JobSpec]]:
    """`specs`, and by themselves those at no experts, where others are at some and passes without these take a token to more experts."""
    others = [spec for spec in specs if not spec.target_parameters]
    mixed = 0 < len(others) < len(specs)
    return [specs, others] if mixed and model.experts.visits(True) != model.experts.visits(False) else [specs]


def _measure(
    model: SuperModel, specs: Sequence[JobSpec], counted: MemoryModel, meter: Meter, sizes: Sequence[int]
) -> tuple[MemoryModel, tuple[Peaks, ...], float]:
    runs = [_run(model, own, meter, sizes) for own in kinds_of_passes(model, specs)]
    rows = gpu_chunk_rows(model.base.head)
    width = model.base.head.weight_VH.shape[1] * counted.element_bytes
    more = max(phase.sample_bytes for phase in counted.phases)
    phases, errors = list[Phase](), list[float]()
    for peaks, _ in runs:
        pads = [_padding(peak.num_tokens, rows) * width for peak in peaks]
        fitted = [_fit(peaks, [getattr(peak, part) - pad for peak, pad in zip(peaks, pads, strict=True)]) for part in ("head", "layers")]
        head, layers = (replace(phase, fixed_bytes=phase.fixed_bytes + 2 * rows * width) for phase, _ in fitted)
        phases += [replace(head, at_head=True), replace(layers, sample_bytes=more, sample_tokens=SAMPLE_TOKENS)]
        errors += [error for _, error in fitted]
    base_bytes = _storage_bytes(model) + sum(workspaces for _, workspaces in runs)
    memory = replace(counted, base_bytes=base_bytes, phases=tuple(phases), num_layers=model.num_layers, measured=True)
    return memory, tuple(peak for peaks, _ in runs for peak in peaks), max(errors)


def _run(model: SuperModel, specs: Sequence[JobSpec], meter: Meter, sizes: Sequence[int]) -> tuple[tuple[Peaks, ...], int]:
    """Peaks of passes of `specs`, and the bytes that libraries then keep for good."""
    depths = sorted({0, max(0, model.num_layers - 1)})
    before = meter.allocated()
    with residents(model, specs) as names:
        adapters = meter.allocated() - before
        for depth in depths:  # compiles, and leaves the libraries' workspaces behind
            run_batch(model, probe_batch(names, sizes[0], model), depth, meter)
        workspaces = meter.allocated() - before - adapters
        peaks = tuple(run_batch(model, probe_batch(names, tokens, model), depth, meter) for tokens in sizes for depth in depths)
    return peaks, workspaces


@contextmanager
def residents(model: SuperModel, specs: Sequence[JobSpec]) -> Iterator[list[str]]:
    """Adapters like the largest two of `specs`, one of them of experts if any is: two in one tile are the most that the kernels hold side
    by side.
    """
    largest = sorted(specs, key=lambda spec: spec.largest_rank, reverse=True)
    at_experts = [spec for spec in largest if spec.target_parameters][:1]
    largest = [*at_experts, *(spec for spec in largest if spec not in at_experts)][:2]
    names: list[str] = []
    try:
        for i, spec in enumerate(largest):
            name = f"memory probe {i}"
            model.join(name, spec.model_copy(update={"adapter_path": None}), TrainConfig(max_steps=1))
            names.append(name)
        yield names
    finally:
        for name in names:
            model.leave(name)


def run_batch(model: SuperModel, batch: PackedBatch, depth: int, meter: Meter) -> Peaks:
    """A real micro-batch, of one pass. The decoder's output is the border between forward and head, its gradient that between head and
    backward.
    """
    start, marks = meter.allocated(), list[int]()
    model.recomputed_layers = depth

    def mark(_gradient: Tensor) -> None:
        marks.append(meter.peak() - start)
        meter.reset_peak()

    def after_forward(_module: object, _inputs: object, output: Any) -> None:
        marks.append(meter.peak() - start)
        meter.reset_peak()
        output.last_hidden_state.register_hook(mark)

    meter.reset_peak()
    hook = model.base.decoder.register_forward_hook(after_forward)
    try:
        model.forward_backward(batch)
    finally:
        hook.remove()
        for span in batch.spans:
            model.zero_grad_of(span.job_id)
    forward, head = marks
    return Peaks(len(batch.input_ids_T), depth, head, max(forward, meter.peak() - start))


def probe_batch(names: Sequence[str], num_tokens: int, model: SuperModel, longest: int = SAMPLE_TOKENS, pad_to: int = 0) -> PackedBatch:
    """The tokens in turn 0, 1, ..., in samples of at most `longest` and of what the base takes, an equal share for each job; all trained,
    as the largest.
    """
    longest = min([longest, *(limit.tokens for limit in model.limits)])
    ids = np.arange(num_tokens, dtype=np.int32) % model.base.vocab_size
    rows: list[BatchRow] = []
    for name, own in zip(names, np.array_split(ids, len(names)), strict=True):
        samples = np.array_split(own, -(-len(own) // longest))
        rows += [BatchRow(name, sample, np.ones(len(sample), np.float32), float(len(own)), (0, 0, i)) for i, sample in enumerate(samples)]
    return collate(rows, model.device, pad_to)


def _padding(num_tokens: int, rows: int) -> int:
    """Rows that the head's last chunk of `rows` is filled up with, in the gradient, and its copy of the hidden states."""
    return -num_tokens % rows + (rows if num_tokens % rows else 0)


def _fit(peaks: Sequence[Peaks], found: Sequence[float]) -> tuple[Phase, float]:
    """The plane through `found` bytes, by least squares, and its largest error as a share."""
    deep = max(peak.recomputed_layers for peak in peaks)
    columns = [[1.0, peak.num_tokens, -peak.num_tokens * peak.recomputed_layers] for peak in peaks]
    matrix = np.array(columns)[:, : 3 if deep else 2]
    solved, *_ = np.linalg.lstsq(matrix, np.array(found, np.float64), rcond=None)
    error = float(np.max(np.abs(matrix @ solved - found) / np.maximum(found, 1)))
    return Phase(*(float(x) for x in solved)), error


def _storage_bytes(model: SuperModel) -> int:
    """Parameters and buffers of the base, each storage once (tied weights are one), and what this rank holds of a shared base's layers."""
    tensors = [t for t in (*model.model.parameters(), *model.model.buffers()) if not t.is_meta]
    layers = model.base.layers.held_bytes if model.base.layers is not None else 0
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) + layers


# -- what was measured, for `tlora check` ------------------------------------------------------------------------------

_FORMAT = 1  # of what is kept; what was kept in another is measured anew. From 1 on it has what one more sample takes


def remember(key: str, memory: MemoryModel) -> None:
    """Keep what was measured, which is not what is known of the run's jobs. A directory that cannot be written costs
    `tlora check` its precision, and the run nothing.
    """
    path = _file_of(key)
    with suppress(OSError):
        durable.make_directory(path.parent)
        durable.write_file(path, json.dumps(fields_of(memory.alone())))


def recall(key: str) -> MemoryModel | None:
    """What an earlier run measured for `key`, if that can be read."""
    try:
        return value_of(MemoryModel, json.loads(_file_of(key).read_text()))
    except (OSError, ValueError):
        return None


def _file_of(key: str) -> Path:
    return cache_dir() / "memory" / f"{key}.json"


def probe_key(model: SuperModel, specs: Sequence[JobSpec], deterministic: bool, device: torch.device) -> str:
    """Of all that the measured bytes depend on: the base's shape and form, device, versions, the ranks of the largest two adapters, of the
    largest at experts, and of those that are measured without it; and of the format in which they are kept.
    """
    sizes = [(name, tuple(p.shape), str(p.dtype)) for name, p in model.model.named_parameters()]
    ranks = sorted((spec.largest_rank for spec in specs), reverse=True)[:2]
    at_experts = max(((spec.largest_rank, spec.expert_rank) for spec in specs if spec.target_parameters), default=None)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    kernels = model.kernels_on(device, deterministic)
    facts: tuple[object, ...] = (_FORMAT, sizes, ranks, at_experts, deterministic, name, kernels, torch.__version__, __version__)
    facts += tuple(sorted((spec.largest_rank for spec in own), reverse=True)[:2] for own in kinds_of_passes(model, specs)[1:])
    facts += (model.base.layers.held_bytes,) if model.base.layers is not None else ()  # of a shared base, fewer the more share it
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


_TRIED = 4  # times
_LEFT_FREE = 16  # the part of the memory limit that is left free after a micro-batch ran out of memory


def rehearse(run: RunSpec, plan: RunPlan, model: SuperModel, meter: Meter, note: Callable[[str], object]) -> RunPlan:
    """Where samples are longer than the token budget: `plan`, after the longest by itself and a full micro-batch have shown that they take
    no more than is planned, or else a plan by what they take. `model` must have no resident.
    """
    left = 0  # bytes that the plan leaves free by now
    for _ in range(_TRIED):
        if plan.largest == plan.token_budget or not plan.can_run:
            break
        excess = _excess_bytes(plan, model, meter)
        model.release_memory()  # blocks of other sizes than the run's
        if excess is not None and excess <= left:
            break
        more = plan.limit_bytes // _LEFT_FREE if excess is None else excess - left
        took = "ran out of memory" if excess is None else f"took {gib(more)} more than planned"
        note(f"a full micro-batch or that of the longest sample {took}: the plan leaves {gib(more)} more free")
        left += more
        plan = settle(run, plan, replace(plan.memory, base_bytes=plan.memory.base_bytes + more), model.device)
    return plan


def _excess_bytes(plan: RunPlan, model: SuperModel, meter: Meter) -> int | None:
    """By how much the two take more than is planned, with adapters like the largest two of the jobs; None where memory runs out."""
    before, excess = model.recompute, 0
    try:
        for own in kinds_of_passes(model, plan.can_run):
            with residents(model, own) as names:
                longest = probe_batch(names[:1], plan.longest, model, plan.longest, plan.largest)
                for batch in (longest, probe_batch(names, plan.token_budget, model)):
                    tokens = len(batch.input_ids_T)
                    peaks = run_batch(model, batch, plan.recompute.layers(tokens), meter)
                    excess = max(excess, max(peaks.head, peaks.layers) - plan.memory.activation_bytes(tokens, peaks.recomputed_layers))
    except torch.OutOfMemoryError:
        return None
    finally:
        model.recompute = before
    return excess
