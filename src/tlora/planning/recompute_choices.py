"""What a run would take, and how fast it would be, with no layer recomputed, half of them, or all: for `tlora check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tlora.job import Recompute, RunSpec
from tlora.planning.job_work import trained_tokens
from tlora.planning.micro_batches import choose, cost_of, sample_lengths
from tlora.planning.plan import RunPlan
from tlora.planning.work import token_cost


@dataclass(frozen=True)
class RecomputeChoice:
    """`recompute` as a jobs file has it, and what follows: layers of the largest micro-batch and of one that fills the token budget, that
    budget, bytes with the resident jobs, and tokens a second.
    """

    recompute: Recompute
    recomputed_layers: int
    layers_of_budget: int
    token_budget: int
    predicted_bytes: int
    fits: bool
    tokens_per_second: float


def predicted_rate(plan: RunPlan, seconds: Mapping[str, float], device: torch.device) -> float:
    """Tokens a second of the resident jobs as they are planned; 0 where nothing is trained."""
    jobs = [job for job in plan.residents if not job.problems]
    tokens, needed = sum(map(trained_tokens, jobs)), sum(seconds[job.spec.name] for job in jobs)
    cost = cost_of(plan.micro_batches, sample_lengths(jobs), token_cost(plan.memory, device, plan.link_tokens))
    return tokens / needed / cost if needed else 0.0


def recompute_choices(run: RunSpec, plan: RunPlan, seconds: Mapping[str, float], device: torch.device) -> tuple[RecomputeChoice, ...]:
    """Of a run on one GPU with the resident jobs of `plan`; none where nothing can be recomputed. As it is planned comes first where its
    micro-batches differ in this. `seconds`: as predicted, by job.
    """
    jobs = [job for job in plan.residents if not job.problems]
    tokens, needed = sum(map(trained_tokens, jobs)), sum(seconds[job.spec.name] for job in jobs)
    if not plan.memory.num_layers or not needed:
        return ()
    lengths, layouts = sample_lengths(jobs), [job.layout for job in jobs if job.layout is not None]
    cost = token_cost(plan.memory, device, plan.link_tokens)
    found: list[RecomputeChoice] = []
    each = plan.recompute.layers(plan.token_budget)
    options: list[Recompute] = ["auto"] if each < plan.recomputed_layers else []
    for recompute in (*options, "none", plan.memory.num_layers // 2, "all"):
        chosen = plan.micro_batches
        if recompute != "auto":
            asked = run.model_copy(update={"recompute": recompute})
            chosen = choose(asked, jobs, plan.longest, plan.memory, plan.limit_bytes, cost)
        planned = replace(plan, token_budget=chosen.token_budget, recompute=chosen.recompute)
        total, rate = planned.total_bytes(layouts), tokens / needed / cost_of(chosen, lengths, cost)
        of_budget = chosen.recompute.layers(chosen.token_budget)
        fits = total <= plan.limit_bytes
        found.append(RecomputeChoice(recompute, planned.recomputed_layers, of_budget, chosen.token_budget, total, fits, rate))
    return tuple(found)
