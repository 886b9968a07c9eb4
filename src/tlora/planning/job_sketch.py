"""Jobs as a plan sees them that loads no torch: their data, tokenized as training does it, and the shapes of their adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tlora.adapter_shape import ExpertJobs, ExpertSize, expert_jobs
from tlora.adapters.targets import read_shape, resolve, rows_of, token_rows
from tlora.batching.replicas import ReplicaPlacement
from tlora.data.prepare import Prepared
from tlora.errors import DataError, ModelError, TloraError
from tlora.job import JobSpec, LoraShape, RunSpec
from tlora.registry import OBJECTIVES
from tlora.shape.base_parts import BaseParts
from tlora.shape.base_shape import BaseShape
from tlora.shape.length_limits import check_length


@dataclass(frozen=True, slots=True)
class LinearSketch:
    """As `adapters.state.AdapterShape`, without its scale."""

    module: str
    rank: int
    in_features: int
    out_features: int
    experts: int = 1

    @property
    def rows(self) -> int:
        return self.rank * self.experts


@dataclass(frozen=True)
class AdapterSketch:
    """As `adapters.state.AdapterLayout`."""

    shapes: tuple[LinearSketch, ...]

    @property
    def numel(self) -> int:
        return sum(s.rows * (s.in_features + s.out_features) for s in self.shapes)


@dataclass(frozen=True)
class JobSketch:
    """As `job_plan.PlannedJob`."""

    spec: JobSpec
    data: Prepared | None = None
    longest: int = 1
    layout: AdapterSketch | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=(), compare=False)
    span: ReplicaPlacement | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def adapts_experts(self) -> bool:
        return self.layout is not None and any(shape.experts > 1 for shape in self.layout.shapes)

    @property
    def replicas(self) -> int:
        return self.spec.gpus if self.span is None else self.span.replicas

    @property
    def compares_with_start(self) -> bool:
        has_reference = OBJECTIVES[self.spec.objective].forwards_beside > 0
        return has_reference and bool(self.spec.adapter_path) and self.spec.reference == "start"

    def within(self, parts: BaseParts, first: int, end: int) -> JobSketch:
        """With its adapter's linears in the decoder layers from `first` up to `end` only; those in no layer are the last one's."""
        assert self.layout is not None, self.spec.name
        last = len(parts.layers) - 1
        places = ((shape, parts.layer_of(shape.module)) for shape in self.layout.shapes)
        kept = tuple(shape for shape, layer in places if first <= (last if layer is None else layer) < end)
        return replace(self, layout=AdapterSketch(kept))


def sketch_jobs(run: RunSpec, base: BaseShape, data: Mapping[str, Prepared | DataError]) -> tuple[JobSketch, ...]:
    """What is wrong with a job is in its `problems`."""
    return tuple(_sketch(job, base, data[job.name]) for job in run.jobs)


def _sketch(spec: JobSpec, base: BaseShape, data: Prepared | DataError) -> JobSketch:
    try:
        if isinstance(data, DataError):
            raise data
        sets = [one for one in (data.train, data.eval) if one is not None]
        longest, sequence = (max(int(getattr(one, name).max()) for one in sets) for name in ("lengths", "longest_sequences"))
        check_length(base.limits, sequence)
        layout = _adapter(spec, base)
    except TloraError as error:
        return JobSketch(spec, problems=(str(error),))
    return JobSketch(spec.model_copy(update={"data": data.data}), data, longest, layout, warnings=tuple(data.warnings()))


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


def _adapter(spec: JobSpec, base: BaseShape) -> AdapterSketch:
    """Raises ModelError."""
    shape = adapter_shape(spec)
    targets = resolve(base.linears, base.modules, base.experts, shape, base.parameters)
    linears = tuple(_linear_sketch(shape, name, size) for name, size in targets.items())
    name, rows, width = base.embedding
    tokens = token_rows(shape, name, rows)
    return AdapterSketch((*linears, LinearSketch(name, len(tokens), width, 0)) if tokens else linears)


def _linear_sketch(shape: LoraShape, name: str, size: tuple[int, int] | ExpertSize) -> LinearSketch:
    experts = size.experts if isinstance(size, ExpertSize) else 1
    return LinearSketch(name, rows_of(shape, name, size) // experts, size[0], size[1], experts)
