"""What is removed every minute: bytes and tokenized data of deleted files, old answers, jobs past their retention, long logs.

What the store has no record of is listed once and left alone: the store may be an old one that was put back.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from pathlib import Path

from sqlalchemy import Connection, delete, select, update
from sqlalchemy.exc import SQLAlchemyError

from tlora.service.database.answer_rows import forget_answers
from tlora.service.database.tables import events, files, job_files, jobs
from tlora.service.database.writer import StoreError
from tlora.service.services import Services
from tlora.service.uploads import SCRATCH

_EVERY_SECONDS = 60.0
_MOST_AT_ONCE = 200  # jobs or files in one transaction
_MOST_LOG_BYTES = 64 << 20  # of one log; the older half is cut off


class Housekeeping:
    """A thread; `sweep` does one round, for tests too."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._ended = threading.Event()
        self._unknown: set[Path] = set()  # what has no record and has been listed
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def sweep(self, now: float | None = None) -> None:
        """Once. `now` is a Unix time, for tests."""
        services = self._services
        at = services.storage.clock.now() if now is None else now
        keep = services.config.retention
        services.writer.do(lambda connection: forget_answers(connection, keep.answers_seconds, at))
        unknown = [*self._collect_files(at), *self._unknown_jobs(), *services.storage.sweep(services.writer, at)]
        self._list_unknown(unknown)
        if keep.ended_jobs_seconds is not None:
            self._remove_jobs(at - keep.ended_jobs_seconds)
        for log in (services.config.directory / "workers").glob("*.log"):
            cut_log(log, _MOST_LOG_BYTES)

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_SECONDS):
            try:
                self.sweep()
            except (StoreError, OSError, SQLAlchemyError):  # a full disk, a store that does not answer: next time
                logging.getLogger(__name__).exception("housekeeping is tried again later")

    def _collect_files(self, now: float) -> list[Path]:
        """Scratch files, and content that was deleted, both older than the grace period: an upload may be under way. Content without a
        record is left alone, and returned.
        """
        root, grace = self._services.config.directory / "files", self._services.config.retention.deleted_files_seconds
        unknown: list[Path] = []
        for path in [path for tenant in root.iterdir() if tenant.is_dir() for path in tenant.iterdir()]:
            try:
                old = now - path.stat().st_mtime > grace
            except FileNotFoundError:
                continue
            if old and path.name.startswith(SCRATCH):
                path.unlink(missing_ok=True)
            elif old and not self._services.writer.do(lambda connection, path=path: unlink_unused(connection, path, now - grace)):
                unknown.append(path)
        return unknown

    def _unknown_jobs(self) -> list[Path]:
        """Directories of jobs that have no row; a row comes before its directory and goes after it."""
        root = self._services.config.directory / "jobs"
        places = {
            path.name: path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".") and path not in self._unknown
        }
        names = sorted(places)
        known = set[str]()
        for start in range(0, len(names), _MOST_AT_ONCE):
            query = select(jobs.c.id).where(jobs.c.id.in_(names[start : start + _MOST_AT_ONCE]))
            known |= set(self._services.read(lambda connection, query=query: connection.execute(query).scalars().all()))
        return [places[name] for name in names if name not in known]

    def _list_unknown(self, paths: list[Path]) -> None:
        new = [path for path in paths if path not in self._unknown]
        self._unknown |= set(new)
        if not new:
            return
        more, it, are = (f" and {len(new) - 1:,} more", "them", "they are") if len(new) > 1 else ("", "it", "it is")
        remedy = f"Put the newest copy of the database back, or remove {it} by hand"
        logging.getLogger(__name__).warning(f"{new[0]}{more}: the store has no record of {it}; {are} left alone. {remedy}")

    def _remove_jobs(self, before: float) -> None:
        """Jobs that ended before that time: their directories first, then their rows, so that a stop between leaves no orphan."""
        services, root = self._services, self._services.config.directory / "jobs"
        query = select(jobs.c.id).where(jobs.c.ended < before).order_by(jobs.c.serial).limit(_MOST_AT_ONCE)
        ids = services.read(lambda connection: connection.execute(query).scalars().all())
        if not ids:
            return

        services.writer.do(lambda connection: connection.execute(update(jobs).where(jobs.c.id.in_(ids)).values(removed=time.time())))
        for job_id in ids:
            shutil.rmtree(root / job_id, ignore_errors=True)
        gone = [job_id for job_id in ids if not (root / job_id).exists()]
        if len(gone) < len(ids):
            logging.getLogger(__name__).warning("%s: %d of its jobs cannot be removed; check its rights", root, len(ids) - len(gone))

        def forget(connection: Connection) -> None:
            connection.execute(delete(events).where(events.c.job.in_(gone)))
            connection.execute(delete(job_files).where(job_files.c.job.in_(gone)))
            connection.execute(delete(jobs).where(jobs.c.id.in_(gone)))

        services.writer.do(forget)


def unlink_unused(connection: Connection, path: Path, before: float) -> bool:
    """In the writer's turn: no row can be added meanwhile. A new upload of the same content has made the file young again. False for
    content that the store has no record of, which is left alone.
    """
    sha256, suffix, tenant = path.stem, path.suffix, path.parent.name
    query = select(files.c.id).where(files.c.tenant == tenant, files.c.sha256 == sha256, files.c.suffix == suffix)
    if connection.execute(query.limit(1)).first() is None:
        return False
    if connection.execute(query.where(files.c.deleted.is_(None)).limit(1)).first() is not None:
        return True
    in_use = query.join(job_files, job_files.c.file == files.c.id).join(jobs, jobs.c.id == job_files.c.job).where(jobs.c.ended.is_(None))
    if connection.execute(in_use.limit(1)).first() is None and path.stat().st_mtime < before:
        path.unlink(missing_ok=True)
    return True


def cut_log(path: Path, most: int) -> None:
    """Leave the younger half of a log that has grown beyond `most` bytes. Its writer appends to the same file."""
    size = path.stat().st_size
    if size <= most:
        return
    with path.open("r+b") as file:
        file.seek(size - most // 2)
        rest = file.read()
        file.seek(0)
        file.write(rest[rest.find(b"\n") + 1 :])
        file.truncate()
