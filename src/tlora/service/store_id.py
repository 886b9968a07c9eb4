"""Which store a data directory belongs to: `store.json` in the directory and a row in the database have the same id, or nothing starts.

A directory whose database is gone, or that meets another's, would else be taken for a new one: its uploads for garbage, its jobs for lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Select, select

from tlora import durable
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.server_directory import check_rights
from tlora.service.database.store import DATABASE, sqlite_file
from tlora.service.database.tables import files, jobs
from tlora.service.keys import new_id

FILE = "store.json"
_CONTENT = ("files", "jobs")  # directories that hold what cannot be made again


def check_store(directory: Path) -> None:
    """Raises ConfigError where no SQLite store lies in `directory`."""
    check_rights(directory)
    if (directory / DATABASE).is_file():
        return
    if (directory / FILE).is_file():
        raise ConfigError(f"{directory}: the store of its server lies at the database_url of its settings: give them with --config")
    raise ConfigError(f"{directory}: no server has its store there. Give the right --data-dir, or start `tlora serve` once")


class StoreId:
    """Of one data directory. `settle` is called in the transaction that takes the lease, `keep` once it is committed."""

    def __init__(self, directory: Path) -> None:
        """Raises ConfigError for a file that is damaged."""
        self._directory = directory
        self._id, self._settled, self._filled = _read(directory / FILE)
        self._written = (self._settled, self._filled)

    def refuse_missing(self, url: str) -> None:
        """Raises ConfigError where SQLite would make a new file in place of one that is gone."""
        path = sqlite_file(url)
        if path is not None and not path.exists() and (self._settled or _is_used(self._directory)):
            raise ConfigError(self._without_store(f"its database {path} is gone"))

    def settle(self, connection: Connection, found: str | None) -> str:
        """The id of the store, which has `found` so far. Raises ConfigError where database and directory are not of one store."""
        database = f"the database {connection.engine.url.render_as_string()}"
        if found is not None and found != self._id:
            raise ConfigError(self._foreign(found, database))
        if found is not None:
            self._refuse_emptied(connection, database)
            return found
        here = _is_used(self._directory)
        if (self._id is not None and self._settled) or (here and not _has(connection, select(files.c.id), select(jobs.c.id))):
            raise ConfigError(self._without_store(f"{database} knows nothing of it: it is new, or was emptied"))
        if not here and _has(connection, *_KEPT):
            raise ConfigError(
                f"data_dir {self._directory}: is new, and {database} has the files and jobs of another directory. Start with that "
                "directory, or give this one a database of its own"
            )
        if self._id is None:
            self._id = new_id("store")
            self._write(settled=False)  # before the row: a stop between the two leaves an id that is the store's at the next start
        return self._id

    def _refuse_emptied(self, connection: Connection, database: str) -> None:
        """The rows of files are never removed, and those of jobs after their directories."""
        has_files, has_jobs = (_has(connection, select(table.c.id)) for table in (files, jobs))
        trained = _trained(self._directory)
        found = {"uploads": self._filled and not has_files, "jobs": bool(trained) and not has_jobs}
        lost = [name for name, is_lost in found.items() if is_lost]
        if lost == ["jobs"]:
            more = f" and {len(trained) - 1:,} more" if len(trained) > 1 else ""
            it = "them" if more else "it"
            raise ConfigError(
                f"{trained[0]}{more}: {database} has no job, and a server makes no such directory without one, so that the database was "
                f"emptied, or is an old copy. Nothing was changed. Put the database back from a backup, or move {it} out of "
                f"{trained[0].parent} to start without {it}"
            )
        if lost:
            raise ConfigError(self._without_store(f"{database} has no {' and no '.join(lost)} any more: it was emptied, or is an old copy"))
        self._filled = has_files

    def keep(self) -> None:
        """The database has the id."""
        if self._written != (True, self._filled):
            self._write(settled=True)

    def _write(self, *, settled: bool) -> None:
        content = {"store": self._id, "settled": settled, "filled": self._filled}
        durable.write_file(self._directory / FILE, json.dumps(content) + "\n", mode=0o600)
        self._settled, self._written = settled, (settled, self._filled)

    def _without_store(self, why: str) -> str:
        return (
            f"data_dir {self._directory}: holds a server's uploads and jobs, and {why}. Nothing was changed. Put the database back from a "
            "backup, or begin anew with an empty data_dir and, if database_url is set, an empty database"
        )

    def _foreign(self, found: str, database: str) -> str:
        if self._id is not None and self._settled:
            other = f"belongs to the store {self._id}"
        else:
            other = f"has no {FILE}" if self._id is None else "is new"
        return (
            f"data_dir {self._directory}: {other}, and {database} is that of the store {found} of another directory. Start with the "
            f"directory whose {FILE} names it, or give this one a database of its own"
        )


def _read(path: Path) -> tuple[str | None, bool, bool]:
    """The id, whether the database has it, and whether the database has had files: it keeps a row of each."""
    if not path.exists():
        return None, False, False
    try:
        found = read_object(path)
        return str(found["store"]), bool(found["settled"]), bool(found.get("filled", False))  # not in files of older versions
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is damaged ({error}): which database this directory belongs to cannot be told. Put it back from a backup, or write "
            '{"store": ID, "settled": true} into it with the id that the database has in its table `store`'
        ) from None


def _is_used(directory: Path) -> bool:
    return any((directory / name).is_dir() and any(_below(directory / name)) for name in _CONTENT)


def _trained(directory: Path) -> list[Path]:
    """What came of jobs: the row of each was there before, and goes after it."""
    place = directory / "jobs"
    return sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith(".")) if place.is_dir() else []


def _below(directory: Path) -> list[Path]:
    """Jobs; files of tenants, whose directories may be empty."""
    return [path for path in directory.iterdir() if directory.name == "jobs" or (path.is_dir() and any(path.iterdir()))]


def _has(connection: Connection, *queries: Select[Any]) -> bool:
    return any(connection.execute(query.limit(1)).first() is not None for query in queries)


_ADAPTERS = select(jobs.c.id).where(jobs.c.status == "succeeded", jobs.c.removed.is_(None))
_KEPT = (select(files.c.id).where(files.c.deleted.is_(None)), select(jobs.c.id).where(jobs.c.ended.is_(None)), _ADAPTERS)  # on the disk
