"""Which jobs a cluster will reject, found before anything is simulated: the load counts the others only."""

from __future__ import annotations

from collections.abc import Sequence

from tlora.costs.cost import CostModel
from tlora.errors import ConfigError
from tlora.scheduler.scheduler import why_never
from tlora.scheduler.state import ClusterState
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape, Machines
from tlora.sim.mapping import MappedJob


def rejections(jobs: Sequence[MappedJob], shape: ClusterShape, costs: Sequence[CostModel]) -> dict[str, str]:
    """By job, why the scheduler rejects it: the reason under the last of `costs`. A job that one of them admits is not here."""
    reason_by_job: dict[str, str] = {}
    states = [_empty_cluster(shape, cost) for cost in costs]
    for job in jobs:
        reasons = [why_never(state, job.job) for state in states]
        if all(reasons):
            reason_by_job[job.job.job_id] = str(reasons[-1])
    return reason_by_job


def warning_of(rejected: dict[str, str], jobs: Sequence[MappedJob]) -> str:
    """One line on the rejected jobs; empty without any. Raises ConfigError if every job is rejected."""
    if not rejected:
        return ""
    name, reason = next(iter(rejected.items()))
    if len(rejected) == len(jobs):
        raise ConfigError(f"no job of this trace can run on this cluster. {name!r}, the first, is rejected: {reason}")
    asked = {job.job.job_id: job.job.gpus * job.recorded_seconds for job in jobs}
    total = sum(asked.values())
    share = f", {sum(asked[name] for name in rejected) / total:.1%} of the GPU time asked for," if total else ""
    return (
        f"{len(rejected):,} of {len(jobs):,} jobs{share} can never run on this cluster and are rejected; load counts the others only. "
        f"{name!r}, the first: {reason}"
    )


def _empty_cluster(shape: ClusterShape, cost: CostModel) -> ClusterState:
    state = ClusterState(cost)
    for node in Machines(shape, Conditions()).added():
        state.add_node(node.node, node.rack, node.gpus)
    return state
