"""What is known of each job by itself before it starts: its data, its adapter's shape, its problems."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tlora.adapters.layout import AdapterLayout
from tlora.adapters.pattern_warnings import pattern_warnings
from tlora.adapters.peft import load_params, read_config, refused_by_peft, without_place_in_peft
from tlora.adapters.state import AdapterState
from tlora.base_digest import trained_over
from tlora.data.dataset import Dataset
from tlora.data.order import PackedRows, epoch_size, row_tokens
from tlora.data.prepare import Preparation, Prepared, prepare
from tlora.data.request import prepare_requests
from tlora.errors import DataError
from tlora.group.isolation import Failure, try_call
from tlora.job import JobSpec, RunSpec
from tlora.planning.planned_job import PlannedJob
from tlora.planning.start import PLACES, adopt_adapter_config, find_start, fit_adapter, start_state
from tlora.shape.length_limits import check_length
from tlora.supermodel.assembly import lost_by_peft
from tlora.supermodel.base_config import max_positions
from tlora.supermodel.base_name import same_base
from tlora.supermodel.load import find_directory
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import by_jobs, quantity


def job_warnings(jobs: Sequence[PlannedJob]) -> list[str]:
    """What is said of single jobs: the same of several jobs (a sweep over one file) once, with their names."""
    return by_jobs((job.spec.name, warning) for job in jobs for warning in job.said())


def plan_jobs(run: RunSpec, model: SuperModel, preparation: Preparation, resumed: Path | None) -> tuple[PlannedJob, ...]:
    """Tokenize all data and plan each job by itself (`plan_job`). Raises ModelError for a tokenizer that cannot be loaded."""
    data = prepare(prepare_requests(run, model.base.vocab_size), preparation.on_progress, preparation.started)
    return tuple(plan_job(spec, data[spec.name], model, resumed) for spec in run.jobs)


def plan_job(spec: JobSpec, data: Prepared | DataError, model: SuperModel, resumed: Path | None) -> PlannedJob:
    """What is known of a job by itself: all but whether it fits into memory. `resumed`: the run's directory, with a checkpoint perhaps.

    Never raises: each of its steps stands behind the wall, and what they raise are the job's problems.
    """
    job = PlannedJob(spec)
    steps = partial(_take_data, job, data, model.model), partial(_take_shape, job, model, resumed), partial(_check_length, job, model)
    for step in steps:
        if isinstance(failed := try_call(step), Failure):
            job.problems.append(failed.reason)
    return job


def _take_data(job: PlannedJob, data: Prepared | DataError, model: Any) -> None:
    if isinstance(data, DataError):
        raise data
    job.data, job.longest = data, data.longest
    job.spec = job.spec.model_copy(update={"data": data.data})
    job.warnings += (
        _rate_warnings(job.spec)
        + _warmup_warnings(job.spec, epoch_size(data.train.epoch))
        + _packing_notes(job.spec, data.train)
        + data.warnings()
        + _position_warnings(data, max_positions(model))
    )


def _take_shape(job: PlannedJob, model: SuperModel, resumed: Path | None) -> None:
    """The adapter's layout; where the job starts from an adapter, that one's shape, and its weights read once to see that they fit."""
    start = find_start(job.spec, resumed)
    if start is not None:
        ordered = job.spec
        job.spec, warnings = adopt_adapter_config(ordered, start)
        job.layout = fit_adapter(model.layout, job.spec, start, then="set base_model to that, and take adapter_path out")
        job.warnings += warnings + _place_warnings(ordered, job.spec, job.layout, start, model) + _base_warnings(start, model.base.name)
    else:
        job.layout = model.layout(job.spec)
    job.warnings += model.left_out(job.spec) + pattern_warnings(job.spec, job.layout) + _rank_warnings(job.layout)
    model_type, linears = model.model.config.model_type, [shape.module for shape in job.layout.linears]
    job.warnings += refused_by_peft(model_type, job.layout)
    job.warnings += without_place_in_peft(model_type, job.layout, lost_by_peft(model.model, linears))
    if start is not None:
        load_params(start, job.layout, torch.float32)


def _check_length(job: PlannedJob, model: SuperModel) -> None:
    """Samples that the base cannot take at all, or only by changing the other jobs' results."""
    check_length(model.limits, job.data.longest_sequence if job.data is not None else 0)


def _rate_warnings(spec: JobSpec) -> list[str]:
    return ["learning_rate is 0: no step changes the adapter. Write one above it, such as 2e-4"] if spec.learning_rate == 0 else []


