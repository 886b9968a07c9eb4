"""The plan of a group: how many tokens a micro-batch holds on GPUs that are given. Not here: which jobs and which GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from tlora.protocol import JobSubmitted, ParallelPlan
from tlora.scheduler.job import Job
from tlora.shape.cost import CostModel
from tlora.shape.sharing import ROUNDING, group_step_seconds


def exclusive_plan(cost: CostModel, job: Job, gpus: int, room_bytes: float | None = None) -> ParallelPlan:
    """As `plan_alone`, of a job that fits: `why_never` refuses one that has no budget at all."""
    plan = plan_alone(cost, job, gpus, room_bytes)
    assert plan is not None, f"{job.spec.job_id}: no prepared budget holds a sample of {job.spec.profile.longest_sample_tokens} and fits"
    return plan


def plan_alone(cost: CostModel, job: Job, gpus: int, room_bytes: float | None = None) -> ParallelPlan | None:
    """The plan of `job` by itself: the smallest prepared budget that holds one step, else the largest that fits into `room_bytes` of a
    GPU, else that of its longest sample, with as many layers recomputed as that takes; None where that does not fit.

    A budget that does not hold the job's longest sample is none.
    """
    base, profile, over_hosts = job.spec.base_model, job.spec.profile, is_over_hosts(job.spec)
    chosen, layers = 0, 0
    for tokens in cost.budgets:
        if tokens < profile.longest_sample_tokens:
            continue
        if not cost.fits(base, profile.adapter_parameters, tokens, gpus, room_bytes, over_hosts):
            break
        chosen = tokens
        if tokens * gpus >= profile.tokens_per_step:
            break
    if not chosen:
        longest, room = profile.longest_sample_tokens, cost.room_bytes(base) if room_bytes is None else room_bytes
        takes = base, profile.adapter_parameters, longest, gpus, room, over_hosts
        if longest > cost.budgets[-1] or cost.least_bytes(*takes) > room:
            return None
        chosen, layers = longest, cost.recomputed_layers(*takes)
    return ParallelPlan(gpus, chosen * gpus, layers)


def is_over_hosts(spec: JobSubmitted) -> bool:
    """Whether its base is in parts that GPUs of several hosts may hold."""
    return spec.least_gpus > 1 and not spec.on_one_host


def shared_plan(
    cost: CostModel, gpus: int, nodes: int, jobs: Sequence[Job], check_bounds: bool = True, room_bytes: float | None = None
) -> ParallelPlan | None:
    """The plan under which `jobs`, with their needs as weights, are on average slowed down least; None if there is none.

    Of the prepared budgets that hold every member's longest sample and fit into `room_bytes` of a GPU, and under which with `check_bounds`
    no member's step takes more than max slowdown * T0, nor would when all others have left, the one with the least mean of step / T0; of
    equals the largest.
    """
    base = jobs[0].spec.base_model
    offered = sum([job.spec.profile.tokens_per_step for job in jobs])
    if check_bounds and len(jobs) > 1:
        filled = min(cost.fill_share * cost.budgets[-1] * gpus, offered)
        if sum([job.need for job in jobs]) > cost.capacity(base, filled, gpus, nodes, len(jobs)) * (1 + ROUNDING):
            return None  # of all micro-batches that they can fill the largest serves most; most attempts end here
    parameters = sum(job.spec.profile.adapter_parameters for job in jobs)
    longest = max(job.spec.profile.longest_sample_tokens for job in jobs)
    members = [job.as_member(job.weight) for job in jobs]
    over_hosts = any(is_over_hosts(job.spec) for job in jobs)
    best, best_mean, tried = 0, 0.0, False
    for tokens in reversed(cost.budgets):
        budget = tokens * gpus
        if tokens < longest:
            break
        if tried and cost.fill_share * budget >= offered:  # the larger ones were not full either: nothing differs
            continue
        if not cost.fits(base, parameters, tokens, gpus, room_bytes, over_hosts):
            continue
        tried = True
        seconds = group_step_seconds(cost, base, budget, gpus, nodes, members)
        slowdowns = [own / job.alone_step_seconds for own, job in zip(seconds, jobs, strict=True)]
        if check_bounds and any(own > job.spec.max_slowdown * (1 + ROUNDING) for own, job in zip(slowdowns, jobs, strict=True)):
            continue
        if check_bounds and not _bounds_hold_alone(cost, base, budget, gpus, nodes, jobs):
            continue
        mean = sum(slowdowns)
        if not best or mean < best_mean:
            best, best_mean = budget, mean
    return ParallelPlan(gpus, best) if best else None


def _bounds_hold_alone(cost: CostModel, base: str, budget: int, gpus: int, nodes: int, jobs: Sequence[Job]) -> bool:
    """Whether each keeps its bound under this budget when all others have left: a step of more than one micro-batch may not."""
    for job in jobs:
        tokens, most = job.spec.profile.tokens_per_step, job.spec.max_slowdown * job.alone_step_seconds * (1 + ROUNDING)
        if tokens > budget and cost.lone_step_seconds(base, budget, gpus, nodes, tokens) > most:
            return False
    return True


def most_capacity(cost: CostModel, base: str, gpus: int, nodes: int, members: int) -> float:
    """Tokens per second that a group of several can serve at most: under the largest budget, filled as far as such are."""
    return cost.capacity(base, cost.fill_share * cost.budgets[-1] * gpus, gpus, nodes, members)
