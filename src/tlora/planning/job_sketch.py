"""Jobs as a plan sees them that loads no torch: their data, tokenized as training does it, and the shapes of their adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tlora.adapter_shape import ExpertJobs, expert_jobs
from tlora.adapters.layout import AdapterLayout, AdapterShape, make_layout
from tlora.adapters.targets import read_shape, resolve, token_rows
from tlora.data.prepare import Prepared
from tlora.errors import DataError, ModelError, TloraError
from tlora.job import JobSpec, LoraShape, RunSpec
from tlora.planning.planned_job import PlannedJob
from tlora.shape.base_shape import BaseShape
from tlora.shape.length_limits import check_length


def sketch_jobs(run: RunSpec, base: BaseShape, data: Mapping[str, Prepared | DataError]) -> tuple[PlannedJob, ...]:
    """What is wrong with a job is in its `problems`."""
    return tuple(_sketch(job, base, data[job.name]) for job in run.jobs)


def _sketch(spec: JobSpec, base: BaseShape, data: Prepared | DataError) -> PlannedJob:
    try:
        if isinstance(data, DataError):
            raise data
        check_length(base.limits, data.longest_sequence)
        layout = _adapter(spec, base)
    except TloraError as error:
        return PlannedJob(spec, problems=[str(error)])
    return PlannedJob(spec.model_copy(update={"data": data.data}), data, data.longest, layout, warnings=data.warnings())


def adapter_shape(spec: JobSpec) -> LoraShape:
    """Of a job's adapter; of one that continues another, that one's shape. Raises ModelError."""
    if spec.adapter_path is None:
        return spec
    try:
        return read_shape(Path(spec.adapter_path))
    except (OSError, ValueError) as error:
        raise ModelError(f"adapter_path {spec.adapter_path}: the adapter there cannot be read ({error}). Name a PEFT adapter") from None


def largest_adapter(jobs: Sequence[JobSpec]) -> tuple[int, ExpertJobs]:
    """The largest rank of the adapters of `jobs`, and whether they adapt experts. One that cannot be read counts as its job's order says:
    it is refused in its turn, or the job goes on from a checkpoint whose shape the order has by now.
    """
    shapes: list[LoraShape] = []
    for spec in jobs:
        try:
            shapes.append(adapter_shape(spec))
        except ModelError:
            shapes.append(spec)
    return max((shape.largest_rank for shape in shapes), default=1), expert_jobs(bool(shape.target_parameters) for shape in shapes)


def _adapter(spec: JobSpec, base: BaseShape) -> AdapterLayout:
    """Raises ModelError."""
    shape = adapter_shape(spec)
    layout = make_layout(shape, resolve(base.linears, base.modules, base.experts, shape, base.parameters))
    name, rows, width = base.embedding
    tokens = token_rows(shape, name, rows)
    return replace(layout, shapes=(*layout.shapes, AdapterShape(name, len(tokens), width, 0, 1.0, tokens))) if tokens else layout