def _warmup_warnings(spec: JobSpec, epoch: int) -> list[str]:
    """A run that ends within its warm-up never trains at its learning rate, and its schedule never begins."""
    steps = spec.total_steps(epoch)
    warmup = 0 if spec.lr_scheduler_type == "constant" else spec.warmup_count(steps)
    if warmup < steps or warmup == 0:
        return []
    if steps == 1:
        return [f"warmup_steps {spec.warmup_steps:g} makes the learning rate 0 at the run's only step, which changes nothing. Write 0"]
    highest = spec.learning_rate * (steps - 1) / warmup
    return [
        f"warmup_steps {spec.warmup_steps:g} is {quantity(warmup, 'step')}, and the run has {steps}: its learning rate comes to "
        f"{highest:.3g} of {spec.learning_rate:g} and never falls. Write fewer, or a share such as warmup_steps: 0.1"
    ]


def _packing_notes(spec: JobSpec, train: Dataset) -> list[str]:
    """How much more than `batch_size` samples a batch of packed rows holds: it trains something else than a batch of samples."""
    if not isinstance(train.epoch, PackedRows):
        return []
    tokens = row_tokens(train.lengths, train.epoch)
    rows, samples, most = len(tokens), len(train), spec.data.max_length
    batch = min(spec.batch_size, rows)
    return [
        f"packing: {samples:,} samples make {rows:,} rows of up to {most:,} tokens ({tokens.sum() / (rows * most):.0%} full); a batch of "
        f"{quantity(batch, 'row')} holds about {batch * samples / rows:,.0f} samples, {tokens.mean() * batch:,.0f} tokens"
    ]


def _position_warnings(data: Prepared, most: int | None) -> list[str]:
    """Samples that reach beyond the positions which the base is made for."""
    lengths = np.concatenate([found.longest_sequences for found in (data.train, data.eval) if found is not None])
    beyond = int(np.count_nonzero(lengths > most)) if most else 0
    if not beyond:
        return []
    longer = f"{beyond:,} of {len(lengths):,} samples (up to {lengths.max():,} tokens) are longer than the base's max_position_embeddings"
    return [f"{longer} {most:,}, the positions that it is made for. Set max_length: {most} ({data.report.files[0]})"]


def _place_warnings(ordered: JobSpec, adopted: JobSpec, layout: AdapterLayout, start: Path, model: SuperModel) -> list[str]:
    """What the job says of the modules that it adapts, where that is not what the adapter has that it starts from."""
    said = [key for key in PLACES if key in ordered.model_fields_set and getattr(ordered, key) is not None]
    if not said:
        return []
    meant = try_call(partial(model.layout, ordered))
    modules = [shape.module for shape in layout.linears]
    if not isinstance(meant, Failure) and [shape.module for shape in meant.linears] == modules:
        return []
    told = ", ".join(f"{key} {getattr(ordered, key)}" for key in said)
    return [f"the adapted modules are those of {start}, {len(modules)} with target_modules {adopted.target_modules} (the job says {told})"]


def _base_warnings(start: Path, base_model: str) -> list[str]:
    named, over = read_config(start).get("base_model_name_or_path"), trained_over(start)
    differs = over.differs(find_directory(base_model)) if over is not None else None
    if differs:
        return [f"{start} was trained over {over}, and {base_model} has other files: another model, or this one in another format"]
    if not named or same_base(named, base_model) or (over is not None and over.served and differs is False):
        return []
    return [f"{start} names {named} as its base, and goes on over {base_model}: check that they are the same model"]


def _rank_warnings(layout: AdapterLayout) -> list[str]:
    over = [s for s in layout.linears if s.rank > min(s.in_features, s.out_features)]
    if not over:
        return []
    s = over[0]
    return [
        f"rank {s.rank} is larger than {s.module} ({s.in_features} to {s.out_features}): it can be trained, but a lower one says as much"
    ]


def start_ahead(jobs: Sequence[PlannedJob], dtype: torch.dtype) -> dict[str, Future[AdapterState]]:
    """`start_state` of `jobs` by name, one after another in a thread, beside the rest of the launch. Jobs that cannot run have none."""
    with_layout = [(job.spec, job.layout) for job in jobs if job.layout is not None and not job.problems]
    pool = ThreadPoolExecutor(1)
    starts = {spec.name: pool.submit(start_state, spec, layout, dtype) for spec, layout in with_layout}
    pool.shutdown(wait=False)
    return starts
