"""The cluster of one machine: a worker process per GPU, and jobs that users submit, cancel, hold and release at any time.

It owns the processes, the clock and the directory. What each worker is told is the reconciler's decision, who trains where the
scheduler's, and how a micro-batch runs the worker's (`engine/worker.py`).
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from tlora import durable
from tlora.cluster.reconciler import LocalJob, Reconciler, Worker
from tlora.cluster.worker_process import Message, WorkerProcess
from tlora.errors import ConfigError
from tlora.job import BasePrecision, DType, MemoryLimit, Recompute, TrackerName
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    JobCancelled,
    JobGroup,
    JobHeld,
    JobReleased,
    JobSubmitted,
    NodeAdded,
    RejectJob,
    Request,
    StartGroup,
    StopGroup,
    Tick,
)
from tlora.worker_protocol import Load

STOP_SECONDS = 25.0  # for a worker to checkpoint its jobs and exit
_LOCK_SECONDS = 0.1  # between two looks whether a directory is free


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """GPUs as CUDA_VISIBLE_DEVICES numbers them, or as many one-thread workers on a CPU. `base_models`: name -> directory or hub id.

    `output_dir` gets `jobs/<name>/` as `tlora train` leaves it, and the workers' logs. What stands behind it is as in a jobs file, but for
    `tick_seconds`. With `deterministic`, an adapter's bytes depend neither on the company that its job had nor on its moves.
    """

    gpus: tuple[int, ...]
    device: Literal["cuda", "cpu"]
    base_models: Mapping[str, str]
    output_dir: Path
    deterministic: bool = False
    tick_seconds: float = 60.0
    dtype: DType = "auto"
    base_precision: BasePrecision | None = None
    recompute: Recompute = "auto"
    memory_limit: MemoryLimit = "auto"
    report_to: tuple[TrackerName, ...] = ()


Arrival = tuple[float, JobSubmitted | Request]


class LocalBackend:
    """A `Backend`. A group has one GPU: the engine has no data parallelism yet, and a group or a job of several is refused.

    `submit`, `cancel`, `hold`, `release` and `seal` may be called at any time and from any thread. A worker outlives its group: the next
    group on its GPU need not load the same base again. A job is in one worker at a time. Use it as a context manager, or `close` it:
    its workers otherwise run until this process ends.
    """

    def __init__(self, machine: LocalMachine) -> None:
        """Raises ConfigError, CheckpointError."""
        self._machine = machine
        for name in ("jobs", "workers"):
            durable.make_directory(machine.output_dir / name)
        self._lock_file = _lock_directory(machine.output_dir)
        self._start, self._start_unix = time.monotonic(), time.time()
        self._next_tick = machine.tick_seconds
        self._events: list[Event] = [NodeAdded("local", machine.gpus)]
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()  # None: users have asked something
        self._reconciler = Reconciler(machine.base_models, self._start_worker)
        self._asking = threading.Lock()  # of what follows, and of the jobs that are known
        self._arrives: dict[str, float] = {}  # job -> when it is submitted
        self._asked: list[tuple[float, int, JobSubmitted | Request]] = []  # a heap: seconds, serial, what users ask
        self._serial = itertools.count()
        self._sealed = self._stopped = False

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let all workers checkpoint their jobs and exit; after 25 seconds they are killed."""
        workers = self._reconciler.workers
        for worker in workers.values():
            worker.stop()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in workers.values():
            worker.reap(max(0.0, deadline - time.monotonic()))
        workers.clear()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def stop(self) -> None:
        """`poll` ends, with all jobs checkpointed and all workers ended. A signal handler may call it."""
        self._stopped = True
        self._inbox.put(None)

    @property
    def unfinished(self) -> int:
        """Jobs that have been submitted, or will be, and have not ended."""
        return len(self._reconciler.open) + sum(isinstance(asked, JobSubmitted) for _, _, asked in self._asked)

    # -- what users ask ------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSubmitted, job: LocalJob, at_seconds: float = 0.0) -> None:
        """The job arrives at that time on this back end's clock, or now. Raises ConfigError for one that cannot run here."""
        self._check(spec, job)
        with self._asking:
            known = self._reconciler.jobs
            twin = next((name for name in known if name.casefold() == spec.job_id.casefold()), None)
            if twin is not None:
                raise ConfigError(
                    f"job {spec.job_id!r}: there is a job {twin!r} already; names must differ in more than case, as they are directories. "
                    "Rename one"
                )
            self._ask(spec, at_seconds)
            known[spec.job_id], self._arrives[spec.job_id] = job, at_seconds

    def cancel(self, job_id: str, at_seconds: float = 0.0) -> None:
        """The job ends at that time, or now; its last checkpoint stays. Raises ConfigError for an unknown job, as the next two do."""
        self._ask_of(JobCancelled(job_id), at_seconds)

    def hold(self, job_id: str, at_seconds: float = 0.0) -> None:
        """The job checkpoints and leaves its GPU until it is released."""
        self._ask_of(JobHeld(job_id), at_seconds)

    def release(self, job_id: str, at_seconds: float = 0.0) -> None:
        self._ask_of(JobReleased(job_id), at_seconds)

    def seal(self) -> None:
        """No more jobs will be submitted: `poll` ends when all have ended. Until then it waits for more."""
        self._sealed = True
        self._inbox.put(None)

    def _ask_of(self, request: Request, at_seconds: float) -> None:
        with self._asking:
            if request.job_id not in self._arrives:
                raise ConfigError(f"unknown job {request.job_id!r}. Submit it first")
            self._ask(request, max(at_seconds, self._arrives[request.job_id]))

    def _ask(self, request: JobSubmitted | Request, at_seconds: float) -> None:
        if self._sealed and isinstance(request, JobSubmitted):
            raise ConfigError(f"job {request.job_id!r} comes after the back end was sealed. Submit all jobs before")
        heapq.heappush(self._asked, (at_seconds, next(self._serial), request))
        self._inbox.put(None)

    def _check(self, spec: JobSubmitted, job: LocalJob) -> None:
        name, bases = spec.job_id, self._machine.base_models
        if job.spec.name != name:
            raise ConfigError(f"job {name!r} is submitted with the spec of {job.spec.name!r}. Give both the same name")
        if spec.gpus != 1:
            raise ConfigError(
                f"job {name!r} asks for {spec.gpus} GPUs, and the local back end runs a job on one: "
                "the engine has no data parallelism yet. Ask for 1"
            )
        if spec.base_model not in bases:
            raise ConfigError(f"job {name!r}: unknown base model {spec.base_model!r}. Name one of {', '.join(sorted(bases))}")

    # -- the back end's three verbs ------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic() - self._start

    def poll(self) -> list[Event]:
        """Empty, with all workers ended, when it is stopped, or sealed and every job has arrived and ended."""
        while self._stopped or not self._events:
            if self._stopped or (self._sealed and not self._asked and not self._reconciler.open):
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
                if group.group_id in self._reconciler.groups:  # else it was lost, which the scheduler is about to hear
                    self._want(group)
            case StopGroup(group_id):
                self._reconciler.forget(group_id)
            case RejectJob(job_id):
                self._reconciler.open.discard(job_id)
        self._settle()

    def _want(self, group: JobGroup) -> None:
        if len(group.gpus) != 1:
            raise ConfigError(
                f"group {group.group_id} is to run on GPUs {group.gpus}, and the local back end runs a group on one: "
                "the engine has no data parallelism yet. Take a policy without growth"
            )
        assert group.gpus[0] in self._machine.gpus, f"{group.group_id} is to run on {group.gpus}; there are {self._machine.gpus}"
        self._reconciler.want(group)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Until a worker reports, a user asks, or the next tick; then all that is there to hear."""
        with self._asking:
            due = min(self._next_tick, self._asked[0][0] if self._asked else math.inf)
        try:
            self._hear(self._inbox.get(timeout=max(0.0, due - self.now())))
            while True:
                self._hear(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _hear(self, message: Message) -> None:
        if message is None:
            return
        worker, report = message
        if report is None:
            worker.reap(STOP_SECONDS)
            self._reconciler.lose(worker, worker.how_it_ended())
        else:
            self._reconciler.hear(worker, report)

    def _pass_time(self) -> None:
        now, living = self.now(), self._reconciler.open
        self._collect()
        with self._asking:
            while self._asked and self._asked[0][0] <= now:
                event = heapq.heappop(self._asked)[2]
                if isinstance(event, JobSubmitted):
                    living.add(event.job_id)
                elif event.job_id not in living:  # it has ended meanwhile
                    continue
                elif isinstance(event, JobCancelled):
                    living.discard(event.job_id)
                self._events.append(event)
        if self._next_tick <= now:
            self._events.append(Tick())
            self._next_tick = now + self._machine.tick_seconds

    def _settle(self) -> None:
        self._reconciler.step()
        self._collect()

    def _collect(self) -> None:
        self._events += self._reconciler.events
        self._reconciler.events.clear()

    def _start_worker(self, gpu: int, base_model: str) -> Worker:
        machine = self._machine
        load = Load(
            base_model,
            str(machine.output_dir / "jobs"),
            machine.device,
            self._start_unix,
            machine.deterministic,
            machine.dtype,
            machine.base_precision,
            machine.recompute,
            machine.memory_limit,
            machine.report_to,
        )
        return WorkerProcess(gpu, load, machine.output_dir / "workers" / f"gpu{gpu}.log", self._inbox, self._lock_file)


def submit_all(backend: LocalBackend, jobs: Mapping[str, LocalJob], arrivals: Iterable[Arrival]) -> None:
    """Ask for all `arrivals`, each with its time on the back end's clock, and seal the back end. Raises ConfigError for one of them."""
    for seconds, event in sorted(arrivals, key=lambda arrival: arrival[0]):
        match event:
            case JobSubmitted(name):
                if name not in jobs:
                    raise ConfigError(f"unknown job {name!r}. Give its spec too")
                backend.submit(event, jobs[name], seconds)
            case JobCancelled(name):
                backend.cancel(name, seconds)
            case JobHeld(name):
                backend.hold(name, seconds)
            case JobReleased(name):
                backend.release(name, seconds)
    backend.seal()


def _lock_directory(directory: Path) -> int:
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
