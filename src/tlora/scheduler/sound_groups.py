"""Whether groups that a policy wants can be: on GPUs that are there and of jobs that wait, each in one group."""

from __future__ import annotations

from collections.abc import Sequence

from tlora.protocol import JobGroup
from tlora.scheduler.state import ClusterState
from tlora.wording.numbers import quantity


def why_impossible(state: ClusterState, wanted: Sequence[JobGroup]) -> str | None:
    """What is wrong with it, if something is: GPUs or jobs that are not there or would be in two groups, or a group that is not whole."""
    changed = {group.group_id: group for group in wanted}
    if len(changed) < len(wanted):
        return "two of its groups have one name"
    gpus: dict[int, str] = {}
    jobs: dict[str, str] = {}
    for name, group in changed.items():
        if not group.job_ids:
            continue  # it ends
        reason = _why_not_whole(state, group) or _gpus_taken(state, group, changed, gpus) or _jobs_taken(state, group, changed, jobs)
        if reason is not None:
            return f"group {name}: {reason}"
    return None


def _why_not_whole(state: ClusterState, group: JobGroup) -> str | None:
    known = state.groups.get(group.group_id)
    if known is None and not (group.group_id[:1] == "g" and group.group_id[1:].isdecimal()):
        return "a new group is named g and a number"
    if known is not None and known.group.base_model != group.base_model:
        return f"its base was {known.group.base_model} and cannot become {group.base_model}"
    if not group.gpus or group.plan.token_budget < 1 or len(group.weights) != len(group.job_ids):
        gpus, weights = quantity(len(group.gpus), "GPU"), quantity(len(group.weights), "weight")
        return f"{gpus}, micro-batches of {group.plan.token_budget} tokens, {weights}"
    if not all(weight > 0 for weight in group.weights):  # nor a NaN
        return f"weights {group.weights} must be positive"
    return None


def _gpus_taken(state: ClusterState, group: JobGroup, changed: dict[str, JobGroup], taken: dict[int, str]) -> str | None:
    for gpu in group.gpus:
        if gpu not in state.pool.node_of:
            return f"there is no GPU {gpu}"
        owner = state.pool.group_on.get(gpu)
        if owner not in (None, group.group_id) and (owner not in changed or (changed[owner].job_ids and gpu in changed[owner].gpus)):
            return f"GPU {gpu} is {owner}'s"
        if owner != group.group_id and state.pool.is_left(gpu):
            why = "of which nothing is heard" if gpu in state.pool.unheard else "which is to be left"
            return f"GPU {gpu} is on {state.pool.node_of[gpu]}, {why}"
        if taken.setdefault(gpu, group.group_id) != group.group_id:
            return f"GPU {gpu} is {taken[gpu]}'s too"
    return None if len(set(group.gpus)) == len(group.gpus) else "it has a GPU twice"


def _jobs_taken(state: ClusterState, group: JobGroup, changed: dict[str, JobGroup], taken: dict[str, str]) -> str | None:
    for name in group.job_ids:
        job = state.jobs.get(name)
        if job is None or name in state.held:
            return f"job {name} has ended or is held"
        if job.spec.base_model != group.base_model:
            return f"job {name} is over {job.spec.base_model}, the group over {group.base_model}"
        if job.group_id not in (None, group.group_id) and (job.group_id not in changed or name in changed[job.group_id].job_ids):
            return f"job {name} is in {job.group_id}"
        if taken.setdefault(name, group.group_id) != group.group_id:
            return f"job {name} is in {taken[name]} too"
    return None if len(set(group.job_ids)) == len(group.job_ids) else "it has a job twice"
