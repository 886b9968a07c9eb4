"""Objectives by the name that a jobs file gives them (`job.ObjectiveName`); `sft`, cross-entropy, is the super-model's own."""

from __future__ import annotations

from collections.abc import Mapping

from tlora.objectives.dpo import Dpo
from tlora.objectives.objective import Objective, TokenLogprobs, UnitLosses, differentiate, round_exact
from tlora.objectives.orpo import Orpo

OBJECTIVES: Mapping[str, type[Dpo] | type[Orpo]] = {"dpo": Dpo, "orpo": Orpo}

__all__ = ["OBJECTIVES", "Dpo", "Objective", "Orpo", "TokenLogprobs", "UnitLosses", "differentiate", "round_exact"]
