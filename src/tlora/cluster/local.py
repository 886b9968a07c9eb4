"""The cluster of one machine: a worker process per GPU, jobs that arrive when their time comes, adapters on its disk.

It makes what is wanted of each GPU come true step by step and tells what has happened; who trains where is the scheduler's, and how a
micro-batch runs is the worker's (`engine/worker.py`).
"""

from __future__ import annotations

import fcntl
import math
import os
import queue
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from tlora import durable
from tlora.cluster.worker_process import Message, WorkerProcess
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupLost,
    GroupReady,
    JobCancelled,
    JobFailed,
    JobFinished,
    JobGroup,
    JobSubmitted,
    NodeAdded,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.worker_protocol import Failed, Finished, Join, Joined, Leave, Left, Load, Loaded, Report, Share, Stepped

STOP_SECONDS = 25.0  # for a worker to checkpoint its jobs and exit
_LOCK_SECONDS = 0.1  # between two looks whether a directory is free
MOST_DEATHS = 3  # of workers in a row, without progress of a job: then it fails, if it was alone in the last
_MORE_STEPS_ALONE = 4  # to its nth power: the steps that a job must get further alone after it was among others in n workers that died


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """GPUs as CUDA_VISIBLE_DEVICES numbers them, or as many one-thread workers on a CPU. `base_models`: name -> directory or hub id.

    `output_dir` gets `jobs/<name>/` as `tlora train` leaves it, and the workers' logs. `deterministic` as in a jobs file: then an adapter's
    bytes depend neither on the company that its job had nor on its moves.
    """

    gpus: tuple[int, ...]
    device: Literal["cuda", "cpu"]
    base_models: Mapping[str, str]
    output_dir: Path
    deterministic: bool = False
    tick_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class LocalJob:
    """An order, and where its data lies tokenized (`engine.profile`); without that its worker prepares the data again."""

    spec: JobSpec
    train_set: str | None = None
    eval_set: str | None = None


Arrival = tuple[float, JobSubmitted | JobCancelled]


