"""What runs where and why the rest waits; health, readiness and numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily
from sqlalchemy import func, select

from tlora.cluster_api import ClusterView, Drained, DrainOrder, GroupView, HostDrained, HostDrainOrder, HostView, WaitingView
from tlora.service.access import caller_of
from tlora.service.database.tables import jobs, tenants
from tlora.service.live_state import ClusterSnapshot
from tlora.service.routes.jobs import REFUSALS
from tlora.service.services import Services, deadline_missed, services_of
from tlora.service.usage import saved_usage

router = APIRouter(responses=REFUSALS)
_TEXT = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/v1/cluster", tags=["cluster"])
def show_cluster(request: Request) -> ClusterView:
    """Groups on their GPUs and the queue. Of other tenants' jobs only numbers are shown."""
    return _cluster_view(services_of(request), caller_of(request).tenant)


@router.get("/v1/tenants/cluster", tags=["cluster"])
def show_whole_cluster(request: Request) -> ClusterView:
    """Groups on their GPUs and the queue, with the jobs of all tenants. A key with the scope admin is needed."""
    return _cluster_view(services_of(request), None)


def _cluster_view(services: Services, tenant: str | None) -> ClusterView:
    """As one tenant sees it, or with the jobs of all."""
    snapshot = services.live.snapshot
    seconds = jobs.c.order["deadline_seconds"].as_float().label("deadline_seconds")
    columns = (jobs.c.id, jobs.c.name, jobs.c.status, jobs.c.created, jobs.c.ended, seconds, tenants.c.name.label("tenant_name"))
    query = select(*columns).join(tenants, tenants.c.id == jobs.c.tenant).where(jobs.c.ended.is_(None)).order_by(jobs.c.serial)
    query = query if tenant is None else query.where(jobs.c.tenant == tenant)
    rows = services.read(lambda connection: connection.execute(query).all())
    own = {row.id for row in rows}
    in_groups = {job for group in snapshot.groups for job in group.job_ids}
    groups = [
        GroupView(
            id=group.group_id,
            base_model=group.base_model,
            gpus=list(group.gpus),
            token_budget=group.plan.token_budget,
            jobs=[job for job in group.job_ids if job in own],
            other_jobs=sum(job not in own for job in group.job_ids),
            placement=snapshot.placements.get(group.group_id, ""),
        )
        for group in snapshot.groups
    ]
    waiting: list[WaitingView] = []
    for row in rows:
        if (reason := services.live.waiting_for(row.id, row.status)) is not None:
            place, starts = services.live.queue_place(row.id, row.status)
            missed, whose = deadline_missed(row.created, row.ended, row.deadline_seconds), None if tenant else row.tenant_name
            foreseen = {"place": place, "estimated_start": starts, "deadline_missed": missed}
            waiting.append(WaitingView(job=row.id, name=row.name, reason=reason, tenant=whose, **foreseen))
    behind = len(snapshot.waiting) + 1  # those that have no place yet; those whose group loads their base are the first
    waiting.sort(key=lambda one: one.place or (0 if one.job in in_groups else behind))
    return ClusterView(
        device=snapshot.device,
        gpus=list(snapshot.gpus),
        hosts=_host_views(snapshot),
        groups=groups,
        waiting=waiting,
        others_waiting=len({*snapshot.waiting, *snapshot.reading} - own - in_groups),
        draining=services.live.draining,
    )


def _host_views(snapshot: ClusterSnapshot) -> list[HostView]:
    """Without this machine where only other hosts train."""
    used = {gpu for group in snapshot.groups for gpu in group.gpus}
    return [
        HostView(
            name=host.name,
            failure_domain=host.failure_domain,
            gpus=sorted(host.gpus),
            kinds=[snapshot.kinds.get(gpu, "") for gpu in sorted(host.gpus)],
            in_use=len(used & host.gpus),
            draining=host.draining,
            unheard=sorted(host.gpus & snapshot.silent),
        )
        for host in snapshot.hosts
        if host.gpus or host.draining
    ]


@router.put("/v1/hosts/{host}/drain", tags=["cluster"])
def drain_host(host: str, order: HostDrainOrder, request: Request) -> HostDrained:
    """Start nothing on a host any more, or use it again. It lasts until then, or a restart of the server."""
    services_of(request).job_controller.drain_host(host, finish=order.finish, undo=not order.draining)
    return HostDrained(host=host, draining=order.draining)


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
    fault = _fault(services_of(request))
    return PlainTextResponse("ready\n") if fault is None else PlainTextResponse(f"{fault}\n", 503)


