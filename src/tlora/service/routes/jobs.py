"""Jobs: ordered, listed, shown, paused, resumed, cancelled, cloned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import ValidationError
from sqlalchemy import Connection, Row

from tlora.api import CloneOrder, JobList, JobView, Name, OrderSpec, Status, Sweep, SweepOrder, TenantJobList, TenantJobView
from tlora.errors import ConfigError
from tlora.manifest import MANIFEST
from tlora.protocol import JobRequest
from tlora.service.access import caller_of
from tlora.service.database import job_rows
from tlora.service.database.answer_rows import Answer, find_answer, hash_orders, keep_answers
from tlora.service.database.writer import Together
from tlora.service.keys import new_id
from tlora.service.order_reader import Accepted, start_path
from tlora.service.orders import describe, expand_sweep
from tlora.service.problems import ErrorBody, RefusedError
from tlora.service.services import Services, services_of

REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody} for code in (400, 401, 403, 404, 408, 409, 413, 421, 422, 429, 500, 503)
}
router = APIRouter(prefix="/v1", tags=["jobs"], responses=REFUSALS)

JobId = Annotated[str, Path(min_length=1, max_length=64, pattern="^[a-z0-9-]+$", description="The job's id.")]
# Printable ASCII, as a header can carry it.
IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=255, pattern="^[!-~]+$")]
Limit = Annotated[int, Query(ge=1, le=100)]
Cursor = Annotated[str | None, Query(min_length=1, max_length=100)]


@router.post("/jobs", status_code=201, response_model=JobView)
async def order_job(order: OrderSpec, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """Accept one job. It is on the disk when this is answered."""
    services = services_of(request)
    return await accept(services, request, [order], job_rows.Origin(), idempotency_key)


@router.post("/sweeps", status_code=201, response_model=Sweep)
async def order_sweep(order: SweepOrder, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """Accept a job for each combination of values: all of them, or none."""
    services = services_of(request)
    orders = expand_sweep(order, services.config.limits.sweep_jobs)
    return await accept(services, request, orders, job_rows.Origin(sweep=new_id("sweep")), idempotency_key)


async def accept(services: Services, request: Request, orders: list[OrderSpec], origin: job_rows.Origin, key: str | None) -> Response:
    """The orders as jobs, exactly once; then the controller is told."""
    for order in orders:
        check_order(services, order)
    tenant = caller_of(request).tenant
    for order in orders:
        check_checkpoint(services, tenant, order)
    payload = ""
    if key is not None:
        payload = hash_orders(f"{request.method} {request.url.path}", orders)
    asked = _Asked(services, job_rows.Batch(tenant, orders, origin), key, payload)
    done = await services.write(Together(_insert, asked), lambda done: announce(services, done.made))
    return Response(done.answer.body, done.answer.status, media_type="application/json")


@dataclass(frozen=True, slots=True)
class _Asked:
    """`payload` tells requests of one `key` apart."""

    services: Services
    batch: job_rows.Batch
    key: str | None
    payload: str


@dataclass(frozen=True, slots=True)
class _Done:
    """`made` is empty where the request repeats one that was answered before."""

    answer: Answer
    made: Sequence[Accepted] = ()


class _SameKeyError(Exception):
    """Of two requests of one key the second is answered from what the first has left in the store: they cannot be done together."""


def _insert(connection: Connection, requests: Sequence[_Asked]) -> list[_Done | Exception]:
    """What each is answered. All that wait to be written are given at once: most of what one alone costs is the same for hundreds."""
    keys = [(asked.batch.tenant, asked.key) for asked in requests if asked.key is not None]
    if len(set(keys)) < len(keys):
        raise _SameKeyError
    found = [_known(connection, asked) for asked in requests]
    new = [asked for asked, known in zip(requests, found, strict=True) if known is None]
    inserted = job_rows.insert_batches(connection, [asked.batch for asked in new], requests[0].services.config.limits) if new else []
    done = [rows if isinstance(rows, RefusedError) else _done(asked, rows) for asked, rows in zip(new, inserted, strict=True)]
    kept = [
        (asked.batch.tenant, asked.key, asked.payload, one.answer)
        for asked, one in zip(new, done, strict=True)
        if asked.key is not None and isinstance(one, _Done)
    ]
    keep_answers(connection, kept)
    following = iter(done)
    return [known or next(following) for known in found]


def _known(connection: Connection, asked: _Asked) -> _Done | RefusedError | None:
    if asked.key is None:
        return None
    try:
        answer = find_answer(connection, asked.batch.tenant, asked.key, asked.payload)
    except RefusedError as error:
        return error
    return None if answer is None else _Done(answer)


def _done(asked: _Asked, rows: Sequence[Row[Any]]) -> _Done:
    batch = asked.batch
    views = [asked.services.view(row, order) for row, order in zip(rows, batch.orders, strict=True)]
    found = views[0] if batch.origin.sweep is None else Sweep.model_construct(id=batch.origin.sweep, data=views)
    made = [Accepted(row, order) for row, order in zip(rows, batch.orders, strict=True)]
    return _Done(Answer(201, found.model_dump_json()), made)


def announce(services: Services, made: Sequence[Accepted]) -> None:
    """Tell the controller of jobs that were committed; a repeated request has made none."""
    if made:
        services.job_controller.accepted(made)


def check_order(services: Services, order: OrderSpec) -> None:
    """What can be said without the store. Raises RefusedError."""
    if services.live.draining:
        raise RefusedError(503, "draining", "the server is being drained and accepts no jobs; send the order again when it is back")
    if order.base_model not in services.bases:
        known = ", ".join(sorted(services.bases)) or "none so far: the operator adds one with POST /v1/bases"
        raise RefusedError(400, "unknown_base", f"base_model {order.base_model!r}: is not served here. There are: {known}", "base_model")
    most = services.config.limits.rank
    largest = max(order.largest_rank, order.r)
    if largest > most:
        raise RefusedError(400, "rank_too_large", f"r: {largest} is more than this server's {most}. Order a smaller rank", "r")
    there = services.live.gpus
    if order.gpus > there > 0:
        raise RefusedError(400, "too_many_gpus", f"gpus: {order.gpus} is more than this server's {there}. Set at most {there}", "gpus")
    services.job_controller.check(order)


def check_checkpoint(services: Services, tenant: str, order: OrderSpec) -> None:
    """That the checkpoint is there from which it starts, if it starts from one. Raises RefusedError."""
    job_id = order.start_job
    if job_id is None or order.start_from is None or order.start_from == job_id:
        return
    services.read(lambda connection: job_rows.find_job(connection, tenant, job_id))
    if not (start_path(services.config.directory, order.start_from) / MANIFEST).is_file():
        message = (
            f"start_from {order.start_from!r}: there is no such checkpoint now. GET /v1/fine_tuning/jobs/{job_id}/checkpoints lists them"
        )
        raise RefusedError(404, "not_found", message, "start_from")


_Read = Callable[[Connection, int | None], Sequence[Row[Any]]]


def _list(request: Request, kind: str, limit: int, cursor: str | None, read: _Read) -> tuple[Sequence[Row[Any]], bool, str | None]:
    """`limit` rows of a list from `cursor` on, of those that `read` finds before a serial number; whether there are more; their cursor."""
    services, tenant = services_of(request), caller_of(request).tenant
    before = services.cursors.read(tenant, kind, cursor)
    rows = services.read(lambda connection: read(connection, before))
    shown, more = rows[:limit], len(rows) > limit
    return shown, more, services.cursors.make(tenant, kind, shown[-1].serial) if more else None


@router.get("/jobs")
def list_jobs(
    request: Request, limit: Limit = 20, cursor: Cursor = None, status: Status | None = None, name: Annotated[Name | None, Query()] = None
) -> JobList:
    """The newest first."""
    services, own = services_of(request), caller_of(request).tenant
    shown, more, cursor = _list(
        request, "jobs", limit, cursor, lambda connection, before: job_rows.list_jobs(connection, own, before, limit + 1, status, name)
    )
    return JobList.model_construct(data=[services.trained_view(row) for row in shown], has_more=more, next_cursor=cursor)


@router.get("/tenants/jobs")
def list_all_jobs(
    request: Request,
    limit: Limit = 20,
    cursor: Cursor = None,
    status: Status | None = None,
    name: Annotated[Name | None, Query()] = None,
    tenant: Annotated[Name | None, Query()] = None,
) -> TenantJobList:
    """Of all tenants, or of the one of that name, the newest first. A key with the scope admin is needed."""
    services = services_of(request)
    newest = partial(job_rows.list_all_jobs, tenant_name=tenant, count=limit + 1, status=status, name=name)
    shown, more, cursor = _list(request, "all jobs", limit, cursor, lambda connection, before: newest(connection, before=before))
    views = [TenantJobView.model_construct(**dict(services.trained_view(row)), tenant=row.tenant_name) for row in shown]
    return TenantJobList.model_construct(data=views, has_more=more, next_cursor=cursor)


@router.get("/jobs/{job_id}")
def show_job(job_id: JobId, request: Request) -> JobView:
    services = services_of(request)
    return services.trained_view(services.read(lambda connection: job_rows.find_job(connection, caller_of(request).tenant, job_id)))


Change = Callable[[Connection, str, str, str], Row[Any]]


async def _change(request: Request, change: Change, asked: JobRequest) -> JobView:
    services, caller = services_of(request), caller_of(request)
    row = await services.write(
        lambda connection: change(connection, caller.tenant, asked.job_id, caller.words), lambda _: services.job_controller.asked(asked)
    )
    return services.view(row)


@router.post("/jobs/{job_id}/pause")
async def pause_job(job_id: JobId, request: Request) -> JobView:
    """The job checkpoints, leaves its GPU and waits for `resume`. One that is paused stays so."""
    return await _change(request, job_rows.pause, JobRequest(job_id, "hold"))


@router.post("/jobs/{job_id}/resume")
async def resume_job(job_id: JobId, request: Request) -> JobView:
    """A paused job goes on from its checkpoint."""
    return await _change(request, job_rows.resume, JobRequest(job_id, "release"))


@router.post("/jobs/{job_id}/cancel")
async def cancel_job(job_id: JobId, request: Request) -> JobView:
    """The job ends; its checkpoints stay."""
    return await _change(request, job_rows.cancel, JobRequest(job_id, "cancel"))


@router.post("/jobs/{job_id}/clone", status_code=201, response_model=JobView)
async def clone_job(job_id: JobId, changes: CloneOrder, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
    """A new job with the same order, but for what is `set`."""
    services, tenant = services_of(request), caller_of(request).tenant
    row = services.read(lambda connection: job_rows.find_job(connection, tenant, job_id))
    order = changed_order(row.order, changes.set)
    return await accept(services, request, [order], job_rows.Origin(cloned_from=job_id), idempotency_key)


def changed_order(order: dict[str, Any], changes: dict[str, Any]) -> OrderSpec:
    """Raises ConfigError for changes that give no order."""
    data = changes.get("data", {})
    if not isinstance(data, dict):
        raise ConfigError(f"set.data: {data!a} is not a mapping of keys such as max_length")
    merged = order | changes | {"data": order["data"] | data}
    try:
        return OrderSpec.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(describe(error)) from None
