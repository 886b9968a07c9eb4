"""The strongest of what a user of transformers and PEFT has today: one job after another, in the best of several settings.

Adapters in bf16 (`autocast_adapter_dtype=False`, worth 44 % over PEFT's default), fused AdamW, no scheduler, no logging, and no time
counted for loading the base anew for each job: all of it to PEFT's advantage. All jobs run at one rank (`middle_rank`).
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from peft import get_peft_model
from torch import Tensor

from bench.machine import wait
from bench.peft_configs import lora_config
from bench.shapes import SHAPES, make_model
from bench.together import compiled_graphs, gib
from bench.workload import Job
from tlora.data.dataset import Sample

WARM_UP_STEPS = 3
WINDOW_STEPS = 4  # between two waits for the device: one after every step would cost PEFT its overlap of host and device
BOUND_BY_LAUNCHES = 2048  # tokens a step, up to which CUDA graphs can help
PAD_MULTIPLE = 8  # as transformers' collators pad for tensor cores
IGNORED = -100


@dataclass(frozen=True)
class Setting:
    """One way to run PEFT. `packed`: a batch is one row with position ids, without padding; else right-padded to its longest."""

    compiled: bool = False
    graphs: bool = False  # mode="reduce-overhead"
    liger: bool = False
    packed: bool = False

    @property
    def name(self) -> str:
        parts = [name for name in ("compiled", "graphs", "liger", "packed") if getattr(self, name)]
        return " + ".join(parts) or "plain"


@dataclass(frozen=True)
class Target:
    """What the settings are measured on: `steps` optimizer steps, of each job where jobs differ. No setting begins after `deadline`."""

    shape: str
    device: torch.device
    dtype: torch.dtype
    steps: int
    deadline: float  # of time.perf_counter()
    layers: int | None = None  # other than the shape's


def settings_for(jobs: Sequence[Job]) -> list[Setting]:
    """Those that may win. Liger's come last: it patches transformers' classes, which nothing undoes."""
    if not equal_lengths(jobs):
        return [
            Setting(compiled, False, liger, packed) for liger in (False, True) for compiled in (True, False) for packed in (False, True)
        ]
    graphs = max(job.batch_tokens for job in jobs) <= BOUND_BY_LAUNCHES
    ways = [Setting(compiled=True), *([Setting(compiled=True, graphs=True)] if graphs else []), Setting()]
    return [*ways, *(Setting(way.compiled, way.graphs, True) for way in ways)]


def equal_lengths(jobs: Sequence[Job]) -> bool:
    """Whether all samples of all jobs are of one length: there is nothing to pad, and one job's steps cost what any other's do."""
    return len({int(length) for job in jobs for length in (job.data.lengths.min(), job.data.lengths.max())}) == 1


def middle_rank(jobs: Sequence[Job]) -> int:
    """The lower median of the jobs' ranks: for 8, 16, 32 and 64 it is 16, below their mean of 30."""
    return statistics.median_low(job.spec.r for job in jobs)


