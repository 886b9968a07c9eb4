"""The cluster of one machine: a worker process per group of GPUs, and jobs that users submit, cancel, hold and release at any time.

It owns the clock and the store; `worker_pool.py` has the workers. The scheduler decides which job trains where, the reconciler what each
worker gets, the worker (`engine/worker.py`) how a micro-batch runs. Workers outlive the back end: the next one on the store finds them.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from tlora import durable
from tlora.cluster.asked_queue import AskedQueue
from tlora.cluster.engine_hosts import EngineHosts, OpenKeeper
from tlora.cluster.epochs import begin_epoch, lock_store
from tlora.cluster.found_workers import FoundWorkers
from tlora.cluster.hosts import own_events
from tlora.cluster.kept_kind import KeptKind, processor_here
from tlora.cluster.leases import Leases
from tlora.cluster.listeners import TlsListener
from tlora.cluster.local_machine import LocalMachine
from tlora.cluster.nodes import Nodes
from tlora.cluster.reconciler import LocalJob, Reconciler
from tlora.cluster.wide_groups import WideGroups
from tlora.cluster.worker_pool import WorkerPool
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupFound,
    JobFailed,
    JobFinished,
    JobGroup,
    JobRequest,
    JobSubmitted,
    RejectJob,
    StartGroup,
    StopGroup,
    Tick,
)
from tlora.scheduler.state import ClusterState
from tlora.worker_protocol import Load, settings_of

STOP_SECONDS = 25.0  # for a worker to checkpoint its jobs and exit
_ASKED_AT_ONCE = 64  # requests between which workers are heard


class LocalBackend:
    """A `Backend`. A group is one worker, however many GPUs it has; where these change, its jobs go on in another from their checkpoints.

    `submit`, `ask` and `seal` may be called at any time and from any thread. A worker outlives its group: the next
    group on its GPU need not load the same base again. A job is in one worker at a time. Use it as a context manager, or `close` it.

    Where an earlier back end on the same store was killed, its workers train on; this one finds them, and takes their groups over with
    those of their jobs that are submitted before the first `poll`. Then its clock goes on from theirs.
    """

    def __init__(
        self,
        machine: LocalMachine,
        note: Callable[[str], None] = lambda _: None,
        listener: TlsListener | None = None,
        pool: type[WorkerPool] = WorkerPool,
        open_keeper: OpenKeeper | None = None,
    ) -> None:
        """`note` gets a line for each refused connection and lost worker. `listener`, of the same store, lets workers in over TCP
        too, and is closed with this. `pool` starts and finds the workers of this host; `open_keeper`: those of an engine's hosts.
        Raises ConfigError, CheckpointError.
        """
        self._machine, self._hosts_may_come = machine, listener is not None
        self._workers = workers = machine.output_dir / "workers"
        for directory in (machine.output_dir / "jobs", workers):
            durable.make_directory(directory)
        self._lock_file: int | None = lock_store(machine.output_dir)
        records = pool.read_records(workers)
        continues = bool(records) or bool(Leases(workers).withheld)
        epoch_started = begin_epoch(workers, continues=continues)
        self._start_unix = epoch_started.started_unix_seconds
        self._began = max(0.0, time.time() - self._start_unix) if continues else 0.0
        self._start = time.monotonic() - self._began
        self._next_tick = self._began + machine.tick_seconds
        self._nodes, self._drains = Nodes(workers), queue.SimpleQueue[tuple[str, bool, bool]]()
        self._events = self._nodes.see(own_events(machine, note)) + ([] if continues else self._nodes.begin())
        self.worker_pool = pool(workers, epoch_started.epoch, self._load, machine.gpus, machine.limits, note)
        if machine.deterministic:
            own = next(iter(machine.kinds), processor_here() if machine.device == "cpu" and machine.gpus else "")
            self.worker_pool.remote_hosts.kept_kind = KeptKind(workers, own, note)
        if listener is not None:
            self.worker_pool.listen_on(listener)
        there, hosts, labels = self.worker_pool, self.worker_pool.remote_hosts, self.worker_pool.remote_hosts.hosts
        self._engine_hosts = EngineHosts(there, open_keeper)
        wide = self._nodes, labels.on_one_host, machine.layout, note, lambda: self._engine_hosts.can_bring
        self._wide = WideGroups(*wide, labels.worker_of)
        self._wide.see_hosts(self._events)
        names = machine.base_models, self._start_worker, there.workers, epoch_started.epoch, there.record
        self.reconciler = Reconciler(*names, withheld=lambda: hosts.withheld, holder_of=labels.worker_of, bind=there.bind)
        self.reconciler.crash_attribution.recall(workers, note)
        self._found = continues
        self._asking = threading.Lock()  # of what follows, and of the jobs that are known
        self._arrives: dict[str, float] = {}  # job -> when it is submitted
        self._folded: dict[str, str] = {}  # the same jobs by their names without case
        self._asked = AskedQueue()
        self._ended: set[str] = set()  # jobs that may be forgotten
        self._expected: queue.SimpleQueue[tuple[str, JobSpec]] = queue.SimpleQueue()  # bases and jobs
        self._sealed = self._stopped = False
        self.more_to_come: Callable[[], bool] = lambda: False  # whether jobs that are not submitted yet may have trained here
        self.worker_pool.find(records)
        self._collect()
        self._engine_hosts.start()

    def __enter__(self) -> LocalBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let all workers checkpoint their jobs and exit; after 25 seconds they are killed."""
        if self._lock_file is not None:
            self._engine_hosts.drain()
            self.worker_pool.close(STOP_SECONDS)
            self._engine_hosts.close()
            if not (self.unfinished or self.more_to_come()) and (kept := self.worker_pool.remote_hosts.kept_kind) is not None:
                kept.forget()
            self._free_store()

    def abandon(self) -> None:
        """Leave as after a kill: all workers train on for their lease, and the next back end on this store finds them."""
        if self._lock_file is not None:
            self._engine_hosts.close()
            self.worker_pool.abandon()
            self._free_store()

    def _free_store(self) -> None:
        assert self._lock_file is not None
        os.close(self._lock_file)
        self._lock_file = None

    @property
    def address(self) -> str:
        """Where workers dial: `tlora worker --connect`."""
        return self.worker_pool.address

    @property
    def began_at_seconds(self) -> float:
        """The clock's time at the start of this back end: 0, or the age of the workers that it has adopted."""
        return self._began

    def stop(self) -> None:
        """Make `poll` end, with all jobs checkpointed and all workers ended. A signal handler may call it."""
        self._stopped = True
        self.worker_pool.wake()

    def follow(self, state: ClusterState) -> None:
        """Of the scheduler, which says what jobs that it has put aside lack, for an engine brings hosts for them, and what bases take."""
        self._engine_hosts.lacks, self._wide.cost = lambda: state.parked, state.cost

    @property
    def unfinished(self) -> int:
        """Jobs that have been submitted, or will be, and have not ended."""
        return len(self.reconciler.open) + len(self._asked.jobs)

    # -- what users ask ------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSubmitted, job: LocalJob, at_seconds: float | None = None) -> None:
        """Submit the job at that time on this back end's clock, or now. A time before this back end began means a submission to an earlier
        one: the job arrives now and keeps its place. Raises ConfigError for a job that cannot run here.
        """
        self._check(spec, job)
        if at_seconds is None:
            at_seconds = self.now()
        elif at_seconds < self._began:
            spec = replace(spec, submitted_at=at_seconds)
        with self._asking:
            twin = self._folded.get(spec.job_id.casefold())
            if twin is not None:
                raise ConfigError(
                    f"job {spec.job_id!r}: there is a job {twin!r} already; names must differ in more than case, as they are directories. "
                    "Rename one"
                )
            self._ask(spec, at_seconds)
            self.reconciler.jobs[spec.job_id] = replace(job, tokens_per_step=spec.profile.tokens_per_step)
            self._folded[spec.job_id.casefold()] = spec.job_id
            self._wide.see(spec)
            self._arrives[spec.job_id] = at_seconds

    def ask(self, request: JobRequest, at_seconds: float = 0.0) -> None:
        """At that time, or now. The last checkpoint of a job that is cancelled stays. Raises ConfigError for an unknown job."""
        with self._asking:
            if request.job_id not in self._arrives:
                raise ConfigError(f"unknown job {request.job_id!r}. Submit it first")
            self._ask(request, max(at_seconds, self._arrives[request.job_id]))

    def forget(self, job_id: str) -> None:
        """Forget a job that has ended, which frees its name. A job that has not ended stays known."""
        with self._asking:
            if job_id in self._ended:
                self._ended.discard(job_id)
                del self._arrives[job_id], self._folded[job_id.casefold()]
                self.reconciler.forget_job(job_id)

    def drain(self, host: str, *, finish: bool = False, undo: bool = False) -> None:
        """Leave a host: as `NodeDraining`; or take it back. Raises ConfigError for an unknown one."""
        self._nodes.check(host)
        self._drains.put((host, finish, undo))
        self.worker_pool.wake()

    def expect(self, base_model: str, spec: JobSpec) -> None:
        """The job will perhaps be submitted: if no worker has its base, start one on a free GPU that loads it."""
        self._expected.put((base_model, spec))
        self.worker_pool.wake()

    def seal(self) -> None:
        """No more jobs will be submitted: `poll` ends when all have ended. Until then it waits for more."""
        self._sealed = True
        self.worker_pool.wake()

    def _ask(self, request: JobSubmitted | JobRequest, at_seconds: float) -> None:
        if self._sealed and isinstance(request, JobSubmitted):
            raise ConfigError(f"job {request.job_id!r} comes after the back end was sealed. Submit all jobs before")
        self._asked.put(request, at_seconds)
        self.worker_pool.wake()

    def _check(self, spec: JobSubmitted, job: LocalJob) -> None:
        name, bases, there = spec.job_id, self._machine.base_models, len(self._machine.gpus)
        if job.spec.name != name:
            raise ConfigError(f"job {name!r} is submitted with the spec of {job.spec.name!r}. Give both the same name")
        if spec.gpus > there > 0 and not self._hosts_may_come:  # else a cluster has what its hosts bring
            raise ConfigError(
                f"job {name!r} asks for {spec.gpus} GPUs, and there {'are' if there > 1 else 'is'} {there} here. Ask for at most {there}"
            )
        if spec.base_model not in bases:
            raise ConfigError(f"job {name!r}: unknown base model {spec.base_model!r}. Name one of {', '.join(sorted(bases))}")

    # -- the back end's three verbs ------------------------------------------------------------------------------------

    def now(self) -> float:
        return time.monotonic() - self._start

    def poll(self) -> list[Event]:
        """Empty, with all workers ended, when it is stopped, or sealed and every job has arrived and ended.

        The caller must have recorded what the last call returned: only now workers may forget that they reported it.
        """
        if self._found:
            self._found = False
            self._adopt()
        while self._stopped or not self._events:
            if self._stopped or (self._sealed and self._asked.due_seconds == math.inf and not self.reconciler.open):
                self.close()
                return []
            self.worker_pool.acknowledge()  # the caller has got everything
            self._engine_hosts.tell()
            self.advance()
        found, self._events = self._events, []
        self.reconciler.crash_attribution.keep(self._workers)
        self._engine_hosts.see(*found)
        return found

    def advance(self) -> None:
        """Wait for a report, a user's request or the next tick; take in all that has arrived, and tell workers what follows. What the
        scheduler must know of it comes with the next `poll`.
        """
        self._listen()
        self._pass_time()
        self._settle()

    def execute(self, action: Action) -> None:
        self._engine_hosts.see(action)
        match action:
            case StartGroup(group):
                self._wide.begin(group)
                self._want(group)
            case ChangeGroup(group):
                if group.group_id in self.reconciler.groups:  # else it was lost, which the scheduler is about to hear
                    self._want(group)
            case StopGroup(group_id):
                self.reconciler.forget(group_id)
            case RejectJob(job_id):
                self.reconciler.withdraw(job_id)
                self._ended.add(job_id)
        self._settle()

    def _want(self, group: JobGroup) -> None:
        assert group.gpus, f"{group.group_id} is to run on no GPU"
        jobs, before = self.reconciler.jobs, self.reconciler.groups.get(group.group_id)
        orders = [jobs[name].spec.gpus for name in group.job_ids if name in jobs]
        group, kept = self._wide.keep(group, orders, before.gpus if before else ())
        self._events += [kept] if kept is not None else []
        self.reconciler.want(group)

    # -- what happens --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Wait for a report, a user's request or the next tick; then take in all that has arrived."""
        with self._asking:
            due = min(self._next_tick, self._asked.due_seconds)
        for worker, report in self.worker_pool.listen(max(0.0, min(due - self.now(), self._engine_hosts.due_in_seconds))):
            if report is None:
                given_up = f"{worker.given_up}; " if worker.given_up else ""
                self.reconciler.lose(worker, f"{given_up}the worker of {worker.display_name} {worker.process.how_it_ended()}")
            else:
                self.reconciler.hear(worker, report)

    def _adopt(self) -> None:
        """The groups of workers that were found go on with those of their jobs that are submitted by now; workers with other options than
        this machine's end.
        """
        places = FoundWorkers(self.worker_pool.workers.values())
        with self._asking:
            early = self._asked.jobs
        order, arrived = {name: number for number, name in enumerate(early)}, set[str]()
        for worker in self.worker_pool.workers.values():
            if worker.stopping:
                continue
            found = worker.found
            known = found is not None and found.base_model in self._machine.base_models
            if found is None or not known or worker.load != self._load(self._machine.base_models[found.base_model]):
                if worker.load is not None:
                    worker.stop(begins_anew=True)
                continue
            if not places.is_last(worker, found.group_id):
                continue
            taken = [name for name in found.job_ids if name in early and places.is_best(worker, name)]
            if taken:
                arrived.update(taken)
                names = tuple(sorted(taken, key=order.__getitem__))
                jobs = tuple(self._wide.admit(early.pop(name), found.gpus) for name in names)
                for name in names:
                    self.reconciler.arrive(name, again=True)
                weights = dict(zip(found.job_ids, found.weights, strict=True))
                group = replace(found, gpus=worker.gpus, job_ids=names, weights=tuple(weights[name] for name in names))
                self.reconciler.adopt(group)
                self._events.append(GroupFound(group, jobs, tuple(worker.jobs[name].steps for name in names)))
        with self._asking:
            self._asked.drop_jobs(arrived)
        self._tell([*self._nodes.begin(), Tick()])
        self._pass_time()  # before the first `listen`: a worker may report the end of a job that left its group
        self._settle()

    def _pass_time(self) -> None:
        now = self.now()
        self._collect()
        with self._asking:
            for event in itertools.islice(self._asked.take(now, self._admit, self.reconciler.open.__contains__), _ASKED_AT_ONCE):
                if isinstance(event, JobRequest) and event.verb == "cancel":
                    self.reconciler.withdraw(event.job_id)
                    self._ended.add(event.job_id)
                self._events.append(event)
        if self._next_tick <= now:
            self._events.append(Tick())
            self._next_tick = now + self._machine.tick_seconds

    def _admit(self, job: JobSubmitted) -> JobSubmitted:
        self.reconciler.arrive(job.job_id, again=job.submitted_at is not None)
        return self._wide.admit(job)

    def _settle(self) -> None:
        self.reconciler.step()
        while not self._expected.empty():
            cut = self._machine.layout == "stages" and (len(self._machine.gpus) > 1 or self._hosts_may_come)
            startable = () if cut else self._machine.gpus  # for one GPU the base would be loaded whole
            self.reconciler.expect(*self._expected.get(), startable)
            self.reconciler.step()  # which tells the worker
        self._collect()

    def _collect(self) -> None:
        self._ended.update(event.job_id for event in self.reconciler.events if isinstance(event, JobFinished | JobFailed))
        hosts, self.worker_pool.remote_hosts.events[:] = list(self.worker_pool.remote_hosts.events), []
        told = self._nodes.see(hosts)
        while not self._drains.empty():
            host, finish, undo = self._drains.get()
            told.append(self._nodes.take_back(host) if undo else self._nodes.drain(host, finish=finish))
        self._tell([*told, *self.reconciler.events])
        self.reconciler.events.clear()

    def _tell(self, events: list[Event]) -> None:
        """What jobs ask for on hosts that come or go is told before these: the scheduler places jobs at once."""
        self._events += [*self._wide.ask_anew(events, self.reconciler.open, self.reconciler.group_of_job), *events]

    def _load(self, base_model: str, group: JobGroup | None = None) -> Load:
        machine = self._machine
        place, stages = (base_model, str(machine.output_dir / "jobs"), machine.device, self._start_unix), self._wide.stages(group)
        return Load(*place, report_to=machine.report_to, calibrate=machine.calibrate, stages=stages, **settings_of(machine))

    def _start_worker(self, gpus: tuple[int, ...], base_model: str) -> None:
        worker = self.worker_pool.workers.get(gpus[0]) or self.worker_pool.start(gpus, base_model)
        if worker is not None:
            groups = self.reconciler.groups.values() if self._wide.cuts else ()
            group = next((group for group in groups if set(gpus) <= set(group.gpus)), None)
            worker.give(self._load(base_model, group))
