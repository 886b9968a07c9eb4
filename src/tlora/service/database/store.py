"""Opens the database: SQLite (WAL, FULL) in the server's directory or PostgreSQL by URL, with the schema that this version needs.

One code path: what differs between the two stands in this file.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from tlora.errors import ConfigError

DATABASE = "tlora.db"  # SQLite's file in a server's directory
SCHEMA = "0003"  # the newest of `migrations/versions`
BUSY_SECONDS = 30.0  # that a writer waits for another process, such as `tlora keys create --local`
_IDLE_MILLISECONDS = 30_000
_LONGEST_PATH = 504  # bytes of an SQLite database's: its MAX_PATHNAME, 512, less the names of its log and journal
_NETWORK_SYSTEMS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "fuse.sshfs",
    "lustre",
    "ceph",
    "fuse.ceph",
    "glusterfs",
    "fuse.glusterfs",
    "9p",
    "afs",
)
_MOUNTS = Path("/proc/mounts")
_MIGRATIONS = Path(__file__).parent / "migrations"


def default_url(directory: Path) -> str:
    """SQLite in the server's own directory."""
    return f"sqlite:///{directory / DATABASE}"


def open_store(url: str) -> Engine:
    """The database behind `url`, made or migrated as needed. Raises ConfigError where it cannot be used, and says why."""
    engine = _engine(url)
    path = sqlite_file(engine.url)
    if path is not None:
        refuse_network_system(path)
        longest = max(map(os.fsencode, (path.absolute(), path.resolve())), key=len)  # SQLite follows links itself
        if len(longest) > _LONGEST_PATH:
            where = f"database {os.fsdecode(longest)}"
            raise ConfigError(f"{where}: its path has {len(longest)} bytes, and SQLite takes {_LONGEST_PATH}. Choose a shorter one")
    try:
        with engine.connect() as connection:
            _migrate(connection, path)
    except SQLAlchemyError as error:
        engine.dispose()
        why = " ".join(str(getattr(error, "orig", None) or error).split())
        raise ConfigError(
            f"database {engine.url.render_as_string()}: {why}. Check the address, its rights and the room on its disk"
        ) from None
    except ConfigError:
        engine.dispose()
        raise
    return engine


def refuse_network_system(path: Path, mounts: Path = _MOUNTS) -> None:
    """SQLite's locks do not hold on a network file system. Raises ConfigError there."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux: nothing says
        return
    real, best, kind = path.parent.resolve(), Path("/"), ""
    for line in lines:
        _, place, system, *_ = [*line.split(), "", "", ""]
        point = Path(place.encode().decode("unicode_escape"))
        if real.is_relative_to(point) and (not kind or len(point.parts) >= len(best.parts)):
            best, kind = point, system
    if kind in _NETWORK_SYSTEMS:
        raise ConfigError(
            f"{path}: lies on {best}, a network file system ({kind}), where SQLite loses data. Use a local disk, or PostgreSQL"
        )


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError("database_url: is not a database's address; write postgresql://user:password@host/name") from None
    if parsed.get_backend_name() == "postgresql":
        # pool_pre_ping: a connection that the server has closed meanwhile is replaced, not handed out
        # a server that is stopped in the middle of a transaction must not keep its locks for ever
        idle = {"options": f"-c idle_in_transaction_session_timeout={_IDLE_MILLISECONDS}"}
        options = {} if "options" in parsed.query else idle
        address = parsed.set(drivername="postgresql+psycopg")
        return create_engine(address, pool_size=8, max_overflow=8, pool_pre_ping=True, connect_args=options)
    engine = create_engine(parsed, pool_size=8, max_overflow=8, connect_args={"timeout": BUSY_SECONDS, "check_same_thread": False})
    event.listen(engine, "connect", _set_up)
    event.listen(engine, "begin", _begin)
    return engine


def _set_up(connection: Any, _: object) -> None:
    connection.isolation_level = None  # transactions begin where SQLAlchemy says so, not where sqlite3 thinks so
    for pragma in (
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
        "cache_size=-8000",
        "journal_size_limit=67108864",
        "secure_delete=ON",
    ):
        connection.execute(f"PRAGMA {pragma}").close()


def _begin(connection: Connection) -> None:
    """A writer takes the lock when it begins: one that asks for it later can only be refused."""
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


def sqlite_file(url: str | URL) -> Path | None:
    """The file of an SQLite database; None for another database, and for what is no address."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        return None
    database = parsed.database
    return Path(database) if parsed.get_backend_name() == "sqlite" and database not in (None, "", ":memory:") else None


def _migrate(connection: Connection, path: Path | None) -> None:
    """Bring the schema up to `SCHEMA`; a copy of an older SQLite database is kept beside it. Raises ConfigError for a newer one."""
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar() if _has_schema(connection) else None
    connection.rollback()
    if found == SCHEMA:
        return
    known = [file.name.split("_")[0] for file in (_MIGRATIONS / "versions").glob("[0-9]*.py")]
    if found is not None and found not in known:
        raise ConfigError(
            f"database {connection.engine.url.render_as_string()}: its schema {found} is newer than this version's, {SCHEMA}. "
            "Run the version of tlora that made it, or a later one"
        )
    if found is not None and path is not None:
        _copy(path, path.with_name(f"{path.name}.before-{SCHEMA}-{int(time.time())}"))
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection.execution_options(writes=True)
    command.upgrade(config, "head")
    connection.commit()


def _has_schema(connection: Connection) -> bool:
    return inspect(connection).has_table("alembic_version")


def _copy(source: Path, target: Path) -> None:
    """A consistent copy, also of what stands in the write-ahead log alone."""
    if shutil.disk_usage(source.parent).free < 2 * source.stat().st_size:
        raise ConfigError(f"{source}: too little room for a copy before its schema is changed. Free {source.stat().st_size:,} bytes")
    with sqlite3.connect(source) as old, sqlite3.connect(target) as new:
        old.backup(new)
    old.close()
    new.close()
