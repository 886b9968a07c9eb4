"""Jobs in the database: inserted, looked up, and changed by compare-and-set. Every query of a tenant's carries the tenant; `list_all_jobs`
is for operators."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Row, Select, Text, bindparam, cast, func, or_, select, update

from tlora.api import OPEN, OrderSpec
from tlora.service.config import Limits
from tlora.service.database.tables import events, files, job_files, jobs, tenants
from tlora.service.keys import new_id
from tlora.service.problems import RefusedError, missing
from tlora.wording.numbers import quantity

_INSERT = events.insert()


def add_event(connection: Connection, tenant: str, job: str | None, kind: str, message: str, data: dict[str, Any] | None = None) -> None:
    connection.execute(events.insert().values(tenant=tenant, job=job, time=time.time(), kind=kind, message=message, data=data))


def add_events(connection: Connection, found: Sequence[tuple[str, str | None, str, str]]) -> None:
    """Several at once: tenant, job, kind, message."""
    now = time.time()
    rows = [{"tenant": tenant, "job": job, "time": now, "kind": kind, "message": message} for tenant, job, kind, message in found]
    connection.execute(_INSERT, rows)


def list_events(connection: Connection, tenant: str, job: str | None, after: int, count: int) -> Sequence[Row[Any]]:
    """The oldest first, from those after the serial number `after`; of one job, or of all of the tenant's."""
    query = select(events).where(events.c.tenant == tenant, events.c.serial > after)
    if job is not None:
        query = query.where(events.c.job == job)
    return connection.execute(query.order_by(events.c.serial).limit(count)).all()


def newest_events(connection: Connection, tenant: str, job: str, count: int) -> Sequence[Row[Any]]:
    """The last `count` of the job, the oldest of them first."""
    query = select(events).where(events.c.tenant == tenant, events.c.job == job)
    return connection.execute(query.order_by(events.c.serial.desc()).limit(count)).all()[::-1]


def last_event(connection: Connection) -> int:
    """Its serial number; 0 without one."""
    return connection.execute(select(func.max(events.c.serial))).scalar() or 0


_STARTABLE = ("preparing", "queued", "running")
_PAGE = 500  # rows that are looked at together
# of every order: made once, as making them takes longer than the database does
_COUNT_OPEN = select(func.count()).where(jobs.c.tenant == bindparam("tenant"), jobs.c.ended.is_(None))
_WANTED = files.c.id.in_(bindparam("files", expanding=True))
_FIND_FILES = select(files.c.id).where(files.c.tenant == bindparam("tenant"), _WANTED, files.c.deleted.is_(None))
_INSERT_JOBS, _INSERT_USES = jobs.insert(), job_files.insert()
_INSERT_AND_RETURN = _INSERT_JOBS.returning(jobs, sort_by_parameter_order=True)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where orders come from, beside the request itself."""

    sweep: str | None = None
    cloned_from: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Orders of one tenant that are accepted as a whole, or not at all."""

    tenant: str
    orders: Sequence[OrderSpec]
    origin: Origin = Origin()


def insert_jobs(connection: Connection, tenant: str, orders: Sequence[OrderSpec], limits: Limits) -> list[Row[Any]]:
    """All of `orders`, or none. Raises RefusedError for files and jobs that there are not, and beyond the tenant's quota."""
    (found,) = insert_batches(connection, [Batch(tenant, orders)], limits)
    if isinstance(found, RefusedError):
        raise found
    return found


