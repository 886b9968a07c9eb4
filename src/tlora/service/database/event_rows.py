"""What has happened to jobs, in the transaction in which it happened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, select

from tlora.service.database.tables import events

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


def last_event(connection: Connection) -> int:
    """Its serial number; 0 without one."""
    return connection.execute(select(func.max(events.c.serial))).scalar() or 0
