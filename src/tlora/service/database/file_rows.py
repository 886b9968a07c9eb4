"""Uploaded files in the database. Bytes lie under `files/<tenant>/<sha256><suffix>`; several files of one tenant may share them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, func, select, update

from tlora.service.database.tables import files, job_files, jobs
from tlora.service.keys import new_id
from tlora.service.problems import RefusedError, missing

_PART = 500  # values in one query: a database bounds their number


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes that lie in their place. `filename` is what the tenant calls them."""

    tenant: str
    filename: str
    purpose: str
    bytes: int
    sha256: str
    suffix: str


def content_path(directory: Path, tenant: str, sha256: str, suffix: str) -> Path:
    """Where the bytes lie: made of ids alone."""
    return directory / "files" / tenant / f"{sha256}{suffix}"


def insert_file(connection: Connection, upload: Upload) -> Row[Any]:
    """Of bytes that the tenant has room for."""
    file_id = new_id("file")
    connection.execute(
        files.insert().values(
            id=file_id,
            tenant=upload.tenant,
            filename=upload.filename,
            purpose=upload.purpose,
            bytes=upload.bytes,
            sha256=upload.sha256,
            suffix=upload.suffix,
            created=time.time(),
        )
    )
    return find_file(connection, upload.tenant, file_id)


def drop_unrecorded(connection: Connection, directory: Path, upload: Upload) -> None:
    """The bytes of an upload that was refused, unless a row of the tenant's names the same. In the writer's turn."""
    same = (files.c.tenant == upload.tenant, files.c.sha256 == upload.sha256, files.c.suffix == upload.suffix)
    if connection.execute(select(files.c.id).where(*same).limit(1)).first() is None:
        content_path(directory, upload.tenant, upload.sha256, upload.suffix).unlink(missing_ok=True)


def live_bytes(connection: Connection, tenant: str) -> int:
    """Bytes count once for each file that names them: a tenant can see what it has used."""
    query = select(func.sum(files.c.bytes)).where(files.c.tenant == tenant, files.c.deleted.is_(None))
    return int(connection.execute(query).scalar() or 0)


def find_contents(connection: Connection, tenant: str, hashes: Collection[str]) -> tuple[set[str], set[str]]:
    """Those of `hashes` that a file of the tenant's has or had, and those that one has that is not deleted."""
    recorded, live = set[str](), set[str]()
    wanted = sorted(hashes)
    for start in range(0, len(wanted), _PART):
        query = select(files.c.sha256, files.c.deleted).where(files.c.tenant == tenant, files.c.sha256.in_(wanted[start : start + _PART]))
        for sha256, deleted in connection.execute(query):
            recorded.add(sha256)
            if deleted is None:
                live.add(sha256)
    return recorded, live


def find_file(connection: Connection, tenant: str, file_id: str) -> Row[Any]:
    """Raises RefusedError 404, also for another tenant's."""
    row = connection.execute(select(files).where(files.c.tenant == tenant, files.c.id == file_id, files.c.deleted.is_(None))).first()
    if row is None:
        raise missing("file", file_id)
    return row


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of a tenant's files; the newest first, or the oldest."""

    purpose: str | None = None
    sha256: str | None = None
    oldest_first: bool = False


def list_files(connection: Connection, tenant: str, beyond: int | None, count: int, wanted: Wanted) -> Sequence[Row[Any]]:
    """Those that come after the serial number `beyond` in their order."""
    query = select(files).where(files.c.tenant == tenant, files.c.deleted.is_(None))
    if beyond is not None:
        query = query.where(files.c.serial > beyond if wanted.oldest_first else files.c.serial < beyond)
    if wanted.purpose is not None:
        query = query.where(files.c.purpose == wanted.purpose)
    if wanted.sha256 is not None:
        query = query.where(files.c.sha256 == wanted.sha256)
    return connection.execute(query.order_by(files.c.serial if wanted.oldest_first else files.c.serial.desc()).limit(count)).all()


def delete_file(connection: Connection, tenant: str, file_id: str) -> None:
    """Raises RefusedError 409 while a job that has not ended learns from it."""
    find_file(connection, tenant, file_id)
    query = select(jobs.c.id).join(job_files, job_files.c.job == jobs.c.id).where(job_files.c.file == file_id, jobs.c.ended.is_(None))
    user = connection.execute(query.limit(1)).scalar()
    if user is not None:
        raise RefusedError(409, "file_in_use", f"file {file_id!r} is used by {user!r}, which has not ended. Cancel that job, or wait")
    connection.execute(update(files).where(files.c.id == file_id).values(deleted=time.time()))


def paths_of(connection: Connection, directory: Path, tenant: str, ids: Collection[str]) -> dict[str, Path]:
    """Where the bytes of files lie, deleted ones included: a job that was accepted keeps its files."""
    rows = connection.execute(select(files).where(files.c.tenant == tenant, files.c.id.in_(ids)))
    return {row.id: content_path(directory, tenant, row.sha256, row.suffix) for row in rows}


def name_of(connection: Connection, file_id: str) -> str:
    """As its tenant calls it; the id of one that is gone."""
    return connection.execute(select(files.c.filename).where(files.c.id == file_id)).scalar() or file_id