def _fault(services: Services) -> str | None:
    """Why jobs are not accepted and scheduled; None while they are."""
    try:
        services.read(lambda connection: connection.execute(select(1)).scalar_one())
    except Exception as error:
        return f"the database does not answer: {type(error).__name__}"
    return services.live.fault or services.writer.problem


@router.get("/metrics", response_class=PlainTextResponse, tags=["health"])
def metrics(request: Request) -> Response:
    """For Prometheus; a key with the scope admin is needed."""
    return PlainTextResponse(_numbers(services_of(request)), media_type="text/plain; version=0.0.4; charset=utf-8")


def _numbers(services: Services) -> bytes:
    """Of what is there now, in a registry of its own: one process may run several servers, as the tests do. Then those of requests."""
    registry = CollectorRegistry()
    by_status = Gauge("tlora_jobs", "Jobs in the store.", ["status"], registry=registry)
    query = select(jobs.c.status, func.count()).group_by(jobs.c.status)
    for status, count in services.read(lambda connection: connection.execute(query).all()):
        by_status.labels(status).set(count)
    _count_tenants(services, registry)
    snapshot = services.live.snapshot
    _count_gpus(snapshot, registry)
    plain = {
        "tlora_groups": ("Groups that share a base.", len(snapshot.groups)),
        "tlora_connections": ("Open connections.", services.connections.count),
        "tlora_streams": ("Open streams.", sum(services.streams.values())),
        "tlora_ready": ("1 while jobs are accepted and scheduled, as /readyz says.", int(_fault(services) is None)),
        "tlora_start_time_seconds": ("Unix time of the server's start.", services.began),
    }
    for name, (text, value) in plain.items():
        Gauge(name, text, registry=registry).set(value)
    kept, writer = services.connections, services.writer
    ended = {"refused": kept.refused, "dropped": kept.dropped, "timed_out": kept.timed_out}
    counters = _Counters(
        [
            _counter("tlora_writer_commits", "Transactions since the start.", None, {"": writer.commits}),
            _counter("tlora_writer_operations", "Operations in these.", None, {"": writer.operations}),
            _counter("tlora_connections_ended", "Connections that the server has ended since the start.", "reason", ended),
            _counter("tlora_events", "What has happened since the start.", "kind", dict(services.live.counts)),
        ]
    )
    registry.register(counters)
    return generate_latest(registry) + generate_latest(services.numbers.registry)


def _count_tenants(services: Services, registry: CollectorRegistry) -> None:
    """Jobs that have not ended, and GPU time as the scheduler counts it, by tenant."""
    open_jobs = Gauge("tlora_tenant_jobs", "Jobs that have not ended.", ["tenant", "status"], registry=registry)
    used = Gauge("tlora_tenant_gpu_seconds", "GPU time used, halved in each half-life.", ["tenant"], registry=registry)
    names = {row.id: row.name for row in services.read(lambda connection: connection.execute(select(tenants.c.id, tenants.c.name)).all())}
    query = select(jobs.c.tenant, jobs.c.status, func.count()).where(jobs.c.ended.is_(None)).group_by(jobs.c.tenant, jobs.c.status)
    for tenant, status, count in services.read(lambda connection: connection.execute(query).all()):
        open_jobs.labels(names[tenant], status).set(count)
    half_life = services.config.usage_half_life_seconds
    for tenant, seconds in services.read(lambda connection: saved_usage(connection, half_life)).items():
        used.labels(names.get(tenant, tenant)).set(seconds)


def _count_gpus(snapshot: ClusterSnapshot, registry: CollectorRegistry) -> None:
    gpus = Gauge("tlora_gpus", "GPUs, or processes on a CPU.", ["host"], registry=registry)
    busy = Gauge("tlora_gpus_busy", "Those that a group of jobs has.", ["host"], registry=registry)
    used = {gpu for group in snapshot.groups for gpu in group.gpus}
    for host in snapshot.hosts:
        gpus.labels(host.name).set(len(host.gpus))
        busy.labels(host.name).set(len(used & host.gpus))


@dataclass(frozen=True, eq=False)
class _Counters:
    """Counters whose values are kept elsewhere."""

    families: list[CounterMetricFamily]

    def collect(self) -> list[CounterMetricFamily]:
        return self.families


def _counter(name: str, text: str, label: str | None, values: Mapping[str, float]) -> CounterMetricFamily:
    """A value for each of the label's; without a label the only one."""
    family = CounterMetricFamily(name, text, labels=[label] if label else [])
    for value, count in values.items():
        family.add_metric([value] if label else [], count)
    return family
