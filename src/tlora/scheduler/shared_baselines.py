"""Policies of others that let jobs share a base: mLoRA's rule, which looks at memory alone, and tLoRA's grouping as published.

Under both, a job that finds as many free GPUs as it asks for starts alone. Ours is in `residual_capacity.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tlora.protocol import JobGroup, ParallelPlan
from tlora.scheduler.draft import Draft
from tlora.scheduler.exclusive_baselines import start_alone
from tlora.scheduler.job import Job
from tlora.scheduler.plans import most_capacity, shared_plan
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.state import ClusterState
from tlora.scheduler.waiting import Key, arrival
from tlora.shape.cost import CostModel
from tlora.shape.sharing import group_step_seconds

_Found = TypeVar("_Found")


def memory_only() -> Policy:
    """mLoRA's rule: a job joins a running group of its base whenever memory permits, without regard to any job's speed.

    mLoRA (Ye et al., 2312.02515, its task scheduler) has one group, so that which of several is left open. This takes the one whose
    members, with the new one, ask for the fewest GPUs for each that it has: to go by the memory left instead puts jobs that ask for many
    GPUs on one. The plan is the best for the members' mean slowdown, without a bound on any of them.
    """
    sums = _PerGroup(_sum_of)

    def decide(state: ClusterState) -> list[JobGroup]:
        draft = Draft(state)
        no_room: list[Job] = []
        for job in list(_those_without_gpus(draft, sorted(_waiting(state), key=arrival))):  # first all starts: they are groups to join
            if any(_is_as_large(job, other) for other in no_room):
                continue
            group = _least_asked_of(draft, sums, job)
            if group is None:
                no_room.append(job)
                continue
            jobs = [*draft.members(group.group_id), job]
            plan = shared_plan(state.cost, len(group.gpus), state.pool.num_nodes(group.gpus), jobs, check_bounds=False)
            assert plan is not None, f"{group.group_id} has no room for {job.spec.job_id}"
            draft.change(group.group_id, jobs, group.gpus, plan)
        return draft.wanted()

    return decide


def tlora_published() -> Policy:
    """tLoRA's grouping (arXiv 2602.07263) from its description, since no code is public.

    Jobs by urgency, the most urgent first, then by residual capacity, the least first. A job that finds no GPUs joins a group of its base
    together with as many of those behind it as make the largest merge that raises joint throughput and keeps every bound; groups
    are tried by residual capacity, the least first. A group that opens merges, GPUs and all, by the same rule with groups on its nodes,
    then in its racks, then anywhere. Where jobs wait, a group gives up the GPUs that its members never asked for.

    Urgency is time waited over time remaining; the paper's own measure and its predictor are not public, and the cost model is ours.
    """
    sums = _PerGroup(_sum_of)
    refused = _PerGroup(_no_jobs)

    def decide(state: ClusterState) -> list[JobGroup]:
        if not state.pending:
            return []
        draft = Draft(state)
        _release(draft, sums)
        by_base: dict[str, list[Job]] = {}
        for job in _those_without_gpus(draft, sorted(_waiting(state), key=lambda job: _queue_key(state, job))):
            by_base.setdefault(job.spec.base_model, []).append(job)
        opened = [name for name in draft.changed if name not in state.groups]
        for queue in by_base.values():
            _join_groups(draft, sums, refused, queue)
        for name in opened:
            if draft.group(name).job_ids:
                _merge_groups(draft, sums, name)
        return draft.wanted()

    return decide


# -- both ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sum:
    """Of a group: its members' parameters, longest sample, need and GPUs asked for, all together; the nodes that it is on.

    In tokens per second: `residual`, u * C(B, G) - need; and `room`, what its needs leave, with one member more, of the most that its GPUs
    can serve.
    """

    parameters: int
    longest: int
    need: float
    gpus: int
    nodes: frozenset[str]
    residual: float
    room: float


class _PerGroup(Generic[_Found]):
    """What is found of groups, anew only where a group is another object, as it also is when its base's costs are corrected."""

    def __init__(self, find: Callable[[ClusterState, JobGroup], _Found]) -> None:
        self._find = find
        self._known: dict[str, tuple[JobGroup, _Found]] = {}

    def of(self, state: ClusterState, group: JobGroup) -> _Found:
        entry = self._known.get(group.group_id)
        if entry is None or entry[0] is not group:
            if len(self._known) > 2 * len(state.groups) + 100:
                self._known = {name: known for name, known in self._known.items() if name in state.groups}
            entry = self._known[group.group_id] = group, self._find(state, group)
        return entry[1]


