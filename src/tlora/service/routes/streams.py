"""What flows out of a job: events (JSON, or server-sent), metrics, log lines and the adapter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse
from sqlalchemy import Connection, Row
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from tlora.api import ENDED, EventList, LogText, MetricList, OrderSpec
from tlora.service.access import caller_of
from tlora.service.archives import entries_of, stream_tar, tar_bytes
from tlora.service.database import file_rows, job_rows
from tlora.service.keys import Caller
from tlora.service.order_reader import in_tenants_words
from tlora.service.problems import RefusedError
from tlora.service.routes.jobs import REFUSALS, Cursor, JobId
from tlora.service.services import Services, event_view, services_of

router = APIRouter(prefix="/v1", tags=["streams"], responses=REFUSALS)
EventLimit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[int | None, Query(ge=0, le=2**62, description="The id of the last event that is known.")]
LastEventId = Annotated[str | None, Header(max_length=20, pattern="^[0-9]{1,18}$")]
_ALIVE_SECONDS = 2.0  # between two looks whether the key is still good
_COMMENT_EVERY = 5  # of these looks a comment keeps proxies from closing the stream
_PAGE = 500
_MOST_METRIC_BYTES = 1 << 20
_MOST_LOG_BYTES = 4 << 20
_SSE: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}
_UNBUFFERED = {"X-Accel-Buffering": "no"}  # nginx would hold events back
_TAR: dict[int | str, dict[str, Any]] = {200: {"content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}}}}


@router.get("/events")
def list_events(request: Request, limit: EventLimit = 100, cursor: Cursor = None, after: After = None) -> EventList:
    """Of all of the tenant's jobs, the oldest first."""
    return _events(request, None, limit, cursor, after)


@router.get("/jobs/{job_id}/events")
def list_job_events(job_id: JobId, request: Request, limit: EventLimit = 100, cursor: Cursor = None, after: After = None) -> EventList:
    """Of one job, the oldest first."""
    _find(request, job_id)
    return _events(request, job_id, limit, cursor, after)


def _events(request: Request, job: str | None, limit: int, cursor: str | None, after: int | None) -> EventList:
    services, tenant = services_of(request), caller_of(request).tenant
    kind = f"events {job or ''}"
    start = services.cursors.read(tenant, kind, cursor)
    start = start if start is not None else after or 0
    rows = services.read(lambda connection: job_rows.list_events(connection, tenant, job, start, limit + 1))
    shown, more = rows[:limit], len(rows) > limit
    following = services.cursors.make(tenant, kind, shown[-1].serial) if more else None
    return EventList(data=[event_view(row) for row in shown], has_more=more, next_cursor=following)


@router.get("/events/stream", response_class=StreamingResponse, responses=_SSE)
async def stream_events(request: Request, after: After = None, last_event_id: LastEventId = None) -> StreamingResponse:
    """Of all of the tenant's jobs from now on, or from after an event on, until the client goes."""
    start = int(last_event_id) if last_event_id else after
    if start is None:
        start = await run_in_threadpool(lambda: services_of(request).read(job_rows.last_event))
    return _stream(request, None, start)


@router.get("/jobs/{job_id}/events/stream", response_class=StreamingResponse, responses=_SSE)
async def stream_job_events(job_id: JobId, request: Request, after: After = None, last_event_id: LastEventId = None) -> StreamingResponse:
    """Of one job from its beginning, or from after an event on, until the job has ended."""
    await run_in_threadpool(_find, request, job_id)
    return _stream(request, job_id, int(last_event_id) if last_event_id else after or 0)


def _stream(request: Request, job: str | None, after: int) -> StreamingResponse:
    services, caller = services_of(request), caller_of(request)
    found = _Counted(_server_sent(services, caller, job, after), media_type="text/event-stream", headers=_UNBUFFERED)
    found.room = partial(services.stream_of, caller)
    return found


