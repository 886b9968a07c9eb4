"""A cluster that does what it is told and objects to what cannot be done, a cost model with round numbers, and random events for both."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.scheduler.invariants import check
from tlora.protocol import (
    Action,
    BaseMeasured,
    BaseSpeed,
    ChangeGroup,
    Event,
    GpusLost,
    GpusUnheard,
    GroupLost,
    GroupReady,
    JobFailed,
    JobFinished,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.scheduler.job import Job
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.scheduler.settings import Settings
from tlora.scheduler.state import ClusterState
from tlora.shape.cost import BaseConstants, CostModel

BASES = ("north", "south")


def made_cost(launch_seconds: float = 0.5) -> CostModel:
    """1,000 tokens/s a GPU and a launch of half a second, so that small jobs gain from company; 92 GB of a GPU for base and jobs.

    The base takes 52 GB, an adapter of 100 M parameters 1.8 GB, a micro-batch of 16,384 tokens on a GPU 16.4 GB.
    """
    constants = BaseConstants(1000.0, launch_seconds, 0.01, 0.05, 0.2, 52e9, 1e6, 1e11, {})
    return CostModel(dict.fromkeys(BASES, constants))


def made_settings(**others: Any) -> Settings:
    """For the small jobs here, whose steps would be cut for no second GPU otherwise."""
    return Settings(least_replica_tokens=1, **others)


def made_spec(
    name: str, gpus: int = 1, tokens: float = 1000.0, steps: int = 100, parameters: int = 10**8, longest: int = 512, **others: Any
) -> JobSubmitted:
    """A job of the first base; `others` are fields of `JobSubmitted`."""
    values: dict[str, Any] = {"base_model": BASES[0], **others}
    return JobSubmitted(job_id=name, gpus=gpus, profile=JobProfile(tokens, steps, longest, parameters), **values)


def made_scheduler(policy: Policy, *nodes: int, cost: CostModel | None = None) -> Scheduler:
    """Over nodes n0, n1, ... of so many GPUs each, two nodes to a rack; GPUs are numbered from 0."""
    scheduler = Scheduler(policy, cost or made_cost())
    first = 0
    for index, size in enumerate(nodes):
        scheduler.handle(NodeAdded(f"n{index}", tuple(range(first, first + size)), f"r{index // 2}"), 0.0)
        first += size
    return scheduler


def made_state(*nodes: int, cost: CostModel | None = None) -> ClusterState:
    return made_scheduler(lambda state: [], *nodes, cost=cost).state


def waiting_job(state: ClusterState, spec: JobSubmitted) -> Job:
    state.submit(spec)
    return state.jobs[spec.job_id]


@dataclass
class Mirror:
    """What runs on which GPUs, by what actions and events tell alone. Asserts that each action can be done at its turn."""

    owner: dict[int, str | None] = field(default_factory=dict)  # of GPUs that are there
    node: dict[int, str] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    unheard: set[int] = field(default_factory=set)
    groups: dict[str, JobGroup] = field(default_factory=dict)
    alive: set[str] = field(default_factory=set)  # jobs submitted and not ended
    seen: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)

    def happen(self, event: Event) -> None:
        match event:
            case NodeAdded():
                self.drained.discard(event.node)
                for gpu in event.gpus:
                    self.owner.setdefault(gpu, None)
                    self.node[gpu] = event.node
            case GpusLost():
                for gpu in event.gpus:
                    self.owner.pop(gpu, None)
                    self.unheard.discard(gpu)
            case GpusUnheard(gpus, why):
                (self.unheard.update if why else self.unheard.difference_update)(gpus)
            case NodeDraining(node, finish):
                self.drained.add(node)
                for gpu in [gpu for gpu, owner in self.owner.items() if self.node.get(gpu) == node and (owner is None or not finish)]:
                    del self.owner[gpu]
            case JobSubmitted():
                if event.job_id not in self.seen:
                    self.alive.add(event.job_id)
                    self.seen.add(event.job_id)
            case JobFinished() | JobFailed() | JobRequest(verb="cancel"):
                self.alive.discard(event.job_id)
                self.held.discard(event.job_id)
                for group in list(self.groups.values()):
                    if event.job_id in group.job_ids:
                        self._keep(group, lambda name: name != event.job_id)
            case GroupLost():
                if event.group_id in self.groups:
                    self._end(event.group_id)
            case JobRequest(verb="hold"):
                self.held |= {event.job_id} & self.alive
            case JobRequest(verb="release"):
                self.held.discard(event.job_id)
            case _:
                pass

    def execute(self, action: Action) -> None:
        match action:
            case StartGroup(group):
                assert group.group_id not in self.groups, f"{group.group_id} starts twice"
                self._take(group)
            case ChangeGroup(group):
                before = self.groups[group.group_id]
                assert before.base_model == group.base_model
                assert set(before.job_ids) & set(group.job_ids) and set(before.gpus) & set(group.gpus), "nothing of it stays"
                self._end(group.group_id)
                self.owner |= {gpu: None for gpu in before.gpus if gpu in group.gpus}
                self._take(group, before.gpus)
            case StopGroup(group_id):
                self._end(group_id)
            case RejectJob(job_id):
                assert job_id in self.alive and not any(job_id in group.job_ids for group in self.groups.values())
                self.alive.discard(job_id)

    def _take(self, group: JobGroup, before: tuple[int, ...] = ()) -> None:
        assert group.gpus and group.job_ids and len(set(group.gpus)) == len(group.gpus) and len(set(group.job_ids)) == len(group.job_ids)
        assert group.plan.data_parallel == len(group.gpus) and group.plan.token_budget % len(group.gpus) == 0
        assert len(group.weights) == len(group.job_ids) and all(weight > 0 for weight in group.weights)
        running = {name for other in self.groups.values() for name in other.job_ids}
        for gpu in group.gpus:
            assert self.owner[gpu] is None, f"GPU {gpu} goes to {group.group_id} and is {self.owner[gpu]}'s"
            assert gpu in before or gpu not in self.unheard, f"GPU {gpu} goes to {group.group_id}, and nothing is heard of it"
            self.owner[gpu] = group.group_id
        for name in group.job_ids:
            assert name in self.alive and name not in running, f"{name} joins {group.group_id} and has ended or runs"
        self.groups[group.group_id] = group

    def _end(self, group_id: str) -> None:
        group = self.groups.pop(group_id)
        for gpu in group.gpus:
            if gpu in self.owner:
                self.owner[gpu] = None
                if self.node.get(gpu) in self.drained:
                    del self.owner[gpu]

    def _keep(self, group: JobGroup, keeps: Callable[[str], bool]) -> None:
        kept = [(name, weight) for name, weight in zip(group.job_ids, group.weights, strict=True) if keeps(name)]
        names, weights = tuple(name for name, _ in kept), tuple(weight for _, weight in kept)
        self.groups[group.group_id] = JobGroup(group.group_id, group.base_model, group.gpus, group.plan, names, weights)


Move = tuple[str, int, int, float]
"""A kind of event, two numbers that choose what it is about, and the seconds since the one before, which may be less than none."""

_KINDS = (
    *("submit",) * 10,
    *("finish",) * 3,
    *(
        "tick",
        "steps",
        "ready",
        "cancel",
        "hold",
        "hold",
        "release",
        "release",
        "fail",
        "again",
        "lose",
        "lose GPU",
        "drain",
        "add",
        "add",
        "end",
        "measure",
        *("silent",) * 2,
        "heard",
    ),
)
_SECONDS = (0.0, 0.0, 1.0, 30.0, 60.0, 4000.0, -20.0)

MOVES = st.lists(
    st.tuples(st.sampled_from(_KINDS), st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(_SECONDS)), min_size=15, max_size=80
)


@dataclass
class Story:
    """Moves as events about a cluster of `nodes` of four GPUs each."""

    nodes: int = 3
    submitted: list[JobSubmitted] = field(default_factory=list)

    def event(self, move: Move, state: ClusterState) -> Event:
        kind, one, two, _ = move
        job_id = self._job(one)
        groups = [*state.groups, "g0", "g999"]  # among them some that have ended, or never were
        match kind:
            case "submit":
                self.submitted.append(self._spec(one, two))
                return self.submitted[-1]
            case "again":
                return self.submitted[one % len(self.submitted)] if self.submitted else Tick()
            case "finish":
                return JobFinished(job_id)
            case "fail":
                return JobFailed(job_id, "out of luck")
            case "cancel" | "hold":
                return JobRequest(job_id, kind)
            case "release":
                held = sorted(state.held)
                return JobRequest(held[two % len(held)] if held else job_id, "release")
            case "steps":
                job = state.jobs.get(job_id)
                group_id = job.group_id if job is not None and job.group_id is not None and two % 4 else groups[two % len(groups)]
                return StepsDone(job_id, group_id, float(two % 120), 1.0)
            case "ready":
                return GroupReady(groups[one % len(groups)])
            case "end":
                return GroupLost(groups[one % len(groups)], "out of luck")
            case "lose":
                return GpusLost(self._gpus(one % self.nodes))
            case "lose GPU":
                return GpusLost((one % (4 * self.nodes), 99))
            case "drain":
                return NodeDraining(f"n{one % self.nodes}", finish=bool(two % 2))
            case "add":
                return NodeAdded(f"n{one % self.nodes}", self._gpus(one % self.nodes), f"r{one % self.nodes // 2}")
            case "silent" | "heard":
                gpus = self._gpus(one % self.nodes)
                return GpusUnheard(gpus if two % 3 else gpus[: 1 + two % 2], "its lease" * (kind == "silent"))
            case "measure":
                speed = BaseSpeed((10.0, 1e3, 1e5)[one % 3], 0.5 * (two % 5), 0.1 * (one % 7), 0.05)
                return BaseMeasured(BASES[one % 2], "CPU", speed)
            case _:
                return Tick()

    def _job(self, number: int) -> str:
        return self.submitted[number % len(self.submitted)].job_id if self.submitted else "nobody"

    def _gpus(self, node: int) -> tuple[int, ...]:
        return tuple(range(4 * node, 4 * node + 4))

    def _spec(self, one: int, two: int) -> JobSubmitted:
        gpus = (1, 1, 1, 1, 2, 2, 3, 4, 4, 6, 8, 12, 13)[one % 13]  # the last are more than there are
        return made_spec(
            f"j{len(self.submitted)}",
            gpus,
            tokens=(100.0, 800.0, 3000.0, 40_000.0)[one // 13 % 4] * gpus,
            steps=(1, 40, 1000)[two % 3],
            parameters=(10**7, 10**7, 10**8, 10**8, 10**9, 10**9, 3 * 10**9)[two // 3 % 7],  # the last does not fit
            longest=(64, 512, 1500, 9000)[two // 21 % 4],
            base_model=BASES[two // 84 % 2],
            priority=(0.0, 0.0, 0.0, 1.0)[two // 168 % 4],
            max_slowdown=(1.0, 1.2, 1.5, 2.0, 6.0, math.inf)[one // 52 % 6],
        )


def tell(scheduler: Scheduler, mirror: Mirror, event: Event, now: float) -> list[Action]:
    """Let `event` happen and do what follows, one action after the other; then both must believe the same."""
    mirror.happen(event)
    actions = scheduler.handle(event, now)
    for action in actions:
        mirror.execute(action)
    state = scheduler.state
    check(state)
    assert mirror.groups == {name: known.group for name, known in state.groups.items()}
    assert all(group.job_ids for group in mirror.groups.values()), "a group without jobs is left"
    assert set(state.jobs) == mirror.alive, "a job is lost, or comes back"
    assert state.held - state.parked.keys() == mirror.held and not any(
        mirror.held.intersection(group.job_ids) for group in mirror.groups.values()
    )
    return actions


def started(actions: list[Action]) -> list[str]:
    return [name for action in actions if isinstance(action, StartGroup) for name in action.group.job_ids]


def steps_through(policy: Policy, moves: list[Move]) -> Iterator[tuple[Event, ClusterState, list[Action]]]:
    """Plays `moves`, and gives the event, the state after it and what was done."""
    scheduler, mirror, story, now = Scheduler(policy, made_cost()), Mirror(), Story(), 0.0
    for node in range(story.nodes):
        tell(scheduler, mirror, NodeAdded(f"n{node}", tuple(range(4 * node, 4 * node + 4)), f"r{node // 2}"), now)
    for move in moves:
        now += move[3]
        event = story.event(move, scheduler.state)
        actions = tell(scheduler, mirror, event, now)
        yield event, scheduler.state, actions
