"""Which jobs can never run on a cluster, and which not on what is there now."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tlora.protocol import JobSubmitted
from tlora.scheduler.draft import finds_room
from tlora.scheduler.job import Job, Lack, Lane
from tlora.scheduler.state import ClusterState
from tlora.shape.cost import CostModel
from tlora.wording.numbers import are, gib, quantity

MOST_COUNTED = 2**53  # above it a float does not distinguish a whole number from the next


def why_never(state: ClusterState, spec: JobSubmitted) -> str | None:
    """Why the job can never run on this cluster, if so. Where hosts may come, the GPUs that are there are no reason."""
    if (reason := why_unsound(state.cost, spec)) is not None:
        return reason
    if not math.isfinite(spec.priority):
        return f"its priority is {spec.priority}. Give it a finite number"
    if spec.deadline is not None and math.isnan(spec.deadline):
        return "its deadline is no number. Give a time on the cluster's clock, or none"
    longest, budgets = spec.profile.longest_sample_tokens, state.cost.budgets
    if longest > budgets[-1]:
        return f"its longest sample has {longest} tokens, and a micro-batch on a GPU holds at most {budgets[-1]}. Cut its samples"
    lack = None if state.hosts_may_come else lack_of(state, spec)
    return lack.reason if lack is not None else None


def lack_of(state: ClusterState, spec: JobSubmitted) -> Lack | None:
    """What the job lacks if it cannot run on the GPUs that there are, or were. Nothing is known before the first have come."""
    if (reason := _why_on_no_host(state, spec)) is not None:
        return Lack(reason, more_would_do=False)
    if (reason := _why_too_few(state, spec)) is not None and state.memory.holds(state.cost, spec):
        return Lack(reason, more_would_do=True)
    if (reason := _why_too_small(state, spec) or reason) is not None:  # which no smaller number mends comes first
        return Lack(reason, more_would_do=False)
    return None


def _why_on_no_host(state: ClusterState, spec: JobSubmitted) -> str | None:
    """Of a job whose base several hosts cannot hold."""
    room = state.memory.smallest_room(state.cost, spec)
    if not spec.on_one_host or not state.pool.num_gpus or room is None:
        return None
    nodes = state.pool.lasting_nodes.values()
    widest = max([sum(state.memory.has_room(gpu, room) for gpu in node.gpus) for node in nodes], default=0)
    if spec.gpus <= widest:
        return None
    return (
        f"its base takes {quantity(spec.gpus, 'GPU')} of one host, as it is not cut into stages, and none has more than {widest} with "
        f"room for it. Train it over a smaller base, or add a host with {spec.gpus}"
    )


def those_without_room(state: ClusterState, names: Iterable[str], *, now: bool = True) -> list[str]:
    """Of jobs that wait those for which no GPU has room; with `now` also those that the GPUs that are there and not to be left would not
    hold, were all of them free. While none is there, those that could not run if all were that there were.
    """
    lacks, found = dict[Lane, bool](), list[str]()
    for name in names:
        job = state.jobs[name]
        if not job.least_room and job.spec.gpus <= state.pool.node_size:
            continue  # which is nearly every job
        if job.lane not in lacks:
            lacks[job.lane] = job.least_room == math.inf or (now and _lack_for_now(state, job) is not None)
        if lacks[job.lane]:
            found.append(name)
    return found


def park(state: ClusterState, *waiting: str) -> None:
    """Put aside those of the jobs that cannot run on what is there, so that none waits behind them, until hosts have come."""
    for name in waiting:
        if (lacks := _lack_for_now(state, state.jobs[name])) is not None:
            state.park(name, lacks)


def _lack_for_now(state: ClusterState, job: Job) -> Lack | None:
    return lack(state, job) if state.pool.node_size else lack_of(state, job.spec)


def unpark(state: ClusterState, *parked: str) -> None:
    """Let those of the jobs wait that can run on what is there by now; say anew of the others what they lack."""
    for name in parked:
        job = state.jobs[name]
        job.least_room = state.rooms.least(job.spec)
        if (lacks := lack(state, job)) is None:
            state.unpark(name)
        else:
            state.parked[name] = lacks


def lack(state: ClusterState, job: Job) -> Lack | None:
    """What the job lacks: on the GPUs that there are or were, or else on those that are left of them."""
    ever, now = lack_of(state, job.spec), lack_now(state, job)
    are_all_there = sum([len(node.gpus) for node in state.pool.lasting_nodes.values()]) == state.pool.most_gpus
    return ever if ever is not None and (are_all_there or not ever.more_would_do) else now or ever


def lack_now(state: ClusterState, job: Job) -> Lack | None:
    """What the job lacks if it finds no room on the GPUs that are there now and are not to be left, were all of them free."""
    nodes, memory, gpus = state.pool.lasting_nodes.values(), state.memory, job.spec.gpus
    sizes = [len(node.gpus) for node in nodes]

    def with_room(least: float) -> list[int]:
        return [sum([memory.has_room(gpu, least) for gpu in node.gpus]) for node in nodes]

    if finds_room(state.pool, job, with_room(job.least_room) if job.least_room else sizes):
        return None
    smallest = memory.smallest_room(state.cost, job.spec) if memory.rooms else 0
    there, fit = sum(sizes), 0 if smallest is None else sum(with_room(smallest))
    asks = f"it asks for {quantity(gpus, 'GPU')}"
    if not there:
        return Lack(f"{asks}, and none is there now", more_would_do=True)
    if fit < there:
        has = "has" if fit == 1 else "have"
        return Lack(f"{asks}, and of the {there} that {are(there)} there now {fit} {has} room for it", more_would_do=fit > 0)
    do = "does" if there == 1 else "do"
    return Lack(f"{asks}, and the {there} that {are(there)} there now {do} not hold so many", more_would_do=True)


def _why_too_few(state: ClusterState, spec: JobSubmitted) -> str | None:
    most = state.pool.most_gpus
    if not spec.gpus > most > 0:
        return None
    wants = f"its base takes {quantity(spec.gpus, 'GPU')}" if spec.gpus == spec.least_gpus else f"it asks for {quantity(spec.gpus, 'GPU')}"
    remedy = "Ask for fewer" if most >= spec.least_gpus else "Train it over a smaller base, or add GPUs"
    return f"{wants} and the cluster has {most}. {remedy}"


def _why_too_small(state: ClusterState, spec: JobSubmitted) -> str | None:
    pool, cost, profile = state.pool, state.cost, spec.profile
    if state.memory.rooms and pool.most_gpus:
        return None if state.rooms.least(spec) < math.inf else state.memory.why_too_large(cost, spec, pool.most_gpus)
    longest = profile.longest_sample_tokens
    budget = next((tokens for tokens in cost.budgets if tokens >= longest), cost.budgets[-1])
    if state.hosts_may_come or state.memory.rooms or cost.fits(spec.base_model, profile.adapter_parameters, budget, spec.least_gpus):
        return None
    needed = cost.memory_bytes(spec.base_model, profile.adapter_parameters, budget, spec.least_gpus)
    return (
        f"its base, adapter and a micro-batch of {budget} tokens, the smallest that holds its longest sample of {longest}, take "
        f"{gib(needed)}, more than may be used of a GPU. Cut its samples or its rank"
    )


def why_unsound(cost: CostModel, spec: JobSubmitted) -> str | None:
    """Why no cluster can run the job, if so: `cost` cannot price it."""
    profile = spec.profile
    if spec.base_model not in cost.constants:
        return f"its base model {spec.base_model!r} is not served here. There are {', '.join(sorted(cost.constants))}"
    if max(spec.gpus, profile.steps, profile.adapter_parameters) > MOST_COUNTED:
        return f"its GPUs, steps or trained parameters are more than {MOST_COUNTED}, the most that is counted. Give what it really has"
    if not (spec.gpus >= 1 and spec.max_slowdown >= 1 and profile.steps >= 1 and 0 < profile.tokens_per_step < math.inf):  # nor a NaN
        return (
            f"it asks for {spec.gpus} GPUs, a slowdown of {spec.max_slowdown} and {profile.steps} steps of {profile.tokens_per_step} "
            "tokens. GPUs, steps and tokens must be positive, a slowdown at least 1"
        )
    return None
