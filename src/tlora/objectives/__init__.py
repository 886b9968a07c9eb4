"""Objectives, one a file; `registry.OBJECTIVES` lists them. `sft`, cross-entropy, is the super-model's own."""

from __future__ import annotations

from tlora.job import JobSpec, TrainConfig
from tlora.objectives.dpo import Dpo
from tlora.objectives.kto import Kto
from tlora.objectives.objective import BatchStatistic, Objective, TokenLogprobs, Unit, UnitLoss, UnitLosses, differentiate, round_exact
from tlora.objectives.orpo import Orpo
from tlora.registry import OBJECTIVES


def objective_of(train: TrainConfig) -> Objective | None:
    """What `train` orders, with the fields that the objective takes; None for cross-entropy."""
    entry = OBJECTIVES[train.objective]
    return entry.load()(**{name: getattr(train, name) for name in entry.settings}) if entry.place else None


def compares_with_start(spec: JobSpec) -> bool:
    """Whether the job's reference is the adapter of its `adapter_path`. Without one it starts as the base, which is its reference."""
    objective = objective_of(spec)
    return objective is not None and objective.needs_reference and bool(spec.adapter_path) and spec.reference == "start"


__all__ = [
    "BatchStatistic",
    "Dpo",
    "Kto",
    "Objective",
    "Orpo",
    "TokenLogprobs",
    "Unit",
    "UnitLoss",
    "UnitLosses",
    "compares_with_start",
    "differentiate",
    "objective_of",
    "round_exact",
]
