"""What runs where and why the rest waits; health, readiness and numbers for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from pydantic import BaseModel, ConfigDict
from sqlalchemy import func, select

from tlora.service.access import caller_of
from tlora.service.database.tables import jobs
from tlora.service.routes.jobs import REFUSALS
from tlora.service.services import Services, services_of
from tlora.service.views import ClusterView, GroupView, WaitingView

router = APIRouter(responses=REFUSALS)
_TEXT = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


class DrainOrder(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    draining: bool


class Drained(BaseModel):
    """Whether new orders are refused, and how many jobs have not ended."""

    draining: bool
    open_jobs: int


@router.get("/v1/cluster", tags=["cluster"])
def show_cluster(request: Request) -> ClusterView:
    """Groups on their GPUs and the queue. Of other tenants' jobs only numbers are shown."""
    services, tenant = services_of(request), caller_of(request).tenant
    picture = services.live.picture
    query = select(jobs.c.id, jobs.c.name, jobs.c.status).where(jobs.c.tenant == tenant, jobs.c.ended.is_(None)).order_by(jobs.c.serial)
    rows = services.read(lambda connection: connection.execute(query).all())
    own = {row.id for row in rows}
    in_groups = {job for group in picture.groups for job in group.job_ids}
    groups = [
        GroupView(
            id=group.group_id,
            base_model=group.base_model,
            gpus=list(group.gpus),
            token_budget=group.plan.token_budget,
            jobs=[job for job in group.job_ids if job in own],
            other_jobs=sum(job not in own for job in group.job_ids),
        )
        for group in picture.groups
    ]
    reasons = ((row, services.live.waiting_for(row.id, row.status)) for row in rows)
    return ClusterView(
        device=picture.device,
        gpus=list(picture.gpus),
        groups=groups,
        waiting=[WaitingView(job=row.id, name=row.name, reason=reason) for row, reason in reasons if reason is not None],
        others_waiting=len({*picture.waiting, *picture.reading} - own - in_groups),
        draining=services.live.draining,
    )


@router.put("/v1/drain", tags=["cluster"])
def drain(order: DrainOrder, request: Request) -> Drained:
    """Refuse new orders, or accept them again; what was accepted is trained."""
    services = services_of(request)
    services.live.draining = order.draining
    return show_drain(request)


@router.get("/v1/drain", tags=["cluster"])
def show_drain(request: Request) -> Drained:
    """Changes nothing: another operator may have decided meanwhile."""
    services = services_of(request)
    query = select(func.count()).where(jobs.c.ended.is_(None))
    return Drained(draining=services.live.draining, open_jobs=services.read(lambda connection: connection.execute(query).scalar_one()))


@router.get("/healthz", response_class=PlainTextResponse, tags=["health"])
async def healthz() -> str:
    """That the process answers."""
    return "ok\n"


@router.get("/readyz", response_class=PlainTextResponse, tags=["health"])
def readyz(request: Request) -> Response:
    """Whether jobs are accepted and scheduled: the store answers and can be written, and the controller runs."""
    services = services_of(request)
    try:
        services.read(lambda connection: connection.execute(select(1)).scalar_one())
    except Exception as error:
        return PlainTextResponse(f"the database does not answer: {type(error).__name__}\n", 503)
    for fault in (services.live.fault, services.writer.problem):
        if fault is not None:
            return PlainTextResponse(f"{fault}\n", 503)
    return PlainTextResponse("ready\n")


@router.get("/metrics", response_class=PlainTextResponse, tags=["health"])
def metrics(request: Request) -> Response:
    """For Prometheus; a key with the scope admin is needed."""
    return PlainTextResponse(_numbers(services_of(request)), media_type="text/plain; version=0.0.4; charset=utf-8")


def _numbers(services: Services) -> bytes:
    """In a registry of its own: one process may run several servers, as the tests do."""
    registry = CollectorRegistry()
    by_status = Gauge("tlora_jobs", "Jobs in the store.", ["status"], registry=registry)
    query = select(jobs.c.status, func.count()).group_by(jobs.c.status)
    for status, count in services.read(lambda connection: connection.execute(query).all()):
        by_status.labels(status).set(count)
    picture = services.live.picture
    plain = {
        "tlora_gpus": ("GPUs, or processes on a CPU.", len(picture.gpus)),
        "tlora_groups": ("Groups that share a base.", len(picture.groups)),
        "tlora_writer_commits": ("Transactions since the start.", services.writer.commits),
        "tlora_writer_operations": ("Operations in these.", services.writer.operations),
        "tlora_connections": ("Open connections.", services.connections.count),
        "tlora_streams": ("Open streams.", sum(services.streams.values())),
        "tlora_ready": ("1 while jobs are scheduled.", int(services.live.fault is None)),
        "tlora_start_time_seconds": ("Unix time of the server's start.", services.began),
    }
    for name, (text, value) in plain.items():
        Gauge(name, text, registry=registry).set(value)
    closed = Counter("tlora_connections_ended", "Connections that the server has ended since the start.", ["reason"], registry=registry)
    kept = services.connections
    for reason, count in {"refused": kept.refused, "dropped": kept.dropped, "timed_out": kept.timed_out}.items():
        closed.labels(reason).inc(count)
    counted = Gauge("tlora_events", "What has happened since the start.", ["kind"], registry=registry)
    for kind, count in dict(services.live.counts).items():
        counted.labels(kind).set(count)
    return generate_latest(registry)
