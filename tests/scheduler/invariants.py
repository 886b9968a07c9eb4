"""What holds of a cluster's state after every event."""

from __future__ import annotations

from tlora.protocol import JobGroup
from tlora.scheduler.state import ClusterState


def check(state: ClusterState) -> None:
    """Raises AssertionError: no GPU in two groups or both free and in one, no job in two groups or lost, memory sound."""
    owners, pool = dict[int, str](), state.pool
    for name, node in pool.nodes.items():
        assert node.free == sorted(set(node.free)) and set(node.free) <= set(node.gpus), f"{name}: free {node.free}"
        assert name in pool.nodes_by_free[len(node.free)], f"{name} is not among the nodes of {len(node.free)} free GPUs"
        assert pool.node_names[node.place] == name and (node.place in pool.with_free) == bool(node.free), f"{name} at {node.place}"
        assert node.groups is None or set(node.groups) == {pool.group_on[gpu] for gpu in node.gpus if gpu in pool.group_on}
        owners |= dict.fromkeys(node.free, "nobody")
    assert pool.num_free == len(owners), f"{pool.num_free} free GPUs counted, {len(owners)} there"
    seen: dict[str, str] = {}
    for name, known in state.groups.items():
        group = known.group
        assert group.group_id == name and group.gpus and name in state.groups_of_base[group.base_model]
        for gpu in group.gpus:
            assert gpu not in owners, f"GPU {gpu} is {name}'s and {owners[gpu]}'s"
            owners[gpu] = pool.group_on[gpu]
            assert owners[gpu] == name, f"GPU {gpu} is {name}'s, and noted as {owners[gpu]}'s"
        for job_id in group.job_ids:
            assert job_id not in seen, f"{job_id} is in {seen[job_id]} and {name}"
            assert state.jobs[job_id].group_id == name and state.jobs[job_id].status == "placed"
            assert state.jobs[job_id].spec.base_model == group.base_model
            seen[job_id] = name
        parameters = sum(state.jobs[job_id].spec.profile.adapter_parameters for job_id in group.job_ids)
        tokens = group.plan.token_budget / len(group.gpus)
        assert _fits(state, group, parameters, tokens), f"{name} does not fit into a GPU's memory"
    aside = (pool.unheard & pool.node_of.keys()) - pool.group_on.keys()  # of no group, and not free
    assert aside.isdisjoint(owners)
    silent = {pool.node_of[gpu] for gpu in pool.unheard & pool.node_of.keys()}
    assert all(pool.is_avoided(name) == (name in pool.draining or name in silent) for name in pool.nodes)
    assert set(owners) | aside == set(pool.node_of) and len(owners) + len(aside) == pool.num_gpus
    assert len(pool.group_on) == pool.num_gpus - pool.num_free - len(aside) and set(state.latest) >= set(state.groups)
    waiting = {job_id for job_id, job in state.jobs.items() if job.status == "pending"}
    held = {job_id for job_id, job in state.jobs.items() if job.status == "held"}
    assert waiting == set(state.pending) and held == state.held, "a job is neither waiting nor in a group"
    assert waiting | held | set(seen) == set(state.jobs), "a job is neither waiting, nor held, nor in a group"


def _fits(state: ClusterState, group: JobGroup, parameters: int, tokens: float) -> bool:
    """In stages with as many layers recomputed as there are, if the plan has some recomputed."""
    cost, base, gpus = state.cost, group.base_model, len(group.gpus)
    if not cost.is_cut(base, gpus):
        return cost.fits(base, parameters, tokens)
    room = state.rooms.on([state.jobs[name] for name in group.job_ids], group.gpus) or cost.room_bytes(base)
    takes = cost.least_bytes if group.plan.recomputed_layers else cost.memory_bytes
    return takes(base, parameters, tokens, gpus, room) <= room
