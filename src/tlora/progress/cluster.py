"""A cluster's events and actions as changes of the view of its jobs: read by `tlora cluster` and by the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tlora.progress.view import Change, ProgressView
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GpusLost,
    GpusUnheard,
    GroupFound,
    GroupKept,
    GroupLost,
    JobDelayed,
    JobFailed,
    JobFinished,
    JobGroup,
    JobRequest,
    JobSubmitted,
    KindsFound,
    NodeAdded,
    NodeDraining,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
)


@dataclass(slots=True)
class Host:
    """`failure_domain`: what fails as one with it; "" if unknown. `draining`: nothing starts there any more."""

    name: str
    failure_domain: str
    gpus: set[int] = field(default_factory=set[int])
    draining: bool = False


class ClusterProgress:
    """`view` has the jobs, `groups` those that run, by id, `hosts` those that are there, by name, and `kinds` what GPUs are. `kept`: by
    group, why it has not all GPUs that it was given; `unheard`: by GPU, what its jobs wait for while nothing is heard of its worker;
    `delayed`: by job of a group, what it alone waits for there.
    """

    def __init__(self, view: ProgressView) -> None:
        self.view = view
        self.groups: dict[str, JobGroup] = {}
        self.hosts: dict[str, Host] = {}
        self.kinds: dict[int, str] = {}
        self.kept: dict[str, GroupKept] = {}
        self.unheard: dict[int, str] = {}
        self.delayed: dict[str, str] = {}
        self._host_with: dict[int, Host] = {}  # by GPU
        self._group_of: dict[str, str] = {}
        self._tokens_per_step: dict[str, float] = {}

    def see(self, item: Event | Action) -> list[Change]:
        """What has happened or was decided. Returns the rows that were set."""
        self._fold(item)
        return self.view.take_changes()

    def forget(self, name: str) -> None:
        """It has ended, and nobody asks for it any more. It may be in a group until that is changed."""
        self.view.forget(name)
        self.delayed.pop(name, None)
        self._tokens_per_step.pop(name, None)

    def _fold(self, item: Event | Action) -> None:
        view = self.view
        match item:
            case JobSubmitted(name):
                self._tokens_per_step[name] = item.profile.tokens_per_step
                view.queue(name, total_steps=item.profile.steps)
            case JobRequest(name, "hold"):
                view.hold(name)
            case JobRequest(name, "release"):
                view.release(name)
            case GroupFound(group, submitted, steps):
                for job in submitted:
                    self._fold(job)
                self._place(group)
                done = dict(zip(group.job_ids, steps, strict=False))
                for name in group.job_ids:
                    view.advance(name, status="training", step=done.get(name, 0))
            case StartGroup(group) | ChangeGroup(group):
                if (kept := self.kept.get(group.group_id)) is not None and kept.gpus != group.gpus:
                    del self.kept[group.group_id]
                self._place(group)
            case StopGroup(group_id) | GroupLost(group_id):
                self._leave(group_id, frozenset())
                self.groups.pop(group_id, None)
                self.kept.pop(group_id, None)
            case GroupKept(group_id):
                self.kept[group_id] = item
            case StepsDone(name, _, steps, step_seconds) if name in view.rows:
                rate = self._tokens_per_step.get(name, 0.0) / step_seconds if step_seconds > 0 else 0.0
                self.delayed.pop(name, None)
                eta = max(0, view.rows[name].total_steps - int(steps)) * step_seconds
                view.advance(name, status="training", step=int(steps), tokens_per_second=rate, eta_seconds=eta or None)
            case JobFinished(name) if name in view.rows:
                view.end(name, "done", step=view.rows[name].total_steps)
            case JobFailed(name, reason) | RejectJob(name, reason):
                view.end(name, "failed", reason=reason)
            case JobRequest(name, "cancel"):
                view.end(name, "stopped")
            case NodeAdded(name, gpus, rack):
                host = self.hosts.setdefault(name, Host(name, rack))
                host.gpus.update(gpus)
                host.draining = False
                self._host_with |= dict.fromkeys(gpus, host)
            case KindsFound(gpus, kinds):
                self.kinds |= dict(zip(gpus, kinds, strict=True))
            case NodeDraining(name) if name in self.hosts:
                self.hosts[name].draining = True
            case GpusUnheard(gpus, why):
                self.unheard |= dict.fromkeys(gpus, why)
                self._pause(self.jobs_on(gpus) if why else ())
            case JobDelayed(name, why):
                self.delayed[name] = why
                self._pause([name])
            case GpusLost(gpus):
                self._lose(gpus)
            case _:
                pass

    def _lose(self, gpus: tuple[int, ...]) -> None:
        """These are gone, and hosts that have no others."""
        for gpu in gpus:
            self.unheard.pop(gpu, None)
            if (host := self._host_with.pop(gpu, None)) is not None:
                host.gpus.discard(gpu)
                if not host.gpus:
                    del self.hosts[host.name]

    def _pause(self, names: Iterable[str]) -> None:
        """These jobs do not go on just now."""
        for name in names:
            self.view.advance(name, tokens_per_second=0.0, eta_seconds=None)

    def _place(self, group: JobGroup) -> None:
        self._leave(group.group_id, frozenset(group.job_ids))
        self.groups[group.group_id] = group
        for name in group.job_ids:
            self._group_of[name] = group.group_id
            self.view.place(name, group.gpus, self._host_of(group))

    @property
    def silent(self) -> frozenset[int]:
        """The GPUs on which nobody is heard now."""
        return frozenset([gpu for gpu, why in self.unheard.items() if why])

    def jobs_on(self, gpus: Iterable[int]) -> list[str]:
        """Those of the groups that have some of these."""
        there = set(gpus)
        return [name for group in self.groups.values() if not there.isdisjoint(group.gpus) for name in group.job_ids]

    def why_delayed(self, name: str) -> str:
        """What a job of a group waits for; "" for one that goes on, as far as is known."""
        group = self.groups.get(self._group_of.get(name, ""))
        unheard = (self.unheard.get(gpu, "") for gpu in group.gpus) if group is not None else ()
        return next(filter(None, unheard), "") or self.delayed.get(name, "")

    def why_there(self, group: JobGroup) -> str:
        """What the group waits for, or why its GPUs are of several hosts, or not all that it was given; "" for none of these."""
        if (why := next((why for gpu in group.gpus if (why := self.unheard.get(gpu))), "")) != "":
            return why
        if (kept := self.kept.get(group.group_id)) is not None:
            return kept.reason
        over = list(dict.fromkeys(self._host_with[gpu].name for gpu in group.gpus if gpu in self._host_with))
        return f"on hosts {' and '.join(over)}: its base or a job of it needs more GPUs than one has" if len(over) > 1 else ""

    def _host_of(self, group: JobGroup) -> str:
        """Where there are several."""
        host = self._host_with.get(group.gpus[0])
        return host.name if host is not None and len(self.hosts) > 1 else ""

    def _leave(self, group_id: str, stay: frozenset[str]) -> None:
        """Those that do not stay leave the group, unless they are in another one already."""
        for name in self.groups[group_id].job_ids if group_id in self.groups else ():
            if name not in stay and self._group_of.get(name) == group_id:
                del self._group_of[name]
                self.delayed.pop(name, None)
                self.view.leave(name)