class _Counted(StreamingResponse):
    """A stream that takes its room before its status is sent: of a burst those above the limit are refused, and none is cut."""

    room: Callable[[], AbstractAsyncContextManager[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.room():
            await super().__call__(scope, receive, send)


async def _server_sent(services: Services, caller: Caller, job: str | None, after: int) -> AsyncIterator[str]:
    """Events as they are committed. Ends with the job, or within seconds after the key is revoked."""
    looks = 0
    yield ": open\n\n"
    while await run_in_threadpool(services.still_valid, caller):
        rows = await run_in_threadpool(services.read, partial(_next_events, caller.tenant, job, after))
        for row in rows:
            after = row.serial
            yield f"id: {row.serial}\nevent: {row.kind}\ndata: {event_view(row).model_dump_json()}\n\n"
            if job is not None and row.kind in ENDED:
                return
        if not rows and job is not None and await run_in_threadpool(services.read, partial(_has_ended, caller.tenant, job)):
            rows = await run_in_threadpool(services.read, partial(_next_events, caller.tenant, job, after))
            if not rows:  # its last event was known to the client before
                return
            continue  # it has ended between the two looks
        if not rows:
            await services.notifier.wait(_ALIVE_SECONDS)
            looks += 1
            if looks % _COMMENT_EVERY == 0:
                yield ": alive\n\n"
    yield 'event: end\ndata: {"reason": "the key was revoked"}\n\n'


def _has_ended(tenant: str, job: str, connection: Connection) -> bool:
    return job_rows.find_job(connection, tenant, job).ended is not None


def _next_events(tenant: str, job: str | None, after: int, connection: Connection) -> Sequence[Row[Any]]:
    return job_rows.list_events(connection, tenant, job, after, _PAGE)


@router.get("/jobs/{job_id}/metrics")
def read_metrics(job_id: JobId, request: Request, offset: Annotated[int, Query(ge=0, le=2**62)] = 0) -> MetricList:
    """Rows of the job's metrics from byte `offset` of their file on, 1 MiB at most; ask on with `next_offset`."""
    row = _find(request, job_id)
    content = _tail(_directory(services_of(request), row.id) / "metrics.jsonl", offset, _MOST_METRIC_BYTES)
    whole = content[: content.rfind(b"\n") + 1]
    return MetricList(data=[json.loads(line) for line in whole.splitlines() if line.strip()], next_offset=offset + len(whole))


@router.get("/jobs/{job_id}/logs")
def read_logs(job_id: JobId, request: Request) -> LogText:
    """What workers said of this job, and its events in words."""
    services, tenant = services_of(request), caller_of(request).tenant
    row, directory = _find(request, job_id), services.config.directory
    events = services.read(lambda connection: job_rows.newest_events(connection, tenant, job_id, 1000))
    lines = [f"{row.kind}: {row.message}" for row in events]
    for log in sorted((directory / "workers").glob("*.log")):
        lines += _lines_of(job_id, log)
    said = services.read(lambda connection: in_tenants_words(connection, directory, row, "\n".join(lines)))
    return LogText(lines=said.split("\n"))


def _lines_of(job_id: str, log: Path) -> Iterator[str]:
    """Those that begin with the job's id: a worker's log is shared by tenants."""
    size = log.stat().st_size
    for line in _tail(log, max(0, size - _MOST_LOG_BYTES), _MOST_LOG_BYTES).decode("utf-8", "replace").splitlines():
        if line.startswith((f"{job_id}:", f"{job_id} ")):
            yield line


@router.get("/jobs/{job_id}/adapter", response_class=StreamingResponse, responses=_TAR)
def download_adapter(job_id: JobId, request: Request) -> StreamingResponse:
    """The adapter of a job that has succeeded, with its tokenizer and model card, as a tar."""
    services, caller = services_of(request), caller_of(request)
    row = _find(request, job_id)
    if row.status != "succeeded" or row.removed is not None:
        state = "was removed" if row.removed is not None else f"is {row.status}"
        remedy = "Wait until it has succeeded" if row.status not in ENDED else "Clone it to train it again"
        raise RefusedError(409, "no_adapter", f"job {job_id!r} {state} and has no adapter. {remedy}")
    names = services.read(partial(_tenants_names, services, row))
    entries = entries_of(_directory(services, row.id), row.name, row.base_model, names)
    headers = {"Content-Length": str(tar_bytes(entries)), "Content-Disposition": f'attachment; filename="{row.name}.tar"'}
    return StreamingResponse(_while_valid(services, caller, stream_tar(entries)), media_type="application/x-tar", headers=headers)


def _tenants_names(services: Services, row: Row[Any], connection: Connection) -> dict[str, str]:
    """What the tenant calls the job and what it was made of, by the names that these have on this machine."""
    order = OrderSpec.model_validate(row.order)
    paths = file_rows.paths_of(connection, services.config.directory, row.tenant, order.data.file_ids)
    names = {path.name: file_rows.name_of(connection, file) for file, path in paths.items()}
    start = job_rows.row_of(connection, order.start_job) if order.start_job else None
    if start is not None:
        names[start.id] = start.name
    return names | {Path(services.bases.get(row.base_model, "")).name: row.base_model, row.id: row.name}


async def _while_valid(services: Services, caller: Caller, chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Cut within seconds after the key is revoked: the length is then wrong, and the client sees it."""
    async with services.stream_of(caller):
        while services.ring.is_valid(caller.key_id):
            chunk = await asyncio.to_thread(next, chunks, None)
            if chunk is None:
                return
            yield chunk


def _find(request: Request, job_id: str) -> Any:
    return services_of(request).read(lambda connection: job_rows.find_job(connection, caller_of(request).tenant, job_id))


def _directory(services: Services, job_id: str) -> Path:
    return services.config.directory / "jobs" / job_id


def _tail(path: Path, offset: int, most: int) -> bytes:
    """At most so many bytes from `offset` on; none of a file that is not there yet."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(most)
    except FileNotFoundError:
        return b""
