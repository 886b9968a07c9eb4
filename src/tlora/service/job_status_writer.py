"""What follows from the cluster's reports (`live_jobs.py`), carried out: in the store by compare-and-set, and in the live picture."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, update

from tlora import durable
from tlora.api import OPEN
from tlora.cluster.controller import Backend
from tlora.json_file import read_object
from tlora.protocol import Action, Event, GroupFound, StepsDone, Tick
from tlora.service.database import job_rows
from tlora.service.database.tables import jobs
from tlora.service.database.writer import Operation, StoreError, Writer
from tlora.service.live_jobs import ChangeStatus, Effect, EndJob, LiveJobs, ShowSteps
from tlora.service.live_state import LiveState
from tlora.service.machine import Devices
from tlora.service.waiting_queue import QueuePlace
from tlora.wording.numbers import quantity

ANEW = "Clone the job to train it anew; if that fails too, ask the server's operator"
_PART = re.compile(r"(?<=[.;]) +")
_NOT_THEIRS = re.compile(
    r"(?<!\w)--[a-z]|\boutput_dir\b|\bspace there\b|\bfor this user\b|\bits file system\b"
    r"|\b(TLORA|OMP)_[A-Z]|\btaskset\b|\brun\.json\b|\bjobs file\b"
    r"|\b[Rr]esume (the run|with)\b|\bwith resume\b|\b[Pp]ut (it|that|the [a-z ]+) back\b|\bRemove this checkpoint\b"
)


def in_service_words(reason: str) -> str:
    """What is wrong stays, and remedies that a tenant can follow; `ANEW` takes the place of the others."""
    first, *rest = _PART.split(reason)
    kept = [part for part in rest if not _NOT_THEIRS.search(part)]
    if len(kept) == len(rest):
        return reason
    return f"{' '.join([first, *kept]).rstrip(' .;')}. {ANEW}"


_SHOW_SECONDS = 0.5  # between two pictures: with thousands of jobs one takes milliseconds
_SETTLE_SECONDS = 30.0  # for the store to take an end: far below a worker's lease, far above a full disk's answer
_STEPS_SECONDS = 10.0  # between two writes of all jobs' steps
_NOT_SHOWN = ("path", "settings", "name", "sweep_of", "status", "reason")  # of a result: the job has these itself


class Recorded:
    """A cluster whose reports are in the store before it is asked for more: workers forget only what the store has."""

    def __init__(
        self,
        cluster: Backend,
        settle: Callable[[], None],
        begin: Callable[[Collection[str]], None],
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """`begin` is called with the jobs of the groups that were found, before anything else is reported; `look` when all that was
        reported has been decided on.
        """
        self._cluster, self._settle, self._begin, self._look = cluster, settle, begin, look
        self._begun = False
        self.now, self.execute = cluster.now, cluster.execute

    def poll(self) -> list[Event]:
        self._look()
        self._settle()
        events = self._cluster.poll()
        if not self._begun:
            self._begun = True
            self._begin({job_id for event in events if isinstance(event, GroupFound) for job_id in event.group.job_ids})
        return events


class JobStatusWriter:
    """Any thread may call it: requests and intake tell of jobs too. `forget` is called with each job that has ended."""

    def __init__(self, directory: Path, writer: Writer, live: LiveState, forget: Callable[[str], None]) -> None:
        self._directory, self._writer, self._live, self._forget = directory, writer, live, forget
        self._lock = threading.Lock()
        self._places: Devices | None = None
        self._jobs = LiveJobs()
        self._queue: Mapping[str, QueuePlace] = {}  # as the policy foresaw it last
        self._told: dict[str, int] = {}  # steps as last written
        self._shown = self._written = 0.0
        self._shows_later = False
        self._again: list[Operation[Any]] = []  # what the store could not take yet
        self._last_write: Future[Any] | None = None

    def begin(self, places: Devices) -> None:
        self._places = places
        self._show(at_once=True)

    def requeue(self, found: Collection[str] = ()) -> None:
        """What ran before does not run now, but for the jobs that workers were found with; until they are, jobs are shown as they were.
        Steps that no server has heard of are those of the checkpoints.
        """
        gone = (jobs.c.status == "running", jobs.c.id.not_in(found))

        def requeue(connection: Connection) -> None:
            names = connection.execute(update(jobs).where(*gone).values(status="queued").returning(jobs.c.id)).scalars().all()
            job_rows.set_steps(connection, {name: durable.newest_step(self._directory / "jobs" / name) for name in names})

        self._write(requeue)

    # -- of jobs that are on their way ---------------------------------------------------------------------------------

    def reading(self, job_id: str, rows: int, share: float) -> None:
        """Its data is being read."""
        self._jobs.lacking.pop(job_id, None)
        self._jobs.reading[job_id] = f"its data is being read: {rows:,} rows, {share:.0%}"
        self._show()

    def wait_for(self, job_id: str, what: str) -> None:
        """It cannot be read, or trained, until the server has that."""
        self._jobs.lacking[job_id] = what
        self._show()

    def read_again(self, job_id: str) -> None:
        """What was made of its data before is gone."""
        self._change(job_id, ("queued", "running"), "preparing", "what was made of its data is gone, so that it is read again")

    def read(self, job_id: str) -> None:
        """Its data has been read."""
        self._jobs.reading.pop(job_id, None)
        self._jobs.lacking.pop(job_id, None)
        self._show()

    def fail(self, job_id: str, reason: str) -> None:
        """With no path of this machine in the reason, and nothing that a database refuses: a reason may quote what stands in a file."""
        reason = _storable(reason.replace(f"{self._directory}/", "").strip()) or "no reason was given"
        self._write(lambda connection: job_rows.change(connection, job_id, OPEN, "failed", reason, reason=reason))
        self._live.count("failed")
        self.ended(job_id)

    def ended(self, job_id: str) -> None:
        """By its owner or by itself."""
        self._jobs.end(job_id)
        if (steps := self._live.steps(job_id)) is not None and steps != self._told.get(job_id):
            self._write_steps({job_id: steps})
        self._told.pop(job_id, None)
        self._live.forget(job_id)
        self._forget(job_id)
        self._show()

    # -- of the cluster ------------------------------------------------------------------------------------------------

    def see(self, item: Event | Action) -> None:
        for effect in self._jobs.see(item):
            self._carry_out(effect)
        if isinstance(item, StepsDone) and self._live.steps(item.job_id) is None:
            self._write_steps({item.job_id: int(item.steps)})  # it was cancelled: its last ones, as its worker lets it go
        if isinstance(item, StepsDone | Tick):
            self._flush_steps()
        if isinstance(item, Tick):
            self._retry()
        self._show()

    def see_queue(self, queue: Mapping[str, QueuePlace]) -> None:
        """The policy's own order of those that wait."""
        self._queue = queue
        self._show()

    def settle(self) -> None:
        """Wait until all that was seen is in the store, or the store has refused it; what it refused is tried again. One that does not
        answer stops the cluster no longer than its workers bear: what it loses when the server is killed then, workers' files still tell.
        """
        if self._last_write is not None:
            with suppress(TimeoutError):
                self._last_write.exception(_SETTLE_SECONDS)

    def flush(self) -> None:
        """Before the end."""
        self._flush_steps(at_once=True)
        self._retry()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case ChangeStatus(job_id, before, status, message, starts):
                self._change(job_id, before, status, message, **({"started": func.coalesce(jobs.c.started, time.time())} if starts else {}))
            case ShowSteps(job_id, steps):
                self._live.see_steps(job_id, steps)
            case EndJob(job_id, "succeeded"):
                self._finish(job_id)
            case EndJob(job_id, "failed", reason):
                self.fail(job_id, in_service_words(reason))
            case EndJob(job_id):
                self.ended(job_id)

    def _finish(self, job_id: str) -> None:
        try:
            result = read_object(self._directory / "jobs" / job_id / "result.json")
        except (OSError, ValueError):  # the adapter stands; its numbers are lost
            result = {}
        shown = {key: value for key, value in result.items() if key not in _NOT_SHOWN}
        steps = int(result.get("steps", self._live.steps(job_id) or 0))
        self._change(job_id, OPEN, "succeeded", f"trained {quantity(steps, 'step')}", result=shown, steps=steps)
        self._live.count("succeeded")
        self.ended(job_id)

    # -- into the store ------------------------------------------------------------------------------------------------

    def _change(self, job_id: str, before: tuple[str, ...], status: str, message: str, **values: Any) -> None:
        self._write(lambda connection: job_rows.change(connection, job_id, before, status, message, **values))

    def _write(self, operation: Operation[Any]) -> None:
        """Without waiting; what a full disk refuses is tried again."""

        def see(future: Future[Any]) -> None:
            error = future.exception()
            if isinstance(error, StoreError):
                with self._lock:
                    self._again.append(operation)
            elif error is not None:
                logging.getLogger(__name__).error("the end or change of a job is lost", exc_info=error)
                self._live.count("lost_write")

        with self._lock:
            written = self._last_write = self._writer.submit(operation)
        written.add_done_callback(see)

    def _retry(self) -> None:
        with self._lock:
            again, self._again = self._again, []
        for operation in again:
            self._write(operation)

    def _flush_steps(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self._written < _STEPS_SECONDS and not at_once:
            return
        self._written = now
        steps = {job: count for job, count in self._live.all_steps().items() if count != self._told.get(job)}
        if steps:
            self._told |= steps
            self._write_steps(steps)

    def _write_steps(self, steps: dict[str, int]) -> None:
        self._write(lambda connection: job_rows.set_steps(connection, steps))

    def _show(self, at_once: bool = False) -> None:
        """Now, or as soon as half a second has passed since the last time: what has changed meanwhile is not left out."""
        now = time.monotonic()
        if self._places is None:
            return
        if now - self._shown < _SHOW_SECONDS and not at_once:
            with self._lock:
                if not self._shows_later:
                    self._shows_later = True
                    later = threading.Timer(self._shown + _SHOW_SECONDS - now, self._show_later)
                    later.daemon = True
                    later.start()
            return
        self._shown = now
        self._live.show(self._jobs.snapshot(self._places, self._queue))

    def _show_later(self) -> None:
        with self._lock:
            self._shows_later = False
        self._show(at_once=True)


def _storable(text: str) -> str:
    """Without the zero characters and lone surrogates that PostgreSQL, SQLite and UTF-8 have no place for."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
