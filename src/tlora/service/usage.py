"""What tenants have used of the cluster, between the scheduler that counts it and the store that keeps it over a restart."""

from __future__ import annotations

import time

from sqlalchemy import Engine

from tlora.scheduler.tenants import Tenants
from tlora.service.database.usage_rows import save_usage, saved_usage
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
