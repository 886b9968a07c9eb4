"""A simulated group whose GPUs change: in its worker, while its jobs train, or by another worker. Which it is, `shape/moves.py` says."""

from __future__ import annotations

import math

from tlora.shape.moves import can_change
from tlora.sim.conditions import Conditions
from tlora.sim.flow import GroupFlow, halt
from tlora.sim.machines import Machines


def change_gpus(flow: GroupFlow, held: tuple[int, ...], whole: bool, now: float, machines: Machines, conditions: Conditions) -> bool:
    """From the GPUs that it has `held` until now to those that are wanted. `whole`: its base lies on each of them. False if one of them is
    lost: then nothing has changed but that GPUs were given back.
    """
    name, base, wanted = flow.wanted.group_id, flow.wanted.base_model, flow.wanted.gpus
    machines.release(gpu for gpu in held if gpu not in wanted)
    if not machines.take(name, [gpu for gpu in wanted if gpu not in held]):
        return False
    nodes, what = machines.num_nodes((*flow.gpus, *wanted)), f"{name}|{now}"
    if not flow.loaded or not can_change(flow.gpus, wanted, nodes, whole):
        for job in flow.members.values():
            job.regroupings += job.runs
            job.check_point(now)
        halt(flow, now + (conditions.moves.checkpoint_seconds + machines.start_seconds(base, wanted, what)))
        return True
    kept = tuple([gpu for gpu in wanted if gpu in flow.gpus])
    seconds = machines.grow_seconds(base, held, wanted, what)
    flow.ranks_at = now + seconds if len(kept) < len(wanted) else math.inf
    if len(kept) < len(flow.gpus):
        _move_jobs(flow, kept, nodes, now, conditions.moves.change_seconds(grows=False), conditions)
    return True


def use_new_gpus(flow: GroupFlow, now: float, machines: Machines, conditions: Conditions) -> None:
    """The ranks that were missing have loaded the base."""
    flow.ranks_at = math.inf
    wanted, seconds = flow.wanted.gpus, conditions.moves.change_seconds(grows=True)
    _move_jobs(flow, wanted, machines.num_nodes(wanted), now, seconds, conditions)


def _move_jobs(flow: GroupFlow, gpus: tuple[int, ...], nodes: int, now: float, seconds: float, conditions: Conditions) -> None:
    """Each leaves its ranks at its last step, and joins on those of `gpus`, for which it usually stands still so long."""
    flow.gpus, flow.num_nodes = gpus, nodes
    flow.stale = flow.announce = True
    seconds *= conditions.delay_of(f"{flow.wanted.group_id}|{now}")
    for job in flow.members.values():
        job.regroupings += job.runs
        job.check_point(now)
        job.resume_at = max(job.resume_at, now + seconds)