def measure(jobs: Sequence[Job], target: Target, mix: Mapping[str, int], names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A row per setting (all, or those called `names`), the best one marked. Tokens per second are those of doing `mix`, tokens by job
    name, one job after another.
    """
    settings = {setting.name: setting for setting in settings_for(jobs)}
    if unknown := [name for name in names if name not in settings]:
        raise SystemExit(f"--peft-settings {unknown[0]}: no such setting for these jobs; there are {', '.join(settings)}")
    rows: list[dict[str, Any]] = []
    for setting in [each for each in settings.values() if not names or each.name in names]:
        row: dict[str, Any] = {"system": "peft", "setting": setting.name, "rank": middle_rank(jobs), **asdict(setting)}
        if setting.liger and importlib.util.find_spec("liger_kernel") is None:
            row["skipped"] = "liger_kernel is not installed"
        elif time.perf_counter() > target.deadline:
            row["skipped"] = "the time limit was reached"
        else:
            row |= _measure_setting(setting, jobs, target, mix)
        rows.append(row)
        print(row, flush=True)
    measured = [row for row in rows if "tokens_per_second" in row]
    if measured:
        max(measured, key=lambda row: row["tokens_per_second"])["best"] = True
    return rows


def _measure_setting(setting: Setting, jobs: Sequence[Job], target: Target, mix: Mapping[str, int]) -> dict[str, Any]:
    """Figures, or why there are none: a library that cannot run a setting is a finding, not the end of the benchmark."""
    try:
        return _train(setting, jobs, target, mix)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]}
    finally:
        torch.compiler.reset()
        gc.collect()
        if target.device.type == "cuda":
            torch.cuda.empty_cache()


def _train(setting: Setting, jobs: Sequence[Job], target: Target, mix: Mapping[str, int]) -> dict[str, Any]:
    start = time.perf_counter()
    cuda = target.device.type == "cuda"
    model, static_bytes = _build(setting, middle_rank(jobs), target, dynamic=not equal_lengths(jobs))
    built = time.perf_counter()
    params = [p for p in model.parameters() if p.requires_grad]
    step = partial(_step, model, params, torch.optim.AdamW(params, lr=1e-4, weight_decay=0.0, fused=True), setting)
    kinds = list(jobs[:1]) if equal_lengths(jobs) else list(jobs)
    batches = {job.spec.name: [_collate(job.batch(i), setting, target.device) for i in range(target.steps)] for job in kinds}
    shapes = _one_of_each_shape([batch for of_job in batches.values() for batch, _ in of_job])
    for i in range(max(WARM_UP_STEPS, len(shapes))):  # a new shape may bring compilation, tuned kernels and memory from the device
        step(shapes[i % len(shapes)])
    wait(target.device)
    warm, graphs = time.perf_counter(), compiled_graphs()
    if cuda:
        if setting.graphs:
            torch.cuda.empty_cache()  # what is reserved from here on: the graphs' pools, and what is beside them
        torch.cuda.reset_peak_memory_stats(target.device)
    speeds = {job.spec.name: _speed(step, batches[job.spec.name], target.device) for job in kinds}
    peak = _peak_bytes(setting, target.device) if cuda else 0
    alike = speeds.get(jobs[0].spec.name, 0.0) if len(kinds) == 1 else 0.0
    seconds = sum(tokens / (alike or speeds[name]) for name, tokens in mix.items())
    return {
        "tokens_per_second": sum(mix.values()) / seconds,
        "tokens_per_second_of_jobs": speeds,
        "activations_gib": gib(max(0, peak - static_bytes)),
        "peak_gib": gib(peak),
        "build_seconds": built - start,
        "warm_up_seconds": warm - built,
        "steps_per_job": target.steps,
        "shapes_warmed": len(shapes),
        "graphs_compiled_after_warm_up": compiled_graphs() - graphs,
    }


def _one_of_each_shape(batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The first batch of each shape, in the order in which they come."""
    first: dict[torch.Size, dict[str, Tensor]] = {}
    for batch in batches:
        first.setdefault(batch["input_ids"].shape, batch)
    return list(first.values())


def _build(setting: Setting, rank: int, target: Target, dynamic: bool) -> tuple[Any, int]:
    """The model with one adapter, and the bytes that it, its gradients and its optimizer state take on the device."""
    if setting.liger:
        _apply_liger(SHAPES[target.shape].model_type, setting)
    base = make_model(target.shape, target.device, target.dtype, target.layers)
    model: Any = get_peft_model(base, lora_config(target.shape, rank, 2 * rank), autocast_adapter_dtype=False)
    model.train()
    weights = torch.cuda.memory_allocated(target.device) if target.device.type == "cuda" else 0
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if setting.compiled:
        for layer in model.base_model.model.model.layers:
            layer.compile(dynamic=dynamic, mode="reduce-overhead" if setting.graphs else None)
    return model, weights + 3 * trained


def _apply_liger(family: str, setting: Setting) -> None:
    """All of it; under torch.compile its head and loss alone, which stay outside. Inductor fuses a layer's norms, rotation and SwiGLU
    itself; of Liger 0.8.5's kernels for them PyTorch 2.11 cannot tell what they write, and takes it to be every input.
    """
    within = dict.fromkeys(("rope", "rms_norm", "swiglu"), not setting.compiled)
    getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{family}")(**within)


def _peak_bytes(setting: Setting, device: torch.device) -> int:
    """A replayed CUDA graph allocates nothing: what it works in is seen in the memory that is reserved alone."""
    return torch.cuda.max_memory_reserved(device) if setting.graphs else torch.cuda.max_memory_allocated(device)


def _step(model: Any, params: list[Tensor], optimizer: torch.optim.Optimizer, setting: Setting, batch: dict[str, Tensor]) -> None:
    if setting.graphs:
        torch.compiler.cudagraph_mark_step_begin()
    model(**batch, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _speed(step: Any, batches: Sequence[tuple[dict[str, Tensor], int]], device: torch.device) -> float:
    """Useful tokens per second: the median window's for equal batches, the whole's where batches differ in size."""
    equal = len({tokens for _, tokens in batches}) == 1
    size = WINDOW_STEPS if equal else len(batches)
    speeds: list[float] = []
    for first in range(0, len(batches), size):
        window = batches[first : first + size]
        wait(device)
        start = time.perf_counter()
        for batch, _ in window:
            step(batch)
        wait(device)
        speeds.append(sum(tokens for _, tokens in window) / (time.perf_counter() - start))
    return statistics.median(speeds)


def _collate(samples: Sequence[Sample], setting: Setting, device: torch.device) -> tuple[dict[str, Tensor], int]:
    """One optimizer step's batch as the model takes it, and its useful tokens. Targets without a weight are ignored."""
    lengths = [len(sample.input_ids) for sample in samples]
    labels = [np.where(sample.loss_weights > 0, sample.input_ids, IGNORED).astype(np.int64) for sample in samples]
    for row in labels:
        row[0] = IGNORED  # of a sample that stands behind another in one row, the first token is nobody's target
    ids = [sample.input_ids.astype(np.int64) for sample in samples]
    if setting.packed:
        positions = np.concatenate([np.arange(length) for length in lengths])
        packed = {"input_ids": np.concatenate(ids), "labels": np.concatenate(labels), "position_ids": positions}
        return {name: torch.from_numpy(values)[None].to(device) for name, values in packed.items()}, sum(lengths)
    if len(set(lengths)) == 1:
        equal = {"input_ids": np.stack(ids), "labels": np.stack(labels)}
        return {name: torch.from_numpy(values).to(device) for name, values in equal.items()}, sum(lengths)
    longest = -(-max(lengths) // PAD_MULTIPLE) * PAD_MULTIPLE
    padded = {
        "input_ids": np.stack([np.pad(row, (0, longest - len(row))) for row in ids]),
        "labels": np.stack([np.pad(row, (0, longest - len(row)), constant_values=IGNORED) for row in labels]),
        "attention_mask": np.stack([(np.arange(longest) < length).astype(np.int64) for length in lengths]),
    }
    return {name: torch.from_numpy(values).to(device) for name, values in padded.items()}, sum(lengths)