def insert_batches(connection: Connection, batches: Sequence[Batch], limits: Limits) -> list[list[Row[Any]] | RefusedError]:
    """The jobs of each batch, or why it is refused, in their order: with a few statements, however many they are."""
    found = _check(connection, batches, limits)
    accepted = [batch for batch, refusal in zip(batches, found, strict=True) if refusal is None]
    now = time.time()
    rows = [
        {
            "id": new_id("job"),
            "tenant": batch.tenant,
            "name": order.name,
            "status": "preparing",
            "base_model": order.base_model,
            "order": order.model_dump(mode="json", exclude_unset=True),
            "sweep": batch.origin.sweep,
            "cloned_from": batch.origin.cloned_from,
            "created": now,
        }
        for batch in accepted
        for order in batch.orders
    ]
    made = iter(())
    if rows:
        made = iter(_insert(connection, rows))
        orders = (order for batch in accepted for order in batch.orders)
        uses = [{"job": row["id"], "file": file} for row, order in zip(rows, orders, strict=True) for file in order.data.file_ids]
        connection.execute(_INSERT_USES, uses)
        add_events(connection, [(row["tenant"], row["id"], "created", "accepted; its data will be read") for row in rows])
    return [refusal or list(islice(made, len(batch.orders))) for batch, refusal in zip(batches, found, strict=True)]


def _check(connection: Connection, batches: Sequence[Batch], limits: Limits) -> list[RefusedError | None]:
    """Why each is refused; None of one that may be accepted once those before it are."""
    present: dict[str, set[str]] = {}
    for tenant in {batch.tenant for batch in batches}:
        wanted = {file for batch in batches if batch.tenant == tenant for order in batch.orders for file in order.data.file_ids}
        present[tenant] = _present_files(connection, tenant, sorted(wanted))
    counts: dict[str, int] = {}
    found: list[RefusedError | None] = []
    for batch in batches:
        tenant = batch.tenant
        if tenant not in counts:
            counts[tenant] = connection.execute(_COUNT_OPEN, {"tenant": tenant}).scalar_one()
        try:
            _check_quota(counts[tenant], len(batch.orders), limits)
            for file in sorted({file for order in batch.orders for file in order.data.file_ids} - present[tenant]):
                raise missing("file", file)
            for source in {order.start_from: order for order in batch.orders if order.start_from}.values():
                _check_start(connection, tenant, source)
        except RefusedError as error:
            found.append(error)
        else:
            found.append(None)
            counts[tenant] += len(batch.orders)
    return found


def _insert(connection: Connection, rows: list[dict[str, Any]]) -> list[Row[Any]]:
    """As the database has them then, in their order."""
    if connection.dialect.insert_executemany_returning_sort_by_parameter_order:
        return list(connection.execute(_INSERT_AND_RETURN, rows))
    connection.execute(_INSERT_JOBS, rows)  # SQLite before 3.35
    found: dict[str, Row[Any]] = {}
    for start in range(0, len(rows), _PAGE):  # a database bounds the parameters of a query
        ids = [row["id"] for row in rows[start : start + _PAGE]]
        found |= {row.id: row for row in connection.execute(select(jobs).where(jobs.c.id.in_(ids)))}
    return [found[row["id"]] for row in rows]


def _check_quota(count: int, more: int, limits: Limits) -> None:
    if count + more > limits.open_jobs:
        open_jobs = quantity(count, "job of this tenant has", "jobs of this tenant have")
        remedy = "Wait for some, or cancel" if more <= limits.open_jobs else f"Submit {limits.open_jobs} at most"
        message = f"{open_jobs} not ended, and {more} more would exceed its {limits.open_jobs}. {remedy}"
        raise RefusedError(429, "too_many_jobs", message)


def _present_files(connection: Connection, tenant: str, wanted: Sequence[str]) -> set[str]:
    found: set[str] = set()
    for start in range(0, len(wanted), _PAGE):
        found |= set(connection.execute(_FIND_FILES, {"tenant": tenant, "files": wanted[start : start + _PAGE]}).scalars())
    return found


def _check_start(connection: Connection, tenant: str, order: OrderSpec) -> None:
    assert order.start_job is not None
    source = find_job(connection, tenant, order.start_job)
    if order.start_from != order.start_job and source.status in OPEN:
        message = f"start_from {order.start_from!r}: the job is {source.status} and may replace its checkpoints. Wait until it has ended"
        raise RefusedError(409, "no_adapter", message)
    if (order.start_from == order.start_job and source.status != "succeeded") or source.removed is not None:
        raise RefusedError(
            409, "no_adapter", f"start_from {source.id!r}: the job is {source.status}, and has no adapter. Name one that succeeded"
        )
    if source.base_model != order.base_model:
        message = f"start_from {source.id!r}: its base is {source.base_model!r}, not {order.base_model!r}. Order the same base"
        raise RefusedError(409, "other_base", message)


