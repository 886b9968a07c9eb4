"""The loop over micro-batches: it obeys commands between two of them, and runs one group with its files.

Each report of the group goes to its job's recorder. A run in one process, a rank of a run and a worker differ in what they make of
commands (`Jobs`): the jobs of a run are all known before (`session.py`), those of a worker come and go (`trainer.py`).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tlora.adapters.state import AdapterState
from tlora.batching.pack import MicroBatch
from tlora.engine.job_opening import open_run, refuse
from tlora.engine.messages import Stop
from tlora.group.engine import Engine
from tlora.group.exchange import Exchange
from tlora.group.isolation import Failure, try_call
from tlora.group.job_run import JobRun
from tlora.group.pipeline import Pipeline
from tlora.group.reports import Computed, Ended, Listener, Noted, Report, Status
from tlora.job import JobSpec
from tlora.kernels.device import ToHost, mark_on
from tlora.objectives import compares_with_start
from tlora.planning.planned_job import PlannedJob
from tlora.store.checkpoint import read_reference
from tlora.store.job_result import JobResult
from tlora.store.metrics import Tracker
from tlora.store.recorder import Outcome, Recorder, RunContext
from tlora.store.serving import ServingFiles
from tlora.supermodel.supermodel import SuperModel


class Records:
    """Receives a group's reports. `ending`: jobs after their last step whose files are being written; `results`: those that have ended."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._recorders: dict[str, Recorder] = {}
        self.ending: dict[str, Future[Outcome]] = {}
        self.results: dict[str, JobResult] = {}

    def add(self, name: str, recorder: Recorder) -> None:
        """Call before the job joins."""
        self._recorders[name] = recorder

    def drop(self, name: str) -> None:
        """The job does not join after all: it has no result."""
        self._recorders.pop(name).drop()

    def hand_over(self, name: str) -> None:
        """A job that was finished before does not join; its adapter is exported once more."""
        self.ending[name] = self._recorders[name].hand_over()

    def listen(self, report: Report) -> None:
        match report:
            case Noted(line):
                self._note(line)
            case Computed():
                pass
            case Ended(name, _, status, reason, None):
                self._end(name, status, reason)
            case Ended(name):
                self.ending[name] = self._recorders[name].end(report)
            case _:
                self._recorders[report.job_id].listen(report)

    def see_ended(self, *, wait: bool = False) -> None:
        """Set the results of the jobs in `ending` whose files are written by now, or, with `wait`, of all of them."""
        errors: list[BaseException] = []
        for name, written in list(self.ending.items()):
            if wait or written.done():
                error = written.exception()
                del self.ending[name]  # last: an interrupted wait begins anew
                if error is None:
                    self._end(name, *written.result())
                else:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _end(self, name: str, status: Status, reason: str) -> None:
        self.results[name] = self._recorders.pop(name).result(status, reason)
        if status == "failed":
            self._note(f"{name} failed: {reason}")
        elif status == "done" and (why := self.results[name].reason):
            self._note(f"{name}: {why}")


@dataclass(frozen=True)
class ReadyJob:
    """A job that can join, with its state on the host."""

    run: JobRun
    state: AdapterState


@dataclass(frozen=True)
class RunPaths:
    """A run's output. `mark` is called with a job's directory once it is made; trackers are those of `report_to`."""

    output_dir: Path
    serving: ServingFiles
    report_to: Sequence[str] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])  # by job: what its sweep varies
    mark: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True)
class FilesWritten:
    """A command of the writing threads: files of some job are written, or could not be."""


class Jobs(Protocol):
    """What becomes of the commands that `Driver.train` takes from its inbox."""

    def obey(self, command: Any) -> None: ...

    def turn(self) -> bool:
        """Called when all commands are obeyed: what else is due. True where it has taken its time, and is to be called again before
        anything is waited for.
        """
        ...

    def look(self, packed: MicroBatch | None) -> None:
        """Called after each micro-batch, and with None in the end."""
        ...


