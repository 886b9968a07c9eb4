"""A job before it runs, as all plans see it. Without torch: `job_plan.py` makes one of a model, `job_sketch.py` of a base's shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlora.adapters.layout import AdapterLayout
from tlora.batching.replicas import ReplicaPlacement
from tlora.data.prepare import Prepared
from tlora.job import JobSpec
from tlora.registry import OBJECTIVES


@dataclass
class PlannedJob:
    """One job with all that is known before it starts. `problems` keep it from starting."""

    spec: JobSpec
    data: Prepared | None = None
    longest: int = 1  # tokens of the longest sample that it trains or evaluates on here
    layout: AdapterLayout | None = None
    problems: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    too_large: str | None = None  # that one of the problems which depends on the memory model
    span: ReplicaPlacement | None = None  # where its replicas are, if not all in one place
    kept_out: bool = False  # of this device, which has too little memory for it, where another has not

    @property
    def adapts_experts(self) -> bool:
        """An adapter that is not known has none."""
        return self.layout is not None and self.layout.adapts_experts

    @property
    def replicas(self) -> int:
        """That each of its global batches is cut among."""
        return self.spec.gpus if self.span is None else self.span.replicas

    @property
    def weights(self) -> tuple[float, ...]:
        """Shares of these, where they are not equal."""
        return () if self.span is None else self.span.weights

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of the longest sample that each of these gets, 0 for any; none: all get any."""
        return () if self.span is None else self.span.longest_of_each

    @property
    def compares_with_start(self) -> bool:
        """Whether its reference is the adapter that it starts from."""
        has_reference = OBJECTIVES[self.spec.objective].forwards_beside > 0
        return has_reference and bool(self.spec.adapter_path) and self.spec.reference == "start"

    def said(self) -> list[str]:
        """Its warnings, and what its chat template changes."""
        return self.warnings + [
            "\n".join(lines) for report in (self.data.reports if self.data else ()) if (lines := report.template_changes())
        ]