def find_job(connection: Connection, tenant: str, job_id: str) -> Row[Any]:
    """Raises RefusedError 404, also for another tenant's."""
    row = connection.execute(select(jobs).where(jobs.c.tenant == tenant, jobs.c.id == job_id)).first()
    if row is None:
        raise missing("job", job_id)
    return row


def list_jobs(
    connection: Connection, tenant: str, before: int | None, count: int, status: str | None, name: str | None
) -> Sequence[Row[Any]]:
    """The newest first, from those before the serial number `before`."""
    return _newest(connection, select(jobs).where(jobs.c.tenant == tenant), before, count, status, name)


def list_all_jobs(
    connection: Connection, tenant_name: str | None, before: int | None, count: int, status: str | None, name: str | None
) -> Sequence[Row[Any]]:
    """Of all tenants, or of the one of that name, as `list_jobs`; each row with its `tenant_name`. Raises RefusedError 404 for a tenant
    that there is not.
    """
    query = select(jobs, tenants.c.name.label("tenant_name")).join(tenants, tenants.c.id == jobs.c.tenant)
    if tenant_name is not None:
        if connection.execute(select(tenants.c.id).where(tenants.c.name == tenant_name)).first() is None:
            raise RefusedError(404, "not_found", f"there is no tenant {tenant_name!r}. `tlora keys list` names those that there are")
        query = query.where(tenants.c.name == tenant_name)
    return _newest(connection, query, before, count, status, name)


def _newest(
    connection: Connection, query: Select[Any], before: int | None, count: int, status: str | None, name: str | None
) -> Sequence[Row[Any]]:
    if before is not None:
        query = query.where(jobs.c.serial < before)
    if status is not None:
        query = query.where(jobs.c.status == status)
    if name is not None:
        query = query.where(jobs.c.name == name)
    return connection.execute(query.order_by(jobs.c.serial.desc()).limit(count)).all()


def list_by_metadata(connection: Connection, tenant: str, before: int | None, count: int, wanted: Mapping[str, str]) -> list[Row[Any]]:
    """The newest first, from those before the serial number `before`: those whose metadata has all that is `wanted`; without any wanted,
    those that have no metadata.
    """
    query = select(jobs).where(jobs.c.tenant == tenant).order_by(jobs.c.serial.desc()).limit(_PAGE)
    if wanted:
        query = query.where(cast(jobs.c.order, Text).like('%"metadata"%'))  # which others cannot have; looked at below
    found: list[Row[Any]] = []
    while len(found) < count:
        rows = connection.execute(query if before is None else query.where(jobs.c.serial < before)).all()
        for row in rows:
            own: dict[str, str] = row.order.get("metadata", {})
            if all(own.get(key) == value for key, value in wanted.items()) and (wanted or not own):
                found.append(row)
        if len(rows) < _PAGE:
            break
        before = rows[-1].serial
    return found[:count]


def open_jobs(connection: Connection) -> Sequence[Row[Any]]:
    """Of all tenants, in the order of their submission."""
    return connection.execute(select(jobs).where(jobs.c.ended.is_(None)).order_by(jobs.c.serial)).all()


