"""What a worker does with its GPU: loads a base once and trains the jobs that its commands add and remove.

Commands come through a queue (`messages.py`), reports go to a function (`worker_protocol.py`); which jobs train together is decided
elsewhere, and `worker.py` receives the commands. Of a worker with several GPUs this is one rank, and `ranks/spanning_jobs.py` has what it
shares with the others. A job joins and leaves between two micro-batches; meanwhile its data and state are prepared, and files written.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tlora import durable
from tlora.data.dataset import find_damage
from tlora.data.prepare import Prepared, open_sets, prepare
from tlora.data.request import prepare_requests
from tlora.engine.background_calibration import calibrate_in_background
from tlora.engine.driver import Driver, FilesWritten, ReadyJob, RunPaths
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import Fetched, Leave, Meet, Note, Published, Sent, SetPlan, Spread
from tlora.engine.ranks.spanning_jobs import Planned, RankContext, SpanningJobs
from tlora.engine.ranks.worker_stages import cut_for, open_pipeline
from tlora.engine.worker_base import WorkerMemory, load_base
from tlora.errors import DataError
from tlora.group.isolation import Failure, try_call
from tlora.group.reports import Ended
from tlora.group.reports import Report as GroupReport
from tlora.group.reports import Stepped as GroupStepped
from tlora.job import JobSpec, RunSpec
from tlora.link.flight import FlightRecorder
from tlora.link.job_lease import HeldError, JobLease, take_claim
from tlora.link.log import note
from tlora.planning.job_plan import plan_job
from tlora.store.fingerprint import BaseGuard
from tlora.store.full_disk import ROOM_ON_DISK, Backoff, DiskReserve, retry_when_disk_full
from tlora.store.job_result import JobResult
from tlora.store.recorder import RunContext
from tlora.store.run_directory import pin_data
from tlora.store.run_recovery import check_same_base, write_base_file
from tlora.store.serving import ServingFiles
from tlora.store.writer import Writer
from tlora.supermodel.base_name import public_name
from tlora.supermodel.cpu_dtype import settle_dtype
from tlora.supermodel.load import find_directory
from tlora.wording.numbers import gib, place_names, quantity
from tlora.worker_protocol import Delayed, Failed, Finished, Join, Joined, Left, Load, Loaded, Memory, Refused, Report, Stepped

REPORT_SECONDS = 1.0  # between two reports of a job's steps
CLAIM_SECONDS = 30.0  # for a job's previous worker to release its directory
STARTING_BUDGET = 1024  # tokens, until a Share says otherwise


@dataclass(frozen=True)
class _Prepared:
    """The data of a job that wants to join is there, or cannot be had."""

    join: Join
    data: Prepared | DataError


@dataclass(frozen=True)
class _Ready:
    """A job that can join, or why it cannot: never, or now."""

    spec: JobSpec
    opened: ReadyJob | Failure | HeldError


_Told = Join | Leave | SetPlan | Spread | Meet | Note | Planned | _Prepared | _Ready


class Trainer:
    """`driver.Jobs` of a worker: what is resident, what is on its way in, and the two ends of the line."""

    def __init__(
        self,
        load: Load,
        inbox: queue.SimpleQueue[Any],
        send: Callable[[Any], None],
        heartbeat: Heartbeat | None = None,
        rank_context: RankContext | None = None,
        expected: Sequence[JobSpec] = (),
    ) -> None:
        """`heartbeat` gets what this is at, and says when the process is to end. `rank_context`: among the ranks of a worker; `send`
        then also gets what is for these. For `expected`, jobs that may join first, kernels are compiled while the base is loaded.
        """
        rank_context = rank_context or RankContext()
        dtype, line = settle_dtype(load.base_model, load.dtype, load.device, rank_context.slow_dtypes)
        if line and rank_context.number == 0:
            note(line)
        load = replace(load, dtype=dtype)
        self._load, self._inbox, self._send = load, inbox, send
        self._parts = SpanningJobs(rank_context, send, None if load.deterministic else time.monotonic)
        self._heartbeat = heartbeat or Heartbeat()
        self._backoff = Backoff(self._heartbeat.beat, self._heartbeat.ending, note, lambda name: send(Delayed(name, ROOM_ON_DISK)))
        self._directory, began = Path(load.output_dir), time.monotonic()
        self._cut = cut_for(load, rank_context, expected)
        model, bound = load_base(load, expected, self._cut.limits if self._cut is not None else self._parts.shared_load, note)
        note(f"{load.base_model} is loaded after {time.monotonic() - began:.1f} s")
        self._limits = " and ".join(dict.fromkeys(map(gib, bound.limits)))
        send(Memory(bound.limits[-1:]))
        clock: Callable[[], float] = lambda: time.time() - load.started_unix_seconds  # noqa: E731
        writer, reserve = Writer(lambda: inbox.put(FilesWritten())), DiskReserve(self._directory, {}, note)
        self._serving = ServingFiles(load.base_model)
        self._claims: dict[str, JobLease] = {}
        durable.make_directory(self._directory)
        self._flight = FlightRecorder(self._directory, rank_context.flight)
        options: Any = {"fence": self._check_claim, "wait_for_room": self._backoff, "base_precision": load.base_precision}
        context = RunContext(load.base_name or public_name(load.base_model), clock, note, reserve, writer, **options)
        pipeline = open_pipeline(self._cut, model, send) if self._cut is not None else None
        self._base = {"base_model": context.base_model, **BaseGuard(load.base_model, find_directory(load.base_model), None).facts()}
        paths = RunPaths(self._directory, self._serving, load.report_to, mark=partial(write_base_file, facts=self._base))
        self._driver = Driver(model, context, paths, STARTING_BUDGET, exchange=self._parts.exchange, pipeline=pipeline)
        self._driver.listener = self._listen
        self._group, self._records = self._driver.group, self._driver.records
        self._memory = WorkerMemory(bound, self._group, load.recompute, SetPlan(STARTING_BUDGET), self._cut and self._cut.tokens)
        self._calibration = calibrate_in_background(load, model, self._memory.has_room_for, send)
        self._group.stream.begin = self._begin
        self._preparing: dict[str, Join] = {}
        self._opening: set[str] = set()
        self._unwanted: set[str] = set()  # of those: removed before they had joined
        self._paces: dict[str, StepTimer] = {}
        self._reported = 0.0
        self._has_computed = self._has_stepped = False
        send(Loaded(whole=model.base.layers is None and self._cut is None))

    def go_on(self) -> None:
        """Train until stopped; then all jobs have been checkpointed."""
        try:
            self._driver.train(self._inbox, self)
        finally:
            try:
                self._calibration.close()
            finally:
                self._driver.close()  # the process exits without a look at its threads
                self._tell_ended()
        self._flight.close()

    def _begin(self, jobs: tuple[str, ...]) -> None:
        self._heartbeat.in_flight = jobs
        self._flight.begin(jobs)

    def look(self, packed: object) -> None:
        self._has_computed = True
        self._has_stepped |= any(not run.is_lead for run in self._group.runs.values())  # whose steps another rank reports
        self._heartbeat.begin("training")
        self._tell_steps()
        self._tell_ended()

    def turn(self) -> bool:
        self._tell_ended()
        calibrated = self._calibrate()
        if self._group.runs and not self._group.idle:
            self._heartbeat.begin("training" if self._has_computed else "compiling")  # the first micro-batch of all compiles what it needs
        elif not calibrated:
            self._heartbeat.begin("waiting")
        return calibrated

    def _calibrate(self) -> bool:
        """Make a turn of the measurement, where it is time for one: never before the first step of jobs that are here or on their way."""
        beside_jobs = bool(self._group.runs)
        on_their_way = self._preparing or self._opening or self._parts.expects_jobs
        if not (self._has_stepped if beside_jobs else not on_their_way) or not self._calibration.is_due(beside_jobs=beside_jobs):
            return False
        self._heartbeat.begin("compiling")
        self._calibration.turn(self._begin, beside_jobs=beside_jobs)
        return True

    def obey(self, command: _Told) -> None:
        match command:
            case Join() as join:
                self._take(join)
            case _Prepared(join, data):
                if self._preparing.get(join.job.name) is join:  # it has not left meanwhile
                    del self._preparing[join.job.name]
                    self._opening.add(join.job.name)
                    threading.Thread(target=self._open, args=(join, data), daemon=True).start()
            case _Ready(spec, opened):
                self._let_in(spec, opened)
            case Leave(name):
                if not self._parts.unfollow(name, self._driver):
                    self._let_go(name)
            case SetPlan() as share:
                self._memory.share = share
                self._memory.apply_share()
            case Spread(join, span) if self._parts.is_home(span):
                self._parts.spread(command)
                self._take(join)
            case Spread() as follow:
                self._parts.follow(follow)
                threading.Thread(target=self._plan_part, args=(follow,), daemon=True).start()
            case Planned(follow, planned):
                self._parts.planned(follow, planned)
            case Meet():
                self._calibration.step_aside()  # a part of a job may join
                self._heartbeat.begin("waiting")  # for the other ranks: what they are at has limits of its own
                if (opened := self._parts.meet(command, self._driver)) is not None:
                    self._begin_with(opened)
            case Published() | Fetched() | Sent():
                self._parts.exchange.hear(command)

    def _take(self, join: Join) -> None:
        name = join.job.name
        here = {*self._preparing, *self._opening, *self._group.runs, *self._records.ending}
        assert name not in here and not self._parts.is_here(name), f"{name} is here already"
        self._preparing[name] = join
        threading.Thread(target=self._prepare, args=(join,), daemon=True).start()

    # -- coming --------------------------------------------------------------------------------------------------------

    def _prepare(self, join: Join) -> None:
        """In a thread of its own: the sets that were made before, or, where there are none, a process that makes them."""
        data = try_call(self._data_of, join)
        self._inbox.put(_Prepared(join, DataError(data.reason) if isinstance(data, Failure) else data))

    def _plan_part(self, follow: Spread) -> None:
        """In a thread of its own, of a job that is led by another rank."""
        data = try_call(self._data_of, follow.join)
        found = DataError(data.reason) if isinstance(data, Failure) else data
        self._inbox.put(Planned(follow, plan_job(follow.join.job, found, self._group.model, self._directory)))

    def _data_of(self, join: Join) -> Prepared | DataError:
        (request,) = prepare_requests(pin_data(self._run_of(join.job)), self._group.model.base.vocab_size)
        train_set, eval_set = (
            Path(path) if path and find_damage(Path(path), request.vocab_size) is None else None for path in (join.train_set, join.eval_set)
        )
        if train_set is not None and (eval_set is not None or not request.data.eval_path):
            return open_sets(request, train_set, eval_set)
        if join.train_set is not None:  # where its owner keeps and removes what is made of its data
            request = replace(request, cache_dir=Path(join.train_set).parent, keep_unfinished=False)
        return prepare([request])[request.key]

    def _run_of(self, spec: JobSpec) -> RunSpec:
        """The job's order as a file of its own would have it."""
        load = self._load
        return RunSpec(base_model=load.base_model, output_dir=load.output_dir, deterministic=load.deterministic, jobs=[spec])

    def _put_off(self, name: str, reason: str) -> None:
        """The job cannot join now: it has too little memory. No other job is affected."""
        others = quantity(len(self._group.runs.keys() - {name}), "other job")
        self._send(Delayed(name, f"memory for its adapter, next to {others} on its {place_names(self._load.device)[0]}"))
        self._paces.pop(name, None)
        self._let_end(name)
        self._send(Refused(name, reason))

    def _check_claim(self, directory: Path) -> None:
        """Raises HeldError where another worker may be writing there."""
        claim = self._claims.get(directory.name)
        if claim is None:
            raise HeldError(f"{directory.name} was let go. Nothing more is written")
        claim.check()

    def _let_end(self, name: str) -> None:
        """The job's attempt is over here: its directory and its parts are let go."""
        self._parts.end(name)
        if (claim := self._claims.pop(name, None)) is not None:
            claim.release()

    def _open(self, join: Join, data: Prepared | DataError) -> None:
        """In a thread of its own, which has the job's directory to itself until the job is in, or refused, or has been let go."""
        spec = join.job
        claim = retry_when_disk_full(
            spec.name, lambda: take_claim(self._directory, spec.name, join.attempt, CLAIM_SECONDS), self._wait_while_wanted
        )
        if isinstance(claim, Failure):
            self._inbox.put(_Ready(spec, claim.error if isinstance(claim.error, HeldError) else claim))
            return
        self._claims[spec.name] = claim
        self._inbox.put(_Ready(spec, retry_when_disk_full(spec.name, lambda: self._open_claimed(spec, data), self._wait_while_wanted)))

    def _wait_while_wanted(self, name: str, error: OSError) -> bool:
        return name not in self._unwanted and self._backoff(name, error)

    def _open_claimed(self, spec: JobSpec, data: Prepared | DataError) -> ReadyJob:
        check_same_base(self._directory / spec.name, self._base)
        planned = plan_job(spec, data, self._group.model, self._directory)
        planned.span = self._parts.span_of(spec.name)
        self._memory.check(planned)
        if self._cut is not None and planned.layout is not None and (why := self._cut.why_not(planned.longest, planned.layout)):
            planned.problems.append(why)
        for warning in planned.said():
            note(f"{spec.name}: {warning}")
        opened = self._driver.open(planned, True)
        assert planned.data is not None, f"{planned.spec.name} was opened without data"
        for line in self._serving.warn([(planned.spec, planned.data.report)]):
            note(line)
        return opened

    def _let_in(self, spec: JobSpec, opened: ReadyJob | Failure | HeldError) -> None:
        name = spec.name
        self._opening.discard(name)
        if name in self._unwanted:
            self._unwanted.discard(name)
            self._let_end(name)
            self._send(Left(name, 0, None))
        elif isinstance(opened, HeldError):
            self._send(Delayed(name, "the worker that has trained it to let go of it"))
            self._let_end(name)
            self._send(Refused(name, str(opened)))
        elif isinstance(opened, Failure):
            self._driver.refuse(spec, opened.reason)
        elif not self._memory.fits(opened.run):
            limits = f"below memory_limit ({self._limits})"
            self._put_off(name, f"next to {', '.join(self._group.runs)} its memory does not suffice {limits}")
        elif not self._parts.waits(opened):
            self._begin_with(opened)

    def _begin_with(self, opened: ReadyJob) -> None:
        name = opened.run.spec.name
        self._paces[name] = StepTimer(opened.run.progress.step, self._training_clock)
        if self._calibration.resident and not self._memory.has_room_for([*self._calibration.resident, opened.run]):
            self._calibration.step_aside()
        self._memory.apply_share(opened.run)
        self._driver.let_in(opened, partial(self._put_off, name))
        if name in self._group.runs:  # and not at its end already
            self._send(Joined(name, opened.run.progress.step))

    # -- staying -------------------------------------------------------------------------------------------------------

    def _listen(self, report: GroupReport) -> None:
        self._has_stepped |= isinstance(report, GroupStepped | Ended)
        if isinstance(report, Ended):
            self._paces[report.job_id].see(report.progress.step, self._training_clock)
            self._tell_pace(report.job_id)

    def _tell_steps(self) -> None:
        now = time.monotonic()
        own = {name: run for name, run in self._group.runs.items() if run.is_lead}
        for name, run in own.items():
            self._paces[name].see(run.progress.step, self._training_clock)
        if now - self._reported >= REPORT_SECONDS:
            self._reported = now
            for name in own:
                self._tell_pace(name)

    @property
    def _training_clock(self) -> float:
        """A clock that stops while the measurement computes, so that the reported pace of jobs excludes it."""
        return time.monotonic() - self._calibration.spent_seconds

    def _tell_pace(self, name: str) -> None:
        pace = self._paces[name].take()
        if pace is not None:
            self._send(Stepped(name, *pace))

    # -- going ---------------------------------------------------------------------------------------------------------

    def _tell_ended(self) -> None:
        """Jobs whose files are written."""
        for name in list(self._records.results):
            self._paces.pop(name, None)
            self._let_end(name)
            self._send(_last_report(self._records.results.pop(name)))

    def _let_go(self, name: str) -> None:
        if self._preparing.pop(name, None) is not None or self._parts.give_up(name) is not None:
            self._let_end(name)
            self._send(Left(name, 0, None))
        elif name in self._opening:
            self._unwanted.add(name)
        elif name in self._group.runs:
            self._group.leave(name)


def _last_report(result: JobResult) -> Report:
    if result.status == "done":
        return Finished(result.name, asdict(result))
    if result.status == "failed":
        return Failed(result.name, result.reason)
    checkpoint = Path(result.path) / f"checkpoint-{result.steps}"
    return Left(result.name, result.steps, str(checkpoint) if checkpoint.is_dir() else None)


class StepTimer:
    """How long a job's optimizer steps take, from one report to the next; the clock is the caller's. `steps` were through at `now` seconds,
    when the job joined.
    """

    def __init__(self, steps: int, now: float) -> None:
        self._told, self._told_at = steps, now
        self._steps, self._at = steps, now

    def see(self, steps: int, now: float) -> None:
        """The job has taken `steps` steps by `now`; the time counts from the change of the number."""
        if steps != self._steps:
            self._steps, self._at = steps, now

    def take(self) -> tuple[int, float] | None:
        """Steps in all, and the mean seconds of each since the last call; None without new steps."""
        if self._steps == self._told:
            return None
        report = self._steps, (self._at - self._told_at) / (self._steps - self._told)
        self._told, self._told_at = self._steps, self._at
        return report
