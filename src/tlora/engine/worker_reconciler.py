"""Turns a worker's desired state into commands for its trainer, one step at a time, and accounts for the trainer's reports.

Starts nothing, reads no clock and does not wait. Which job trains where is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tlora.engine.messages import Command, Leave, Listen, SetGpus, SetPlan, Stop
from tlora.link.outbox import with_attempt
from tlora.worker_protocol import (
    Delayed,
    DesiredState,
    Ending,
    GpusChanged,
    HeldJob,
    JobEnd,
    JobReport,
    Joined,
    Listening,
    Loaded,
    Measured,
    Memory,
    Report,
    Settled,
    Stepped,
)

Membership = Literal["joining", "resident", "leaving"]


@dataclass(slots=True)
class _Here:
    attempt: int
    steps: int = 0
    state: Membership = "joining"
    delayed: str = ""  # what it waits for


class WorkerReconciler:
    """`want` is the last desired state; the caller takes `reports` and `commands`."""

    def __init__(self, gpus: tuple[int, ...]) -> None:
        """`gpus`: those that the worker was started with; with none it gets some with its base."""
        self.want: DesiredState | None = None
        self._gpus = self._ordered_gpus = gpus  # that it has, and that it was last told to have
        self._order = self._heard_order = 0  # of the GPUs: the last that the trainer was given, and the last of all
        self._changing = False  # from the ones to the others
        self.loaded = self.stopping = False
        self.reports: list[Report] = []
        self.commands: list[Command] = []
        self._here: dict[str, _Here] = {}
        self._over: dict[str, int] = {}  # the last attempt of each job that is over here
        self._shared: SetPlan | None = None
        self._found: dict[type, Measured | Memory | Listening] = {}  # of the base, the GPUs and the host, which each controller hears
        self._lent: set[int] = set()  # GPUs of other hosts that it has been told to have
        self._listens = ""
        self._settled = (0, 0)  # epoch and generation that were reported as settled

    def hear_want(self, want: DesiredState) -> bool:
        """Take in a desired state. Returns False, without effect, if it comes from an older controller."""
        known = self.want
        if known is not None and want.epoch < known.epoch:
            return False
        if known is None or (want.epoch, want.generation) > (known.epoch, known.generation):
            self.want = want
            if not self._gpus:
                self._gpus = self._ordered_gpus = want.gpus
            if known is not None and want.epoch > known.epoch:
                self.reports += self._found.values()
                self.reports += [Delayed(name, here.delayed, here.attempt) for name, here in self._here.items() if here.delayed]
            self._step()
        return True

    def hear_report(self, report: Report) -> None:
        """Take in the trainer's report and pass it on with the job's attempt."""
        if isinstance(report, Loaded):
            self.loaded = True
        if isinstance(report, GpusChanged):
            self._gpus, self._changing = report.gpus, report.order < self._order
        if isinstance(report, Measured | Memory | Listening):
            self._found[type(report)] = report
        if isinstance(report, JobReport):
            here = self._here.get(report.job_id)
            if here is None or (isinstance(report, Delayed) and report.why == here.delayed):
                return
            report = with_attempt(report, here.attempt)
            self._see(report, here)
        self.reports.append(report)
        self._step()

    def stop(self, reason: str) -> None:
        """All jobs leave, and the state is no longer settled. So a controller that finds the worker then blames no job for its end."""
        if not self.stopping:
            self.stopping = True
            self.reports.append(Ending(reason))
            self.commands.append(Stop())

    @property
    def gpus(self) -> tuple[int, ...]:
        """Those that the worker has."""
        return self._gpus

    @property
    def claimed(self) -> tuple[int, ...]:
        """GPUs of its host that the worker has, or is about to have."""
        return tuple(sorted({*self._gpus, *(self._ordered_gpus if self._changing else ())} - self._lent))

    @property
    def held(self) -> list[HeldJob]:
        return [HeldJob(name, here.attempt, here.steps, here.state == "resident") for name, here in self._here.items()]

    def _see(self, report: Report, here: _Here) -> None:
        match report:
            case Joined(_, steps):
                here.steps = steps
                here.state = "resident" if here.state == "joining" else here.state
                here.delayed = ""
            case Delayed(_, why):
                here.delayed = why
            case Stepped(_, steps):
                here.steps, here.delayed = steps, ""
            case _ if isinstance(report, JobEnd):
                self._over[report.job_id] = here.attempt
                del self._here[report.job_id]
            case _:
                pass

    def _step(self) -> None:
        want = self.want
        if want is None or self.stopping:
            return
        if want.stop:
            self.stop("its controller wants no more of it")
            return
        if want.listen and want.listen != self._listens:
            self._listens = want.listen
            self.commands.append(Listen(want.listen))
        self._lent.update(want.lent)
        if want.group is not None:
            plan, group = want.group.plan, want.group
            if want.gpus_order > self._heard_order:
                self._heard_order = want.gpus_order
                if self._changing or group.gpus != self._gpus:
                    self._ordered_gpus, self._order, self._changing = group.gpus, want.gpus_order, True
                    self.commands.append(SetGpus(group.gpus, want.gpus_order, want.lent))
            share = SetPlan(plan.token_budget, dict(zip(group.job_ids, group.weights, strict=True)))
            if share != self._shared:
                self._shared = share
                self.commands.append(share)
        wanted = {join.job.name: join.attempt for join in want.jobs}
        for name, here in self._here.items():
            if here.state != "leaving" and wanted.get(name) != here.attempt:
                here.state = "leaving"
                self.commands.append(Leave(name))
        others = any(name not in wanted for name in self._here)
        for join in want.jobs:
            name = join.job.name
            if name not in self._here and join.attempt > self._over.get(name, 0) and not (want.alone and others):
                self._here[name] = _Here(join.attempt)
                self.commands.append(join)
        self._tell_settled(want, wanted)

    def _tell_settled(self, want: DesiredState, wanted: dict[str, int]) -> None:
        now = want.epoch, want.generation
        residents = {name: here.attempt for name, here in self._here.items() if here.state == "resident"}
        if want.group is not None and want.group.gpus != self._gpus:
            return
        through = all(name in residents or self._over.get(name) == attempt for name, attempt in wanted.items())
        if self.loaded and now > self._settled and through and len(residents) == len(self._here):
            self._settled = now
            self.reports.append(Settled(want.generation, residents))
