"""A scheduling policy of your own on a cluster trace: `python examples/own_policy.py`

A policy is a function from the cluster's state to the groups that change. This one is shortest job first by hand: of the jobs that
wait, the one with the least work left starts first, if the GPUs that it asks for are free. It reaches what the built-in `sjf` reaches.
"""

from tlora.protocol import JobGroup
from tlora.scheduler.draft import Draft
from tlora.scheduler.plans import exclusive_plan
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.state import ClusterState
from tlora.sim.machines import ClusterShape
from tlora.sim.metrics import metrics
from tlora.sim.scenario import Scenario, cost_of, scene_of
from tlora.sim.simulate import simulate


def shortest_first(state: ClusterState) -> list[JobGroup]:
    draft = Draft(state)  # what the groups shall be; the state stays as it is
    for job in sorted((state.jobs[name] for name in state.pending), key=lambda job: job.remaining_seconds(state.now)):
        gpus = draft.allocate(job.spec.gpus)  # None: too few are free
        if gpus is not None:
            draft.open([job], gpus, exclusive_plan(state.cost, job, len(gpus)))
    return draft.wanted()


def main(jobs: int = 300) -> dict[str, float]:
    """Mean hours from submission to completion under each policy."""
    scenario = Scenario(trace="ee9e8c", nodes=8, jobs=jobs, load=0.9)
    shape, found = ClusterShape(scenario.nodes, scenario.gpus_per_node), dict[str, float]()
    policies: dict[str, Policy] = {"fifo": POLICIES["fifo"](), "sjf": POLICIES["sjf"](), "own": shortest_first}
    for name, policy in policies.items():
        result = simulate(scene_of(scenario).jobs, shape, policy, cost_of(scenario, "tlora"))
        found[name] = metrics(result)["mean_jct_seconds"] / 3600
        print(f"{name:5} {found[name]:7.2f} h")  # noqa: T201
    return found


if __name__ == "__main__":
    main()