class LocalBackend:
    """A `Backend`. A group has one GPU: the engine has no data parallelism yet, and a group or an order of several is refused.

    A worker outlives its group: the next group on its GPU need not load the same base again. A job is in one worker at a time: the next
    one gets it when the last has let it go. Use it as a context manager, or `close` it: its workers go on else until this process ends.
    """

    def __init__(self, machine: LocalMachine, jobs: Mapping[str, LocalJob], arrivals: Iterable[Arrival]) -> None:
        """`arrivals`: when, on this back end's clock, which of `jobs` is submitted or cancelled. Raises ConfigError, CheckpointError."""
        self._machine, self._jobs = machine, jobs
        self._arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
        _check_orders(machine, jobs, [event for _, event in self._arrivals])
        for name in ("jobs", "workers"):
            durable.make_directory(machine.output_dir / name)
        self._hold = _hold_directory(machine.output_dir)
        self._start, self._start_unix = time.monotonic(), time.time()
        self._next_tick = machine.tick_seconds
        self._events: list[Event] = [NodeAdded("local", machine.gpus)]
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._workers: dict[int, WorkerProcess] = {}
        self._groups: dict[str, JobGroup] = {}  # as they are wanted
        self._unready: set[str] = set()  # groups whose last change is not through
        self._open: set[str] = set()  # jobs that were submitted and have not ended
        self._furthest: Counter[str] = Counter()  # steps of each job, as far as any worker has reported
        self._deaths: Counter[str] = Counter()  # of workers in a row, without progress of the job (`_see_steps`)
        self._suspicions: Counter[str] = Counter()  # deaths of workers that it shared with others
        self._alone_until: dict[str, int] = {}  # steps to which a suspect is alone in its worker

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let all workers checkpoint their jobs and exit; after 25 seconds they are killed."""
        for worker in self._workers.values():
            worker.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self._workers.values():
            worker.reap(max(0.0, deadline - time.monotonic()))
        self._workers.clear()
        if self._hold is not None:
            os.close(self._hold)
            self._hold = None

    # -- the back end's three verbs ------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic() - self._start

    def poll(self) -> list[Event]:
        """Empty, with all workers ended, when every job has arrived and ended."""
        while not self._events:
            if not self._arrivals and not self._open:
                self.close()
                return []
            self._listen()
            self._pass_time()
            self._settle()
        found, self._events = self._events, []
        return found

    def execute(self, action: Action) -> None:
        """Raises ConfigError for a group on several GPUs."""
        match action:
            case StartGroup(group):
                self._want(group)
            case ChangeGroup(group):
                if group.group_id in self._groups:  # else it was lost, which the scheduler is about to hear
                    self._want(group)
            case StopGroup(group_id):
                self._groups.pop(group_id, None)
                self._unready.discard(group_id)
            case RejectJob(job_id):
                self._open.discard(job_id)
        self._settle()

    def _want(self, group: JobGroup) -> None:
        if len(group.gpus) != 1:
            raise ConfigError(
                f"group {group.group_id} is to run on GPUs {group.gpus}, and the local back end runs a group on one: "
                "the engine has no data parallelism yet. Take a policy without growth"
            )
        (gpu,) = group.gpus
        other = self._group_on(gpu)
        assert gpu in self._machine.gpus, f"{group.group_id} is to run on GPU {gpu}; there are {self._machine.gpus}"
        assert other is None or other.group_id == group.group_id, f"GPU {gpu} is {other}'s and shall be {group.group_id}'s"
        self._groups[group.group_id] = group
        self._unready.add(group.group_id)

    def _group_on(self, gpu: int) -> JobGroup | None:
        return next((group for group in self._groups.values() if group.gpus == (gpu,)), None)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Until a worker says something, somebody arrives, or the next tick; then all that is there to hear."""
        due = min(self._next_tick, self._arrivals[0][0] if self._arrivals else math.inf)
        try:
            self._hear(*self._inbox.get(timeout=max(0.0, due - self.now())))
            while True:
                self._hear(*self._inbox.get_nowait())
        except queue.Empty:
            return

    def _pass_time(self) -> None:
        now = self.now()
        while self._arrivals and self._arrivals[0][0] <= now:
            _, event = self._arrivals.pop(0)
            if isinstance(event, JobSubmitted):
                self._open.add(event.job_id)
            else:
                self._open.discard(event.job_id)
            self._events.append(event)
        if self._next_tick <= now:
            self._events.append(Tick())
            self._next_tick = now + self._machine.tick_seconds

    def _hear(self, worker: WorkerProcess, report: Report | None) -> None:
        match report:
            case None:
                self._lose(worker)
            case Loaded():
                worker.loaded = True
            case Joined(job_id):
                if worker.jobs.get(job_id) == "joining":
                    worker.jobs[job_id] = "resident"
            case Stepped(job_id, steps, step_seconds):
                self._see_steps(job_id, steps)
                group = self._group_on(worker.gpu)
                if group is not None and job_id in group.job_ids:
                    self._events.append(StepsDone(job_id, group.group_id, steps, step_seconds))
            case Finished(job_id):
                worker.jobs.pop(job_id, None)
                self._end(JobFinished(job_id))
            case Failed(job_id, reason):
                worker.jobs.pop(job_id, None)
                self._end(JobFailed(job_id, reason))
            case Left(job_id):
                worker.doomed |= worker.jobs.pop(job_id, None) != "leaving"

    def _end(self, event: JobFinished | JobFailed) -> None:
        if event.job_id in self._open:
            self._open.discard(event.job_id)
            self._events.append(event)

    def _lose(self, worker: WorkerProcess) -> None:
        """Its process has ended: as it was told to, or by itself, and then its group with it."""
        del self._workers[worker.gpu]
        worker.reap(STOP_SECONDS)
        if worker.stopping:
            return
        reason = worker.how_it_ended()
        self._blame(worker, reason)
        group = self._group_on(worker.gpu)
        if group is not None:
            del self._groups[group.group_id]
            self._unready.discard(group.group_id)
            self._events.append(GroupLost(group.group_id, reason))

    def _blame(self, worker: WorkerProcess, reason: str) -> None:
        """Any job in a worker that died may be what killed it: each is suspected, and has its next worker to itself. One whose workers
        die even so fails. A worker that dies before its base is loaded has not begun with its jobs: being alone would tell nothing.
        """
        together = worker.loaded and len(worker.jobs) > 1
        for job_id in worker.jobs:
            self._deaths[job_id] += 1
            if together:
                self._suspicions[job_id] += 1
                self._alone_until[job_id] = self._furthest[job_id] + _MORE_STEPS_ALONE ** self._suspicions[job_id]
            elif self._deaths[job_id] >= MOST_DEATHS:
                self._end(
                    JobFailed(job_id, f"{self._deaths[job_id]} workers in a row ended with this job and without progress of it; {reason}")
                )

    def _see_steps(self, job_id: str, steps: int) -> None:
        """A job that gets further than it ever was, or a suspect that gets as far as it must alone, is not what killed its workers."""
        if steps >= self._alone_until.get(job_id, self._furthest[job_id] + 1):
            self._alone_until.pop(job_id, None)
            self._deaths.pop(job_id, None)
        self._furthest[job_id] = max(steps, self._furthest[job_id])

    # -- what is to be done about it -----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """One step from what each GPU has towards what it shall have. What must wait for a worker's answer is done when that has come."""
        for worker in self._workers.values():
            group = self._group_on(worker.gpu)
            if group is not None and worker.load.base_model != self._machine.base_models[group.base_model]:
                worker.stop()
            for job_id, state in worker.jobs.items():
                if state != "leaving" and worker.obeys and (group is None or job_id not in self._wanted(group)):
                    worker.jobs[job_id] = "leaving"
                    worker.send(Leave(job_id))
        held = {job_id for worker in self._workers.values() for job_id in worker.jobs}
        for group in list(self._groups.values()):
            worker = self._workers.get(group.gpus[0]) or self._start_worker(group)
            if worker.obeys:
                self._let_in(group, worker, held)

    def _wanted(self, group: JobGroup) -> tuple[str, ...]:
        """Who shall be in the group's worker now: its jobs, or the first of them that is suspected, alone."""
        suspects = (job_id for job_id in group.job_ids if job_id in self._alone_until and job_id in self._open)
        suspect = next(suspects, None)
        return group.job_ids if suspect is None else (suspect,)

    def _start_worker(self, group: JobGroup) -> WorkerProcess:
        (gpu,) = group.gpus
        machine = self._machine
        base, jobs = machine.base_models[group.base_model], str(machine.output_dir / "jobs")
        load = Load(base, jobs, machine.device, self._start_unix, machine.deterministic)
        worker = self._workers[gpu] = WorkerProcess(gpu, load, machine.output_dir / "workers" / f"gpu{gpu}.log", self._inbox, self._hold)
        return worker

    def _let_in(self, group: JobGroup, worker: WorkerProcess, held: set[str]) -> None:
        """Those that are wanted there and that no worker has; and, when all of the group are in, say that it is ready."""
        share = Share(group.plan.token_budget, group.plan.recomputed_layers, dict(zip(group.job_ids, group.weights, strict=True)))
        if worker.told != share:
            worker.told = share
            worker.send(share)
        living = [job_id for job_id in group.job_ids if job_id in self._open]
        wanted = self._wanted(group)
        others = any(job_id not in wanted for job_id in worker.jobs)  # on their way out
        for job_id in living:
            if job_id in wanted and job_id not in held and not (others and job_id in self._alone_until):
                worker.jobs[job_id] = "joining"
                job = self._jobs[job_id]
                worker.send(Join(job.spec, job.train_set, job.eval_set))
        settled = worker.loaded and "leaving" not in worker.jobs.values()
        if group.group_id in self._unready and settled and all(worker.jobs.get(job_id) == "resident" for job_id in living):
            self._unready.discard(group.group_id)
            self._events.append(GroupReady(group.group_id))