def _sum_of(state: ClusterState, group: JobGroup) -> _Sum:
    cost, base = state.cost, group.base_model
    jobs = [state.jobs[name] for name in group.job_ids]
    nodes = frozenset(state.pool.node_of[gpu] for gpu in group.gpus)
    need = sum(job.need for job in jobs)
    return _Sum(
        sum(job.spec.profile.adapter_parameters for job in jobs),
        max(job.spec.profile.longest_sample_tokens for job in jobs),
        need,
        sum(job.spec.gpus for job in jobs),
        nodes,
        cost.fill_share * cost.capacity(base, group.plan.token_budget, len(group.gpus), len(nodes), len(jobs)) - need,
        most_capacity(cost, base, len(group.gpus), len(nodes), len(jobs) + 1) - need,
    )


def _waiting(state: ClusterState) -> Iterator[Job]:
    return (state.jobs[name] for name in state.pending)


def _those_without_gpus(draft: Draft, jobs: Sequence[Job]) -> Iterator[Job]:
    """Start those that find GPUs; the others come out."""
    too_many: set[int] = set()
    for job in jobs:
        if job.spec.gpus not in too_many:
            if start_alone(draft, job):
                continue
            too_many.add(job.spec.gpus)
        yield job


def _groups_of(draft: Draft, base: str) -> Iterator[JobGroup]:
    """The base's groups as they shall be, without those that end."""
    state = draft.state
    for name in state.groups_of_base.get(base, ()):
        group = draft.group(name)
        if group.job_ids:
            yield group
    for name, group in draft.changed.items():
        if name not in state.groups and group.base_model == base and group.job_ids:
            yield group


# -- by memory -----------------------------------------------------------------------------------------------------------


def _least_asked_of(draft: Draft, sums: _PerGroup[_Sum], job: Job) -> JobGroup | None:
    """Of the groups whose GPUs hold the job too, the one of the fewest asked for by each that it has; None if none holds it."""
    cost, profile = draft.state.cost, job.spec.profile
    best: JobGroup | None = None
    least_asked = math.inf
    for group in _groups_of(draft, job.spec.base_model):
        own = sums.of(draft.state, group)
        asked = (own.gpus + job.spec.gpus) / len(group.gpus)
        if asked >= least_asked:
            continue
        longest = max(own.longest, profile.longest_sample_tokens)
        budget = next(tokens for tokens in cost.budgets if tokens >= longest)
        if cost.fits(group.base_model, own.parameters + profile.adapter_parameters, budget):
            best, least_asked = group, asked
    return best


def _is_as_large(job: Job, other: Job) -> bool:
    """Whether `job` takes at least the memory of `other`, which found none."""
    own, theirs = job.spec.profile, other.spec.profile
    return (
        job.spec.base_model == other.spec.base_model
        and own.adapter_parameters >= theirs.adapter_parameters
        and own.longest_sample_tokens >= theirs.longest_sample_tokens
    )


# -- by joint throughput -------------------------------------------------------------------------------------------------


def _no_jobs(_state: ClusterState, _group: JobGroup) -> set[str]:
    """Those that cannot join the group are added as they are found: what decides it does not change with time."""
    return set()


def _urgency(state: ClusterState, job: Job) -> float:
    return (state.now - job.submitted_at) / max(job.remaining_seconds(state.now), job.alone_step_seconds)


