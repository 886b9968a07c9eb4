"""The lease on a database: one server writes to it at a time. A holder beats; its epoch is checked in each of its transactions.

The row also says which store this is. The data directory knows that too (`tlora.service.store_id`), so that neither is used with another's.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Connection, Engine, Row, select, text, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from tlora.errors import ConfigError
from tlora.service.database.tables import store
from tlora.service.database.writer import LeaseLostError, StoreError, Writer

BEAT_SECONDS = 4.0
LEASE_SECONDS = 20.0  # without a beat until another server may take it: a start of a busy machine's disk is far shorter
_LOOK_SECONDS = 0.25
_STANDBY_LOOK_SECONDS = 1.0  # of a server that may wait for months
_HELD = select(store).with_for_update(read=True)


@dataclass(frozen=True, slots=True)
class Holder:
    """A server, in words, and where it is: the same place is held by one server at a time, by the lock on its directory."""

    words: str
    place: str


@dataclass(frozen=True, slots=True)
class Lease:
    """`epoch` counts the servers that there have been over the store `store_id`."""

    store_id: str
    epoch: int

    def check(self, connection: Connection) -> None:
        """At the beginning of a transaction, which no other server can then overtake. Raises LeaseLostError."""
        row = connection.execute(_HELD).first()
        if row is None or row.id != self.store_id:
            raise LeaseLostError("the database was emptied or replaced while the server ran, so that nothing more is written. Restore it")
        if row.epoch != self.epoch:
            raise LeaseLostError(f"the database was taken over by {row.holder or 'another server'}, so that this server ends")

    def beat(self, connection: Connection) -> None:
        connection.execute(update(store).where(store.c.epoch == self.epoch).values(heartbeat=_clock(connection)))

    def release(self, connection: Connection) -> None:
        """The next server need not wait."""
        connection.execute(update(store).where(store.c.epoch == self.epoch).values(holder="", place="", heartbeat=0.0))


def this_server(directory: Path) -> Holder:
    """The server of this process over `directory`, whose lock it holds."""
    host = platform.node()
    return Holder(f"the server over {directory} (process {os.getpid()} on {host})", f"{host}:{directory.resolve()}")


def take_lease(
    engine: Engine,
    holder: Holder,
    settle_id: Callable[[Connection, str | None], str],
    steady: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
    *,
    standby: bool = False,
) -> Lease:
    """The lease, once its last holder is known to be gone: at once where that was at the same place or has released it, else after
    `LEASE_SECONDS` without a beat. These are counted here, as clocks of hosts may be set: `steady` never is. With `standby` a holder that
    beats is waited for, however long it lives.

    `settle_id` gives the id that the store shall have, in the same transaction, from the one that it has, and raises ConfigError where
    this server must not use it. Raises ConfigError for a holder that beats.
    """
    seen: Row[tuple[object, ...]] | None = None
    began = steady()
    while True:
        silent = seen if steady() - began >= LEASE_SECONDS else None
        try:
            with engine.connect().execution_options(writes=True) as connection, connection.begin():
                found = _try(connection, holder, settle_id, silent)
        except IntegrityError:  # another server has made the row at the same moment
            continue
        except SQLAlchemyError as error:
            why = " ".join(str(getattr(error, "orig", None) or error).split())
            raise ConfigError(f"database {engine.url.render_as_string()}: {why}. Check its rights and the room on its disk") from None
        if isinstance(found, Lease):
            return found
        if seen is None:
            logging.getLogger(__name__).warning("%s held this database; waiting until it is known to be gone", found.holder)
        elif standby and _beat_of(found) != _beat_of(seen):
            began = steady()
        elif _beat_of(found) != _beat_of(seen):
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.since))
            raise ConfigError(
                f"database {engine.url.render_as_string()}: is held by {found.holder} since {since}, which is alive. One database has one "
                "server: stop that one, or give this one a database of its own"
            )
        seen = found
        wait(_STANDBY_LOOK_SECONDS if standby else _LOOK_SECONDS)


def _try(
    connection: Connection, holder: Holder, settle_id: Callable[[Connection, str | None], str], silent: Row[tuple[object, ...]] | None
) -> Lease | Row[tuple[object, ...]]:
    """The lease, or the row of another place's holder, unless it is as `silent` was, long ago."""
    row = connection.execute(select(store).with_for_update()).first()
    store_id = settle_id(connection, row.id if row is not None else None)
    now = _clock(connection)
    if row is not None and row.holder and row.place != holder.place and (silent is None or _beat_of(row) != _beat_of(silent)):
        return row
    epoch = (row.epoch if row is not None else 0) + 1
    values = {"id": store_id, "epoch": epoch, "holder": holder.words, "place": holder.place, "since": now, "heartbeat": now}
    connection.execute(store.insert().values(one=1, **values) if row is None else update(store).values(values))
    return Lease(store_id, epoch)


def _beat_of(row: Row[tuple[object, ...]]) -> tuple[object, object]:
    return row.epoch, row.heartbeat


def _clock(connection: Connection) -> float:
    """Unix time where the database is: servers of several hosts may differ."""
    if connection.dialect.name != "postgresql":
        return time.time()
    return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())


class Heart:
    """The thread that beats for a lease. A store that cannot be written is tried again at the next beat."""

    def __init__(self, lease: Lease, writer: Writer) -> None:
        self._lease, self._writer = lease, writer
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """And release the lease, unless it is lost or the store cannot be written: then it ends by itself."""
        self._ended.set()
        self._thread.join()
        try:
            self._writer.do(self._lease.release)
        except (StoreError, SQLAlchemyError):
            logging.getLogger(__name__).warning("the lease on the database could not be released; it ends in %g s", LEASE_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._writer.submit(self._lease.beat).exception()