def _check_orders(machine: LocalMachine, jobs: Mapping[str, LocalJob], events: list[JobSubmitted | JobCancelled]) -> None:
    for event in events:
        name = event.job_id
        if name not in jobs or jobs[name].spec.name != name:
            raise ConfigError(f"job {name!r} arrives, and there is no order of that name. Give one, whose spec has the same name")
        if isinstance(event, JobSubmitted) and event.gpus != 1:
            raise ConfigError(
                f"job {name!r} asks for {event.gpus} GPUs, and the local back end runs a job on one: "
                "the engine has no data parallelism yet. Ask for 1"
            )
        if isinstance(event, JobSubmitted) and event.base_model not in machine.base_models:
            known = ", ".join(sorted(machine.base_models))
            raise ConfigError(f"job {name!r} wants the base model {event.base_model!r}, and there are {known}. Name one of them")
    twins = [names for names, count in Counter(name.casefold() for name in jobs).items() if count > 1]
    if twins:
        raise ConfigError(f"two jobs are named {twins[0]!r}: names must differ in more than case, they are directories. Rename one")


def _hold_directory(directory: Path) -> int:
    """A lock on the directory itself. Workers share it, also those of a back end that was killed: they save their jobs and end, and are
    waited for.
    """
    handle, deadline = os.open(directory, os.O_RDONLY), time.monotonic() + STOP_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise ConfigError(
                    f"output_dir {directory} is in use by another back end, or by workers that one left behind. "
                    "Wait for them, or choose another"
                ) from None
            time.sleep(_LOCK_SECONDS)
