"""What a run would take, and how fast it would be, with no layer recomputed, half of them, or all: for `tlora check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tlora.job import Recompute, RunSpec
from tlora.planning.plan import RunPlan, fit, token_cost
from tlora.planning.work import trained_tokens


@dataclass(frozen=True)
class RecomputeChoice:
    """`recompute` as a jobs file has it, and what follows: layers, token budget, bytes with the resident jobs, and tokens a second."""

    recompute: Recompute
    recomputed_layers: int
    token_budget: int
    predicted_bytes: int
    fits: bool
    tokens_per_second: float


def predicted_rate(plan: RunPlan, seconds: Mapping[str, float]) -> float:
    """Tokens a second of the resident jobs as they are planned; 0 where nothing is trained, or on the plain path, which is not known."""
    jobs = [job for job in plan.residents if not job.problems]
    tokens, needed = sum(map(trained_tokens, jobs)), sum(seconds[job.spec.name] for job in jobs)
    return (
        tokens / needed / token_cost(plan.token_budget, plan.recomputed_layers, plan.memory) if needed and plan.memory.num_layers else 0.0
    )


def recompute_choices(run: RunSpec, plan: RunPlan, seconds: Mapping[str, float], device: torch.device) -> tuple[RecomputeChoice, ...]:
    """Of a run on one GPU with the resident jobs of `plan`; none where nothing can be recomputed. `seconds`: as predicted, by job."""
    jobs = [job for job in plan.residents if not job.problems]
    tokens, needed = sum(map(trained_tokens, jobs)), sum(seconds[job.spec.name] for job in jobs)
    if not plan.memory.num_layers or not needed:
        return ()
    found: list[RecomputeChoice] = []
    options: list[Recompute] = ["none", plan.memory.num_layers // 2, "all"]
    for recompute in options:
        budget, depth = fit(run.model_copy(update={"recompute": recompute}), jobs, plan, plan.memory, device)
        total = plan.memory.total_bytes([job.layout for job in jobs if job.layout is not None], budget, depth)
        rate = tokens / needed / token_cost(budget, depth, plan.memory)
        found.append(RecomputeChoice(recompute, depth, budget, total, total <= plan.limit_bytes, rate))
    return tuple(found)
