"""Objectives. `job.LEARNS_FROM` lists their names; `name.py` here has a class `Name`. `sft`, cross-entropy, is the super-model's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

from tlora.job import LEARNS_FROM, JobSpec, TrainConfig
from tlora.objectives.dpo import Dpo
from tlora.objectives.kto import Kto
from tlora.objectives.objective import BatchStatistic, Objective, TokenLogprobs, Unit, UnitLoss, UnitLosses, differentiate, round_exact
from tlora.objectives.orpo import Orpo

OBJECTIVES: Mapping[str, Any] = {
    name: getattr(import_module(f"{__name__}.{name}"), name.capitalize()) for name in LEARNS_FROM if name != "sft"
}
"""Class by name."""


def objective_of(train: TrainConfig) -> Objective | None:
    """What `train` orders, with those of its fields that the objective has; None for cross-entropy."""
    if train.objective == "sft":
        return None
    kind = OBJECTIVES[train.objective]
    known = type(train).model_fields
    return kind(**{field.name: getattr(train, field.name) for field in fields(kind) if field.name in known})


def compares_with_start(spec: JobSpec) -> bool:
    """Whether the job's reference is the adapter of its `adapter_path`. Without one it starts as the base, which is its reference."""
    objective = objective_of(spec)
    return objective is not None and objective.needs_reference and bool(spec.adapter_path) and spec.reference == "start"


__all__ = [
    "OBJECTIVES",
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
