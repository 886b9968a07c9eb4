"""The GPU time that tenants have used, as the scheduler counted it last."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sqlalchemy import Connection, select, update

from tlora.service.database.tables import tenants


def save_usage(connection: Connection, gpu_seconds: Mapping[str, float]) -> None:
    """By tenant, decayed to now."""
    now = time.time()
    for tenant, used in gpu_seconds.items():
        connection.execute(update(tenants).where(tenants.c.id == tenant).values(gpu_seconds=used, gpu_seconds_at=now))


def saved_usage(connection: Connection, half_life_seconds: float) -> dict[str, float]:
    """By tenant, decayed to now: what was used while no server was there is not known, and not counted."""
    now = time.time()
    rows = connection.execute(select(tenants.c.id, tenants.c.gpu_seconds, tenants.c.gpu_seconds_at).where(tenants.c.gpu_seconds > 0)).all()
    return {row.id: row.gpu_seconds * 2 ** (-max(0.0, now - row.gpu_seconds_at) / half_life_seconds) for row in rows}