class Driver:
    """The group and the records of its jobs. `waited_seconds`: with jobs here and nothing that its device could do for them, as other
    ranks had not sent their parts.
    """

    def __init__(
        self,
        model: SuperModel,
        context: RunContext,
        places: RunPaths,
        token_budget: int,
        longest: int = 1,
        exchange: Exchange | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """`longest`: tokens of the longest sample of any job that may still join. `exchange`, `pipeline`: see `Engine`."""
        self._context, self._places = context, places
        self.listener: Listener = lambda _: None  # hears each report after the records have
        self.records = Records(context.note)
        self.group = Engine(model, token_budget, self._listen, longest, exchange=exchange, pipeline=pipeline)
        self.waited_seconds = 0.0

    def open(self, job: PlannedJob, resume: bool, start: Future[AdapterState] | None = None) -> ReadyJob:
        """Prepare a job for joining; may be called from any thread. Raises as `open_run` does."""
        places, name, note = self._places, job.spec.name, self._context.note
        directory = places.output_dir / name
        run, state = open_run(job, self.group.model.bank.sum_dtype, directory, resume, note, start)
        assert job.data is not None, f"{name} was opened without data"
        places.mark(directory)
        places.serving.write(directory, job.spec, job.data.report, note)
        return ReadyJob(run, state)

    def let_in(self, opened: ReadyJob, wait: Callable[[str], object] | None = None) -> None:
        """The job joins the group; one that was finished before hands its adapter over once more; one without a recorder is refused. With
        `wait`, one for which there is no memory now is left out again (`Engine.join`).
        """
        run, name = opened.run, opened.run.spec.name
        recorder = try_call(self._record, run)
        if isinstance(recorder, Failure):
            self.refuse(run.spec, recorder.reason)
            return
        self.records.add(name, recorder)
        if run.progress.finished:
            self.records.hand_over(name)
        else:
            self.group.join(run, opened.state, wait and partial(self._leave_out, name, wait))

    def _leave_out(self, name: str, wait: Callable[[str], object], reason: str) -> None:
        self.records.drop(name)
        wait(reason)

    def follow(self, job: PlannedJob) -> JobRun:
        """Compute the replicas here of a job that another rank leads, which has its files."""
        assert job.data is not None, f"{job.spec.name} was opened without data"
        run = JobRun(job.spec, job.data.train, None, job.replicas, job.weights, job.held)
        if job.layout is not None and compares_with_start(job.spec):
            directory, dtype = self._places.output_dir / job.spec.name, self.group.model.bank.sum_dtype
            run.reference = partial(read_reference, directory, job.layout, dtype)
        self.group.join(run)
        return run

    def refuse(self, spec: JobSpec, reason: str) -> None:
        """Record the failure of a job that cannot join."""
        name, places = spec.name, self._places
        self._context.reserve.ended(name)
        self.records.results[name] = refuse(spec, places.output_dir / name, reason, places.settings.get(name, {}), self._context.note)

    def train(self, inbox: queue.SimpleQueue[Any], jobs: Jobs) -> None:
        """One micro-batch after another, until `inbox` has a Stop, or None. What comes there before goes to `jobs`.

        In the end all jobs are checkpointed and their files written, also after an error, but not after KeyboardInterrupt.
        """
        try:
            while not self.group.decisions.stop(not self._obey(inbox, jobs)):
                packed = self.group.run_micro_batch()
                self.records.see_ended()
                jobs.look(packed)
        except KeyboardInterrupt:
            raise
        except BaseException:
            self._stop()
            raise
        self._stop()
        jobs.look(None)

    def _obey(self, inbox: queue.SimpleQueue[Any], jobs: Jobs) -> bool:
        """What has come since the last micro-batch; with nothing to compute, wait for something. False: stop."""
        group = self.group
        while True:
            while not inbox.empty():
                if not self._heard(inbox.get(), jobs):
                    return False
            again = jobs.turn()
            if group.runs and not group.idle:
                return True
            if not again:
                command, seconds = wait_for(inbox, mark_on(group.model.device))
                self.waited_seconds += seconds if group.runs else 0.0
                if not self._heard(command, jobs):
                    return False

    def _heard(self, command: Any, jobs: Jobs) -> bool:
        if command is None or isinstance(command, Stop):
            return False
        if isinstance(command, FilesWritten):
            self.records.see_ended()
        else:
            jobs.obey(command)
        return True

    def close(self, *, wait: bool = True) -> None:
        """End the writing, with `wait` after all files are written, and free the reserved disk space."""
        if wait:
            self._context.writer.close()
        self._context.reserve.close()

    def _stop(self) -> None:
        try:
            self.group.stop()
        finally:
            self.records.see_ended(wait=True)

    def _record(self, run: JobRun) -> Recorder:
        places, name = self._places, run.spec.name
        directory = places.output_dir / name
        tracker = Tracker(places.report_to, run.spec, directory, self._context.note, run.progress.step)
        return Recorder(run, directory, self._context, tracker, places.settings.get(name, {}))

    def _listen(self, report: Report) -> None:
        self.records.listen(report)
        self.listener(report)


_T = TypeVar("_T")
_DEVICE_SECONDS = 0.001  # between two looks at the device


def wait_for(inbox: queue.SimpleQueue[_T], given: ToHost) -> tuple[_T, float]:
    """The next of `inbox`, and for how many seconds the device had nothing left to do by then; `given` is behind all that it was given.

    Raises what the device fails with.
    """
    while not given.done:
        try:
            return inbox.get(timeout=_DEVICE_SECONDS), 0.0
        except queue.Empty:
            continue
    idle_since = time.monotonic()
    return inbox.get(), time.monotonic() - idle_since
