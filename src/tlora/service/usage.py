"""What tenants have used of the cluster, between the scheduler that counts it and the store that keeps it over a restart."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sqlalchemy import Connection, Engine, select, update

from tlora.scheduler.tenants import Tenants
from tlora.service.database.tables import tenants
from tlora.service.database.writer import Writer

_SAVE_SECONDS = 10.0  # a server that is killed forgets no more


class Usage:
    """To be called in the scheduler's thread alone."""

    def __init__(self, writer: Writer, half_life_seconds: float) -> None:
        self._writer = writer
        self._saved_at = time.monotonic()
        self.tenants = Tenants(half_life_seconds)

    def recall(self, engine: Engine, now: float) -> None:
        """What earlier servers counted; `now` is the cluster's clock."""
        with engine.connect() as connection:
            saved = saved_usage(connection, self.tenants.half_life_seconds)
        for tenant, gpu_seconds in saved.items():
            self.tenants.recall(tenant, gpu_seconds, now)

    def save(self, now: float, *, at_once: bool = False) -> None:
        """Now and then, without waiting; `at_once` at an end. What the store cannot take is in the next save."""
        if not at_once and time.monotonic() - self._saved_at < _SAVE_SECONDS:
            return
        self._saved_at = time.monotonic()
        used = self.tenants.used_at(now)
        if used:
            self._writer.submit(lambda connection: save_usage(connection, used))


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