def _queue_key(state: ClusterState, job: Job) -> Key:
    capacity = most_capacity(state.cost, job.spec.base_model, job.spec.gpus, -(-job.spec.gpus // max(1, state.pool.node_size)), 1)
    return (-job.spec.priority, -_urgency(state, job), capacity - job.need, job.number)


def _tokens_per_second(cost: CostModel, base: str, plan: ParallelPlan, nodes: int, jobs: Sequence[Job]) -> float:
    members = [job.as_member(job.weight) for job in jobs]
    seconds = group_step_seconds(cost, base, plan.token_budget, plan.data_parallel, nodes, members)
    return sum(member.tokens_per_step / own for member, own in zip(members, seconds, strict=True))


def _join_groups(draft: Draft, sums: _PerGroup[_Sum], refused: _PerGroup[set[str]], queue: Sequence[Job]) -> None:
    """Let those of `queue`, all of one base, join groups as far as they can."""
    state = draft.state

    def residual(group: JobGroup) -> float:
        return sums.of(state, group).residual

    groups = sorted(_groups_of(draft, queue[0].spec.base_model), key=residual)
    rooms = [sums.of(state, group).room for group in groups]
    begin = 0
    while begin < len(queue):
        job, joined = queue[begin], 0
        for group, room in zip(groups, rooms, strict=True):
            if job.need > room or job.spec.job_id in refused.of(state, group):
                continue
            joined = _join(draft, group, queue[begin:])
            if joined:
                groups = sorted((draft.group(other.group_id) for other in groups), key=residual)
                rooms = [sums.of(state, other).room for other in groups]
                break
            refused.of(state, group).add(job.spec.job_id)
        begin += max(joined, 1)


def _join(draft: Draft, group: JobGroup, queue: Sequence[Job]) -> int:
    """How many of the first of `queue` join `group`: the most that raise its throughput and keep every bound."""
    cost, nodes, members = draft.state.cost, draft.state.pool.num_nodes(group.gpus), draft.members(group.group_id)
    before = _tokens_per_second(cost, group.base_model, group.plan, nodes, members)

    def attempt(count: int) -> ParallelPlan | None:
        jobs = [*members, *queue[:count]]
        plan = shared_plan(cost, len(group.gpus), nodes, jobs)
        return plan if plan is not None and _tokens_per_second(cost, group.base_model, plan, nodes, jobs) > before else None

    count, plan = _largest(len(queue), attempt)
    if plan is not None:
        draft.change(group.group_id, [*members, *queue[:count]], group.gpus, plan)
    return count


def _largest(most: int, attempt: Callable[[int], ParallelPlan | None]) -> tuple[int, ParallelPlan | None]:
    """The largest count up to `most` that `attempt` has a plan for, as if it had one for all below: by doubling, then by halving."""
    count, plan, too_many = 0, None, most + 1
    while count + 1 < too_many:
        tried = min(max(2 * count, 1), most) if too_many > most else (count + too_many) // 2
        tried_plan = attempt(tried)
        if tried_plan is None:
            too_many = tried
        else:
            count, plan = tried, tried_plan
    return count, plan


def _merge_groups(draft: Draft, sums: _PerGroup[_Sum], name: str) -> None:
    """Merge the group, which has just opened, with the most others that it can: of its nodes, else of its racks, else of the cluster."""
    state, seed = draft.state, draft.group(name)
    nodes = sums.of(state, seed).nodes
    racks = {state.pool.nodes[node].rack for node in nodes}
    tiers: tuple[list[tuple[float, float, str]], ...] = ([], [], [])
    for group in _groups_of(draft, seed.base_model):
        if group is seed:
            continue
        own = sums.of(state, group)
        near = 0 if not nodes.isdisjoint(own.nodes) else 1 if any(state.pool.nodes[node].rack in racks for node in own.nodes) else 2
        urgency = max([_urgency(state, state.jobs[member]) for member in group.job_ids])
        tiers[near].append((-urgency, own.residual, group.group_id))
    for tier in tiers:
        if _merge(draft, seed, [draft.group(group_id) for _, _, group_id in sorted(tier)]):
            return


def _merge(draft: Draft, seed: JobGroup, others: Sequence[JobGroup]) -> bool:
    """Merge `seed` with as many of the first of `others` as raises throughput; the one with the most members takes the rest in."""
    state, cost, base = draft.state, draft.state.cost, seed.base_model
    groups = [seed, *others]
    rates: list[float] = []  # of the first groups, worked out as far as they are asked for

    def attempt(count: int) -> ParallelPlan | None:
        while len(rates) <= count:
            group = groups[len(rates)]
            rates.append(_tokens_per_second(cost, base, group.plan, state.pool.num_nodes(group.gpus), draft.members(group.group_id)))
        gpus, jobs = _union(draft, groups[: count + 1])
        nodes = state.pool.num_nodes(gpus)
        plan = shared_plan(cost, len(gpus), nodes, jobs)
        return plan if plan is not None and _tokens_per_second(cost, base, plan, nodes, jobs) > sum(rates[: count + 1]) else None

    count, plan = _largest(len(others), attempt)
    if plan is None:
        return False
    merging = groups[: count + 1]
    gpus, jobs = _union(draft, merging)
    keeper = max(merging[1:], key=lambda group: len(group.job_ids))
    for group in merging:
        if group is not keeper:
            draft.stop(group.group_id)
            draft.take(group.gpus)
    draft.change(keeper.group_id, jobs, gpus, plan)
    return True


def _union(draft: Draft, groups: Sequence[JobGroup]) -> tuple[tuple[int, ...], list[Job]]:
    gpus = tuple(sorted(gpu for group in groups for gpu in group.gpus))
    return gpus, [job for group in groups for job in draft.members(group.group_id)]


def _release(draft: Draft, sums: _PerGroup[_Sum]) -> None:
    """Give back what groups have beyond what their members ask for, as members that brought it have left."""
    state = draft.state
    for known in state.groups.values():
        group = known.group
        count = sums.of(state, group).gpus
        if count >= len(group.gpus):
            continue
        on_node: dict[str, int] = {}
        for gpu in group.gpus:
            on_node[state.pool.node_of[gpu]] = on_node.get(state.pool.node_of[gpu], 0) + 1
        gpus = sorted(group.gpus, key=lambda gpu: -on_node[state.pool.node_of[gpu]])
        kept = tuple(sorted(gpus[:count]))
        plan = shared_plan(state.cost, count, state.pool.num_nodes(kept), draft.members(group.group_id))
        if plan is not None:
            draft.give_back(gpus[count:])
            draft.change(group.group_id, draft.members(group.group_id), kept, plan)
