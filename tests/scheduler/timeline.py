"""A cluster on a clock: jobs get on as the scheduler predicts, end when they are through, and a tick comes each minute."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.scheduler.mirror import Mirror, made_cost, made_scheduler, made_settings, tell
from tlora.protocol import Action, ChangeGroup, Event, JobFinished, JobGroup, RejectJob, StartGroup, Tick
from tlora.scheduler.job import Job
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy, Scheduler
from tlora.scheduler.settings import Settings
from tlora.shape.cost import CostModel

TICK_SECONDS = 60.0
MOST_RETHINK_SECONDS = 300.0  # a decision to change nothing may hold for so long


@dataclass
class Timeline:
    """`moves` counts how often a job that had run got other GPUs or another group; `started_at` is each job's first start."""

    scheduler: Scheduler
    mirror: Mirror = field(default_factory=Mirror)
    now: float = 0.0
    started_at: dict[str, float] = field(default_factory=dict[str, float])
    ended_at: dict[str, float] = field(default_factory=dict[str, float])
    moves: dict[str, int] = field(default_factory=dict[str, int])
    actions: list[tuple[float, Action]] = field(default_factory=list[tuple[float, Action]])
    _ticked_at: float = 0.0
    _gpus_of: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])  # that a job had last

    def tell(self, *events: Event) -> list[Action]:
        """Let them happen now; each action must be possible at its turn."""
        found: list[Action] = []
        for event in events:
            found += tell(self.scheduler, self.mirror, event, self.now)
        for action in found:
            self.actions.append((self.now, action))
        for name, gpus in self._placed().items():
            self.started_at.setdefault(name, self.now)
            if self._gpus_of.setdefault(name, gpus) != gpus:
                self.moves[name] = self.moves.get(name, 0) + 1
                self._gpus_of[name] = gpus
        return found

    def until(self, seconds: float) -> None:
        """Ticks and the ends of jobs, up to that time and with it."""
        while True:
            tick = self._ticked_at + TICK_SECONDS
            ends = [(_end_of(job), name) for name, job in self.scheduler.state.jobs.items() if job.status == "placed"]
            at, name = min(ends, default=(math.inf, ""))
            if min(at, tick) > seconds:
                self.now = seconds
                return
            self.now = max(self.now, min(at, tick))
            if at <= tick:
                self.ended_at[name] = self.now
                self.tell(JobFinished(name))
            else:
                self._ticked_at = tick
                self.tell(Tick())

    def job(self, name: str) -> Job:
        return self.scheduler.state.jobs[name]

    def group_of(self, name: str) -> JobGroup | None:
        """The group that it is in, None while it waits."""
        group_id = self.job(name).group_id
        return None if group_id is None else self.scheduler.state.groups[group_id].group

    def gpus_of(self, name: str) -> tuple[int, ...]:
        """The GPUs of its group, none while it waits."""
        group = self.group_of(name)
        return () if group is None else group.gpus

    def _placed(self) -> dict[str, tuple[int, ...]]:
        return {name: known.group.gpus for known in self.scheduler.state.groups.values() for name in known.group.job_ids}


def made_timeline(*nodes: int, settings: Settings | None = None, cost: CostModel | None = None, policy: Policy | None = None) -> Timeline:
    """Under `residual_capacity`, or another `policy`, over nodes of so many GPUs, two to a rack."""
    scheduler = made_scheduler(policy or residual_capacity(settings or made_settings()), *nodes, cost=cost or made_cost())
    return Timeline(scheduler, Mirror(dict.fromkeys(range(sum(nodes)))))


def slowdowns(scheduler: Scheduler) -> dict[str, float]:
    """Of everybody in a group: its step there over that alone on the GPUs that it asked for."""
    state = scheduler.state
    return {
        name: seconds / state.jobs[name].alone_step_seconds
        for known in state.groups.values()
        for name, seconds in zip(known.group.job_ids, known.step_seconds, strict=True)
    }


def rejected(actions: list[Action]) -> dict[str, str]:
    return {action.job_id: action.reason for action in actions if isinstance(action, RejectJob)}


def wanted(actions: list[Action]) -> list[JobGroup]:
    """Groups that start or change."""
    return [action.group for action in actions if isinstance(action, StartGroup | ChangeGroup)]


def _end_of(job: Job) -> float:
    return job.seen_at + max(0.0, job.spec.profile.steps - job.steps_done) * job.step_seconds
