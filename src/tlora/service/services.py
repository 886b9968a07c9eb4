"""What the routes work with, how they wait for a write, and rows of the store as what the API answers with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request
from sqlalchemy import Engine, Row

from tlora.api import EventView, FileView, JobView, KeyView, NewKeyView, OrderSpec, Scope
from tlora.progress.view import logged_values
from tlora.report.rows import read_rows
from tlora.service.config import ServerConfig
from tlora.service.connections import Connections
from tlora.service.database.writer import Operation, Together, Writer
from tlora.service.keys import SCOPES, Caller, KeyRing, NewKey
from tlora.service.live_state import LiveState
from tlora.service.problems import RefusedError
from tlora.service.request_log import Answered, RequestLog, RequestNumbers
from tlora.service.signed import BrowserSessions, Cursors
from tlora.service.storage import Storage

if TYPE_CHECKING:
    from tlora.service.controller import Controller

_METRIC_BYTES = 1 << 18  # about a thousand rows: 3 ms, and among them the last evaluation


def file_view(row: Row[Any]) -> FileView:
    return FileView(id=row.id, bytes=row.bytes, created_at=int(row.created), filename=row.filename, purpose=row.purpose, sha256=row.sha256)


def job_view(
    row: Row[Any],
    steps: int | None = None,
    waiting_for: str | None = None,
    order: OrderSpec | None = None,
    queue_place: tuple[int | None, float | None] = (None, None),
) -> JobView:
    """`steps`: newer than the row's, if they are known; `order`: the row's, where it has been read; `queue_place`: as in `LiveState`."""
    intake: Mapping[str, Any] = row.intake or {}
    return JobView.model_construct(
        id=row.id,
        name=row.name,
        status=row.status,
        base_model=row.base_model,
        created_at=row.created,
        started_at=row.started,
        ended_at=row.ended,
        steps=max(row.steps, steps or 0),
        total_steps=intake.get("profile", {}).get("steps"),
        waiting_for=waiting_for,
        queue_place=queue_place[0],
        estimated_start=queue_place[1],
        reason=row.reason or None,
        warnings=intake.get("warnings", []),
        deadline_missed=deadline_missed(row.created, row.ended, row.order.get("deadline_seconds")),
        sweep=row.sweep,
        cloned_from=row.cloned_from,
        order=order or OrderSpec.model_validate(row.order),
        result=row.result,
    )


def deadline_missed(created: float, ended: float | None, seconds: float | None) -> bool:
    """Whether a job had not ended, or has not by now, `seconds` after it was accepted."""
    return seconds is not None and created + seconds < (ended or time.time())


def event_view(row: Row[Any]) -> EventView:
    return EventView(id=row.serial, job=row.job, created_at=row.time, kind=row.kind, message=row.message, data=row.data)


def key_view(row: Row[Any]) -> KeyView:
    scopes: list[Scope] = [scope for scope in SCOPES if scope in row.scopes.split()]
    return KeyView(id=row.id, tenant=row.tenant_name, name=row.name, scopes=scopes, created_at=row.created, revoked_at=row.revoked)


def new_key_view(made: NewKey, tenant_name: str) -> NewKeyView:
    return NewKeyView(id=made.id, tenant=tenant_name, name=made.name, scopes=list(made.scopes), created_at=made.created, key=made.secret)


T = TypeVar("T")


class Notifier:
    """Wakes whoever streams events. `ring` may be called in any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def attach(self) -> None:
        """In the loop whose tasks will wait."""
        self._loop = asyncio.get_running_loop()

    def ring(self) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Until it rings, or `seconds` have passed."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            return


@dataclass
class Services:
    """One server's parts. `streams` counts the open ones of each tenant; `bases` are names and paths that orders may name."""

    config: ServerConfig
    engine: Engine
    writer: Writer
    ring: KeyRing
    cursors: Cursors
    live: LiveState
    job_controller: Controller
    notifier: Notifier
    bases: dict[str, str]
    browser_sessions: BrowserSessions
    storage: Storage
    connections: Connections
    log: RequestLog
    numbers: RequestNumbers = field(default_factory=RequestNumbers)
    streams: dict[str, int] = field(default_factory=dict[str, int])
    began: float = field(default_factory=time.time)

    def see(self, answered: Answered) -> None:
        """The answer to a request begins. Operators read of tenants by their names."""
        answered = answered._replace(tenant=self.ring.name_of(answered.tenant))
        self.numbers.see(answered)
        self.log.see(answered)

    async def write(self, operation: Operation[T] | Together[T], then: Callable[[T], None] = lambda _: None) -> T:
        """The operation's value, once it is on the disk. `then` gets it before the caller, and also where the caller is cancelled
        meanwhile: what is committed is announced.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[T] = loop.create_future()

        def deliver(done: Future[T]) -> None:
            error = done.exception()
            try:
                if error is None:
                    then(done.result())
            except Exception as failed:
                error = failed
                if waiter.cancelled():
                    logging.getLogger(__name__).exception("what was written could not be announced")
            if waiter.cancelled():
                return
            if error is None:
                waiter.set_result(done.result())
            else:
                waiter.set_exception(error)

        def hand_over(done: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(deliver, done)

        self.writer.submit(operation).add_done_callback(hand_over)
        return await waiter

    def read(self, query: Operation[T]) -> T:
        """In the calling thread."""
        with self.engine.connect() as connection:
            return query(connection)

    def view(self, row: Row[Any], order: OrderSpec | None = None) -> JobView:
        """As the job stands now; `order` is the row's, where it has been read."""
        live = self.live
        return job_view(row, live.steps(row.id), live.waiting_for(row.id, row.status), order, live.queue_place(row.id, row.status))

    def trained_view(self, row: Row[Any]) -> JobView:
        """`view` with the job's losses: its result's, or without one those in the last `_METRIC_BYTES` of its metrics."""
        found = row.result or {}
        if not found and row.started is not None:
            logged = logged_values(read_rows(self.config.directory / "jobs" / row.id / "metrics.jsonl", _METRIC_BYTES))
            found = {"train_loss": logged.get("loss"), "eval_loss": logged.get("eval_loss")}
        return self.view(row).model_copy(update={key: found.get(key) for key in ("train_loss", "eval_loss")})

    @asynccontextmanager
    async def stream_of(self, caller: Caller) -> AsyncIterator[None]:
        """Room for one stream. Raises RefusedError 429 where the tenant has as many as it may."""
        count, most = self.streams.get(caller.tenant, 0), self.config.limits.streams
        if count >= most:
            raise RefusedError(429, "too_many_streams", f"{count} streams of this tenant are open, and {most} may be; close one")
        self.streams[caller.tenant] = count + 1
        try:
            yield
        finally:
            self.streams[caller.tenant] -= 1

    def still_valid(self, caller: Caller) -> bool:
        """Whether the caller's key has not been revoked, as of two seconds ago at most."""
        return self.ring.is_valid(caller.key_id)


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services), services
    return services
