"""A simulated group as a link with flows: which jobs run in it, at which speed, until when. The cost model gives the speeds.

Starting and ending groups and reporting events is left to `backend.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tlora.protocol import JobGroup
from tlora.shape.cost import CostModel
from tlora.shape.moves import can_change
from tlora.shape.sharing import Member, even_sample_tokens, shared_seconds
from tlora.sim.conditions import Conditions
from tlora.sim.machines import Machines
from tlora.sim.simulated_job import SimulatedJob


@dataclass(slots=True)
class GroupFlow:
    """`wanted` is what the scheduler asked for last."""

    wanted: JobGroup
    loaded_at: float  # when its base will be on its GPUs; inf if it is
    settled_at: float
    changed_at: float  # since when it has had these members and GPUs
    members: dict[str, SimulatedJob]
    came: list[SimulatedJob]  # since the last announcement
    gpus: tuple[int, ...]  # that compute, or will when the base is loaded: those that are wanted may still come
    ranks_at: float = math.inf  # when the base will be on GPUs that come while members run; inf if none does
    num_nodes: int = 0  # on which its GPUs lie, once it is loaded
    version: int = 0  # of what was last planned with it
    stale: bool = True  # speeds are to be worked out anew
    pauses: float = 0.0  # micro-batches for which running jobs are paused, as others join
    stands: bool = True  # a member, or the whole group, waits for what was asked
    announce: bool = True  # that it runs as wanted, once it does
    micro_batch_seconds: float = 0.0
    tokens_per_second: float = 0.0
    finishing: SimulatedJob | None = None  # the member that ends first, if that is the next thing that happens

    @property
    def loaded(self) -> bool:
        """Whether its base is on its GPUs; before that no member runs."""
        return self.loaded_at == math.inf


def settle(flow: GroupFlow, now: float) -> None:
    """Count what its members did until `now`."""
    seconds = now - flow.settled_at
    if seconds <= 0:
        return
    flow.settled_at = now
    if not flow.members:
        return
    gpu_seconds = seconds * len(flow.wanted.gpus) / len(flow.members)
    for job in flow.members.values():
        job.gpu_seconds += gpu_seconds
        if job.runs:
            job.run(seconds, flow.micro_batch_seconds)
        else:
            job.stand(seconds)


def plan_ahead(flow: GroupFlow, now: float, cost: CostModel, conditions: Conditions) -> float:
    """When something happens in the group by itself: a member ends or goes on, GPUs are ready; inf if never. It is settled at `now`."""
    if not flow.members and not flow.pauses:
        upcoming = min(flow.loaded_at, flow.ranks_at)
        flow.tokens_per_second, flow.finishing, flow.stands = 0.0, None, upcoming < math.inf
        return upcoming
    if flow.stale and flow.members and flow.loaded:
        _share(flow, now, cost, conditions)
    if flow.pauses:
        _pause(flow, now)
    upcoming, finishing, tokens = min(flow.loaded_at, flow.ranks_at), None, 0.0
    stands = upcoming < math.inf
    for job in flow.members.values() if flow.loaded else ():
        if job.resume_at <= now:
            if not job.runs:
                job.go_on(now)
            tokens += job.tokens_per_step / job.step_seconds
            left = job.total_steps - job.steps
            end = now + left * job.step_seconds if left > 0 else now
            if end < upcoming:
                upcoming, finishing = end, job
        else:
            job.runs, stands = False, True
            if job.resume_at < upcoming:
                upcoming, finishing = job.resume_at, None
    flow.tokens_per_second, flow.finishing, flow.stands = tokens, finishing, stands
    return upcoming


def begin(flow: GroupFlow, num_nodes: int) -> None:
    """Its base is loaded, on GPUs of so many nodes."""
    flow.loaded_at, flow.num_nodes = math.inf, num_nodes
    flow.stale = flow.announce = True


def halt(flow: GroupFlow, loaded_at: float) -> None:
    """Stop all members until the base is loaded on the GPUs that are wanted."""
    flow.loaded_at, flow.ranks_at, flow.gpus = loaded_at, math.inf, flow.wanted.gpus
    for job in flow.members.values():
        job.runs = False


def enter(flow: GroupFlow, job: SimulatedJob, weight: float, now: float, join_seconds: float) -> None:
    """Add a member, which runs once the group runs and its join is over."""
    assert job.group_id is None, f"{job.spec.job_id} is in {job.group_id} and cannot enter {flow.wanted.group_id}"
    job.group_id, job.joined_at, job.joined_steps = flow.wanted.group_id, now, job.steps
    job.counts = job.counts and job.left_at == now  # a move counts, a wait does not
    job.resume_at = now + join_seconds
    job.weight = weight
    flow.members[job.spec.job_id] = job
    flow.came.append(job)
    flow.stale = flow.announce = True


def leave(flow: GroupFlow, job: SimulatedJob, now: float, back_to_steps: float) -> None:
    """Remove a member, which continues from `back_to_steps` of its steps."""
    del flow.members[job.spec.job_id]
    job.undo(back_to_steps)
    job.group_id, job.runs, job.left_at = None, False, now
    flow.stale = True


def _share(flow: GroupFlow, now: float, cost: CostModel, conditions: Conditions) -> None:
    """Compute the speed of each member."""
    wanted, count, jobs = flow.wanted, len(flow.gpus), list(flow.members.values())
    base, budget = wanted.base_model, wanted.plan.token_budget
    if len(jobs) == 1:
        tokens = jobs[0].tokens_per_step
        seconds = [cost.lone_step_seconds(base, budget, count, flow.num_nodes, tokens)]
        flow.micro_batch_seconds = seconds[0] / math.ceil(tokens / budget)
    else:
        members = [Member(job.tokens_per_step, job.weight, even_sample_tokens(job.spec.profile)) for job in jobs]
        flow.micro_batch_seconds, seconds = shared_seconds(cost, base, budget, count, flow.num_nodes, members)
    slower = cost.recompute_factor(base, wanted.plan.recomputed_layers)
    flow.micro_batch_seconds *= slower
    seconds = [max(slower * own, job.fastest_step_seconds) for job, own in zip(jobs, seconds, strict=True)]
    if not conditions.exact:
        rates = [job.tokens_per_step / own for job, own in zip(jobs, seconds, strict=True)]
        slower = sum(job.speed * rate for job, rate in zip(jobs, rates, strict=True)) / sum(rates) * conditions.drift_at(now, base)
        flow.micro_batch_seconds *= slower
        seconds = [own * slower for own in seconds]
    for job, own in zip(jobs, seconds, strict=True):
        job.step_seconds = own
    flow.stale = False


def _pause(flow: GroupFlow, now: float) -> None:
    """Pause the running members for the micro-batches that the joins of others take."""
    seconds = flow.pauses * flow.micro_batch_seconds
    flow.pauses = 0.0
    for job in flow.members.values():
        if job.runs:
            job.resume_at = max(job.resume_at, now + seconds)
            job.window_slack = max(job.window_slack, seconds)


# -- GPUs that change: in the group's worker, while its jobs train, or by another worker, as `shape/moves.py` says -----------------------


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
