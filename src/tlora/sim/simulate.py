"""One simulation: jobs, a cluster, a policy, what it believes and what is true in; what happened out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from tlora.cluster.controller import run
from tlora.libraries import no_collection
from tlora.protocol import JobGroup
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.scheduler.state import ClusterState
from tlora.scheduler.tenants import Tenants
from tlora.shape.cost import CostModel
from tlora.sim.backend import SimulatedCluster
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import MappedJob
from tlora.sim.records import SimulationResult


@dataclass(frozen=True, slots=True)
class Labels:
    """What a result says of itself; nothing is computed from it."""

    policy: str = ""
    kernels: str = ""
    trace: str = ""
    seed: int = 0
    load: float = math.nan


def simulate(
    jobs: Sequence[MappedJob],
    shape: ClusterShape,
    policy: Policy,
    cost: CostModel,
    conditions: Conditions | None = None,
    labels: Labels | None = None,
) -> SimulationResult:
    """Replay `jobs` under `policy`, which believes `cost`, in a cluster that behaves as `conditions` says (None: as `cost` says).

    The scheduler and the controller are those of a real cluster. Equal arguments give equal results, but for wall times. `decisions`
    counts the policy's calls; what else the scheduler and the simulator do is in `wall_seconds` alone.
    """
    began = time.perf_counter()
    labels = labels or Labels()
    conditions = conditions or Conditions()
    clock = _Clock(policy)
    cluster = simulated_cluster(jobs, shape, cost, conditions)
    with no_collection():  # 12 % of the time, to find nothing: no cycle is left behind here
        run(Scheduler(clock.decide, cost, tenants=Tenants(conditions.usage_half_life_seconds)), cluster)
        records = [job.record() for job in cluster.jobs.values()]
    return SimulationResult(
        policy=labels.policy,
        kernels=labels.kernels,
        trace=labels.trace,
        seed=labels.seed,
        num_gpus=shape.num_gpus,
        load=labels.load,
        jobs=records,
        spans=cluster.spans,
        samples=cluster.samples,
        decisions=clock.calls,
        decision_seconds=clock.seconds,
        wall_seconds=time.perf_counter() - began,
        settings=_settings(shape, conditions),
    )


def simulated_cluster(jobs: Sequence[MappedJob], shape: ClusterShape, cost: CostModel, conditions: Conditions) -> SimulatedCluster:
    """The cluster by itself with `jobs` to come, for a scheduler with a copy of `cost`: correcting that leaves the cluster alone."""
    cluster = SimulatedCluster(shape, conditions.cost or cost, conditions)
    for job in jobs:
        cluster.submit(job)
    return cluster


@dataclass(slots=True)
class _Clock:
    """The policy, with the time that it takes."""

    policy: Policy
    calls: int = 0
    seconds: float = 0.0

    def decide(self, state: ClusterState) -> list[JobGroup]:
        began = time.perf_counter()
        wanted = self.policy(state)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        return wanted


def _settings(shape: ClusterShape, conditions: Conditions) -> dict[str, object]:
    values = {each.name: getattr(conditions, each.name) for each in fields(conditions) if each.name not in ("moves", "cost", "saturated")}
    return {**asdict(shape), **{f"conditions.{name}": value for name, value in values.items()}, **asdict(conditions.moves)}
