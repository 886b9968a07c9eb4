"""Jobs of a server: found by id or name, listed page by page, watched until they have ended."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import httpx

from tlora.api import EventList, EventView, JobList, JobView, Status, TenantJobList, TenantJobView
from tlora.client.connection import Connection
from tlora.errors import ServiceError

_ID = re.compile(r"job-[0-9a-f]{24}")
_PAGE = 100
_MOST_ALONE = 10  # jobs that are asked for one by one instead of by the page
_PATIENCE_SECONDS = 600.0  # that a server may be away while jobs are watched


def find_job(connection: Connection, name: str, likely: Sequence[Status] = ()) -> JobView:
    """By its id or its name; of several of that name the one whose status is `likely`, if only one has such. Raises ServiceError where
    there is none, or more than one.
    """
    if _ID.fullmatch(name):
        return connection.get(f"/v1/jobs/{name}", JobView)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name):
        raise ServiceError(f"{name!r} is no id and no name of a job. `tlora jobs` lists them", 404, "not_found")
    found = connection.get("/v1/jobs", JobList, name=name, limit=_PAGE).data
    if not found:
        raise ServiceError(f"there is no job {name!r}. `tlora jobs` lists those that there are", 404, "not_found")
    meant = [job for job in found if job.status in likely]
    if len(meant) == 1 and len(found) < _PAGE:
        return meant[0]
    if len(found) > 1:
        listed = ", ".join(f"{job.id} ({job.status})" for job in found[:5]) + (", …" if len(found) > 5 else "")
        raise ServiceError(f"{len(found)} jobs are named {name!r}: {listed}. Give an id", 409, "ambiguous")
    return found[0]


def find_start(connection: Connection, start: str) -> str:
    """What `start_from` of an order says of a job by id or name, whose adapter is continued, or of `JOB:checkpoint-STEP`. Raises
    ServiceError as `find_job`.
    """
    name, colon, checkpoint = start.partition(":")
    if colon and not re.fullmatch(r"checkpoint-[0-9]{1,12}", checkpoint):
        raise ServiceError(
            f"{start!r}: {checkpoint!r} is no checkpoint of a job. Write {name}:checkpoint-STEP, or {name} alone", 422, "start_from"
        )
    return find_job(connection, name, ("succeeded",)).id + colon + checkpoint


def list_jobs(connection: Connection, most: int | None, status: str | None = None, name: str | None = None) -> Iterator[JobView]:
    """The newest first, `most` of them, or all."""
    for page in connection.pages("/v1/jobs", JobList, most, status=status, name=name):
        yield from page.data


def list_all_jobs(
    connection: Connection, most: int | None, tenant: str | None = None, status: str | None = None, name: str | None = None
) -> Iterator[TenantJobView]:
    """Of all tenants, or of the one of that name, as `list_jobs`. Raises ServiceError for a key without the scope admin."""
    for page in connection.pages("/v1/tenants/jobs", TenantJobList, most, tenant=tenant, status=status, name=name):
        yield from page.data


def list_events(connection: Connection, job_id: str) -> Iterator[EventView]:
    """All of a job's, the oldest first."""
    for page in connection.pages(f"/v1/jobs/{job_id}/events", EventList, size=1000):
        yield from page.data


@dataclass(frozen=True, slots=True)
class Sight:
    """Jobs at one moment, in the order in which they are watched. `away`: why the server does not answer just now; the jobs are then
    as they were.
    """

    jobs: tuple[JobView, ...]
    away: str = ""


def watch(
    connection: Connection,
    ids: Sequence[str],
    every_seconds: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
    event_stream: EventStream | None = None,
) -> Iterator[Sight]:
    """A sight each `every_seconds`, the last one when all have ended. With an `event_stream` one at each event, and others only while jobs
    run. A server that is restarted meanwhile is waited for.
    """
    known: dict[str, JobView] = {}
    gone_since: float | None = None
    while True:
        try:
            known |= _look(connection, [job for job in ids if job not in known or not known[job].has_ended])
            gone_since, away = None, ""
        except ServiceError as error:
            if error.status and error.status < 500:
                raise
            now = time.monotonic()
            gone_since = now if gone_since is None else gone_since
            if not known or now - gone_since > _PATIENCE_SECONDS:
                raise
            away = str(error)
        sight = Sight(tuple(known[job] for job in ids), away)
        yield sight
        if all(job.has_ended for job in sight.jobs):
            return
        if event_stream is None:
            sleep(every_seconds)
        else:
            event_stream.wait(every_seconds, moves=bool(away) or any(job.status == "running" for job in sight.jobs))


def _look(connection: Connection, ids: Sequence[str]) -> dict[str, JobView]:
    if len(ids) <= _MOST_ALONE:
        return {job: connection.get(f"/v1/jobs/{job}", JobView) for job in ids}
    wanted, found = set(ids), dict[str, JobView]()
    for job in list_jobs(connection, most=None):  # the newest first: those that were just submitted
        if job.id in wanted:
            found[job.id] = job
            if len(found) == len(wanted):
                break
    return found | {job: connection.get(f"/v1/jobs/{job}", JobView) for job in wanted - found.keys()}


_AGAIN_SECONDS = 5.0  # before a stream that has ended is opened anew
_QUIET_SECONDS = 15.0  # that nothing is asked while no event comes and no job runs: the stream may have been cut unseen


class EventStream:
    """A thread that reads the stream of events of the key's tenant. A context manager.

    Where there is no stream (an older server, a proxy that holds it back, too many of them), `wait` only waits.
    """

    def __init__(self, connection: Connection, quiet_seconds: float = _QUIET_SECONDS, sleep: Callable[[float], None] = time.sleep) -> None:
        self._connection, self._quiet_seconds, self._sleep = connection, quiet_seconds, sleep
        self._rung, self._ended = threading.Event(), threading.Event()
        self._open = False

    def __enter__(self) -> EventStream:
        threading.Thread(target=self._listen, name="events", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()

    @property
    def is_open(self) -> bool:
        """Whether events come."""
        return self._open

    def wait(self, seconds: float, *, moves: bool) -> None:
        """Until an event comes, at most `seconds`; longer where nothing `moves` without an event."""
        if not self._open:
            self._sleep(seconds)
            return
        self._rung.wait(seconds if moves else max(seconds, self._quiet_seconds))
        self._rung.clear()

    def _listen(self) -> None:
        while not self._ended.is_set():
            try:
                self._read()
            except ServiceError as error:
                if 400 <= error.status < 500:  # it will not be had
                    return
            except (httpx.HTTPError, RuntimeError):  # cut off, or the connection has been closed
                pass
            finally:
                self._open = False
                self._rung.set()  # what came of it is asked for
            self._ended.wait(_AGAIN_SECONDS)

    def _read(self) -> None:
        with self._connection.stream("/v1/events/stream") as answer:
            for line in answer.iter_lines():
                if self._ended.is_set():
                    return
                if line.startswith(": open"):
                    self._open = True
                    self._rung.set()  # what happened before it was open has no event here
                elif line.startswith("data:"):
                    self._rung.set()