def find_needed(connection: Connection, tenant: str, since: float) -> tuple[set[str], set[frozenset[str]]]:
    """What the tenant's unfinished jobs need: the tokenized sets of those whose data has been read, and of each of the others the SHA-256
    of its files. One that ended after the time `since` needs its sets still: its worker may not have heard of it.
    """
    needy = (jobs.c.tenant == tenant, or_(jobs.c.ended.is_(None), jobs.c.ended > since))
    sets = (jobs.c.intake[name].as_string() for name in ("train_set", "eval_set"))
    named = {path for row in connection.execute(select(*sets).where(*needy)) for path in row if path is not None}
    reading = (jobs.c.tenant == tenant, jobs.c.ended.is_(None), or_(jobs.c.status == "preparing", jobs.c.intake.is_(None)))
    used = select(jobs.c.id, files.c.sha256).join(job_files, job_files.c.job == jobs.c.id).join(files, files.c.id == job_files.c.file)
    unread: dict[str, set[str]] = {}
    for job_id, sha256 in connection.execute(used.where(*reading)):
        unread.setdefault(job_id, set()).add(sha256)
    return named, {frozenset(hashes) for hashes in unread.values()}


def change(connection: Connection, job_id: str, before: Collection[str], status: str, message: str = "", **values: Any) -> bool:
    """Compare-and-set: the job gets `status` if it has one of `before`. Whether it had; an event then tells it."""
    if status in ("succeeded", "failed", "cancelled"):
        values["ended"] = time.time()
    query = update(jobs).where(jobs.c.id == job_id, jobs.c.status.in_(before)).values(status=status, **values).returning(jobs.c.tenant)
    tenant = connection.execute(query).scalar()
    if tenant is None:
        return False
    add_event(connection, tenant, job_id, status, message or status)
    return True


def pause(connection: Connection, tenant: str, job_id: str, by: str) -> Row[Any]:
    row = find_job(connection, tenant, job_id)
    if row.status != "paused" and not change(connection, job_id, _STARTABLE, "paused", f"paused by {by}"):
        raise _wrong_state(row, "paused")
    return find_job(connection, tenant, job_id)


def resume(connection: Connection, tenant: str, job_id: str, by: str) -> Row[Any]:
    row = find_job(connection, tenant, job_id)
    status = "preparing" if row.intake is None else "queued"
    if row.status == "paused":
        change(connection, job_id, ("paused",), status, f"resumed by {by}")
    elif row.status not in _STARTABLE:
        raise _wrong_state(row, "resumed")
    return find_job(connection, tenant, job_id)


def cancel(connection: Connection, tenant: str, job_id: str, by: str) -> Row[Any]:
    row = find_job(connection, tenant, job_id)
    if row.status != "cancelled" and not change(connection, job_id, OPEN, "cancelled", f"cancelled by {by}"):
        raise _wrong_state(row, "cancelled")
    return find_job(connection, tenant, job_id)


def _wrong_state(row: Row[Any], verb: str) -> RefusedError:
    ended = "been cancelled" if row.status == "cancelled" else row.status
    return RefusedError(409, "wrong_state", f"job {row.id!r} has {ended} and cannot be {verb}. Clone it to run it again")


def take_intake(connection: Connection, job_id: str, intake: dict[str, Any]) -> str | None:
    """The job's data has been read. Its status then; None if it has ended meanwhile, or is gone."""
    query = update(jobs).where(jobs.c.id == job_id, jobs.c.ended.is_(None)).values(intake=intake).returning(jobs.c.status)
    status = connection.execute(query).scalar()
    if status is None:
        return None
    samples, steps = intake.get("samples", 0), intake["profile"]["steps"]
    change(
        connection, job_id, ("preparing",), "queued", f"its data has been read: {quantity(samples, 'sample')}, {quantity(steps, 'step')}"
    )
    return "queued" if status == "preparing" else status


def set_steps(connection: Connection, steps: dict[str, int]) -> None:
    """Never back: a restarted job begins at its checkpoint."""
    for job_id, count in steps.items():
        connection.execute(update(jobs).where(jobs.c.id == job_id, jobs.c.steps < count).values(steps=count))


def row_of(connection: Connection, job_id: str) -> Row[Any] | None:
    """For the controller, which serves all tenants."""
    return connection.execute(select(jobs).where(jobs.c.id == job_id)).first()


def status_of(connection: Connection, job_id: str) -> str | None:
    return connection.execute(select(jobs.c.status).where(jobs.c.id == job_id)).scalar()
