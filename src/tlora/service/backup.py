"""Copies of a server's directory, made while it runs, and servers made from such copies.

The database is copied first, by SQLite's own means; what lies beside it is then at least as new as what the copy says. Tokenized data is
left out: jobs that had not ended have their data read again where they are restored.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tlora import durable, manifest
from tlora.errors import ConfigError, DataError
from tlora.json_file import read_object
from tlora.service import store_id
from tlora.service.config import ServerConfig
from tlora.service.database.store import DATABASE, SCHEMA
from tlora.version import __version__

INDEX = "BACKUP.json"
_COPIED = ("files", "jobs", "bases")
_SECRETS = ("secret", "first-key", store_id.FILE)
_CHUNK = 1 << 20
_ROUNDS = 5  # over a job whose checkpoints change while they are copied


@dataclass(frozen=True, slots=True)
class Copied:
    """What a backup holds."""

    jobs: int
    files: int
    bytes: int


def back_up(config: ServerConfig, target: Path) -> Copied:
    """Raises ConfigError where there is no store of SQLite's, or something at `target`; DataError where the disk fails."""
    source = config.directory
    if config.database_url is not None:
        raise ConfigError("database_url: this copies the SQLite store of a server's directory. Use pg_dump, then copy the directory")
    store_id.check_store(source)
    if target.exists():
        raise ConfigError(f"{target}: is there already, and nothing is replaced. Choose a new directory")
    if target.absolute().is_relative_to(source):
        raise ConfigError(f"{target}: lies in the server's own directory. Choose a directory elsewhere")
    durable.make_directory(target.absolute().parent)
    with _scratch(target) as scratch:
        index: dict[str, dict[str, int | str]] = {}
        _copy_database(source / DATABASE, scratch / DATABASE)
        index[DATABASE] = _entry(scratch / DATABASE)
        for name in _SECRETS:
            if (source / name).is_file():
                index[name] = _copy(source / name, scratch / name)
                (scratch / name).chmod(0o600)
        for name in _COPIED:
            for folder in sorted((source / name).iterdir()) if (source / name).is_dir() else ():
                index |= _copy_tree(folder, scratch, source)
        with sqlite3.connect(scratch / DATABASE) as connection:
            jobs = int(connection.execute("SELECT count(*) FROM jobs").fetchone()[0])
            files = int(connection.execute("SELECT count(*) FROM files WHERE deleted IS NULL").fetchone()[0])
        connection.close()
        content = {"tlora": __version__, "schema": SCHEMA, "directory": str(source), "created": time.time(), "files": index}
        durable.write_file(scratch / INDEX, json.dumps(content, indent=1, sort_keys=True) + "\n")
    return Copied(jobs, files, sum(int(entry["bytes"]) for entry in index.values()))


def restore(config: ServerConfig, source: Path) -> int:
    """The server's directory, as the backup has it; how many jobs have not ended. Raises ConfigError where it is not empty or the backup
    is not of this version's making; DataError where a file is not what the backup says. Nothing is there then.
    """
    target = config.directory
    if config.database_url is not None:
        raise ConfigError("database_url: a backup holds a SQLite store. Leave database_url out, or restore with pg_restore")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target}: is not empty, and nothing is overwritten. Move it away, or give another --data-dir")
    try:
        index = read_object(source / INDEX)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source}: is no backup ({error}); `tlora backup` makes one") from None
    if str(index.get("schema", "")) > SCHEMA:
        raise ConfigError(f"{source}: was made by tlora {index.get('tlora')}, whose store is newer than this one's. Use that version")
    durable.make_directory(target.absolute().parent)
    with _scratch(target) as scratch:
        for name, entry in index["files"].items():
            place = scratch / name
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise DataError(f"{source}: names a file outside of itself, {name!r}; it is no backup of tlora's")
            durable.make_directory(place.parent)
            try:
                found = _copy(source / name, place)
            except FileNotFoundError:
                raise DataError(f"{source / name}: is missing; the backup is damaged, and nothing was restored") from None
            if found != entry:
                raise DataError(f"{source / name}: is not what was backed up; the backup is damaged, and nothing was restored")
            if name in _SECRETS:
                place.chmod(0o600)
        still_open = _reopen(scratch / DATABASE)
        for job_id in still_open:
            _move_paths(scratch / "jobs" / job_id / "job.json", str(index["directory"]), str(target))
        if target.exists():
            target.rmdir()
    return len(still_open)


class _scratch:  # noqa: N801  a context manager
    """A directory beside `final` that takes its name at the end, or is gone."""

    def __init__(self, final: Path) -> None:
        self._final = final.absolute()
        self._path = durable.scratch_path(self._final.parent)

    def __enter__(self) -> Path:
        self._path.mkdir(mode=0o700)
        return self._path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            for directory in (path for path in self._path.rglob("*") if path.is_dir()):
                durable.sync(directory)
            durable.sync(self._path)
            self._path.rename(self._final)
            durable.sync(self._final.parent)
            return
        shutil.rmtree(self._path, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, ConfigError):
            raise DataError(
                f"{self._final}: cannot be written: {error.strerror or error}. Nothing is there; free some space, or its rights"
            )


def _copy_database(source: Path, target: Path) -> None:
    old = sqlite3.connect(f"file:{source}?mode=ro", uri=True)
    new = sqlite3.connect(target)
    try:
        old.backup(new)
        new.execute("PRAGMA journal_mode=DELETE")  # one file
    finally:
        new.close()
        old.close()


def _copy_tree(folder: Path, scratch: Path, root: Path) -> dict[str, dict[str, int | str]]:
    """What lies under `folder`. Checkpoints that come and go meanwhile are copied in a later round, so that the newest is there whole."""
    found: dict[str, dict[str, int | str]] = {}
    for _ in range(_ROUNDS):
        lost = False
        for path in _plain_files(folder):
            name = str(path.relative_to(root))
            if name in found and path.parent != folder:
                continue
            place = scratch / name
            durable.make_directory(place.parent)
            try:
                found[name] = _copy(path, place)
            except FileNotFoundError:  # pruned, or renamed into its place
                place.unlink(missing_ok=True)
                lost = True
        for checkpoint in sorted((scratch / folder.relative_to(root)).glob("checkpoint-*")):
            if manifest.find_damage(checkpoint) is not None:  # half of it was gone
                shutil.rmtree(checkpoint)
                found = {name: entry for name, entry in found.items() if (scratch / name).parent != checkpoint}
                lost = True
        if not lost:
            break
    return found


def _plain_files(folder: Path) -> Iterator[Path]:
    """Without what is being written."""
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    except FileNotFoundError:
        return
    for path in entries:
        if path.is_symlink() or path.name.startswith("tmp-"):
            continue
        if path.is_dir():
            yield from _plain_files(path)
        elif path.is_file():
            yield path


def _copy(source: Path, target: Path) -> dict[str, int | str]:
    """Durable; bytes and hash of what was copied."""
    size, digest = 0, hashlib.sha256()
    with source.open("rb") as old, target.open("wb") as new:
        while chunk := old.read(_CHUNK):
            new.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        new.flush()
        os.fsync(new.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _entry(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": manifest.sha256(path)}


def _move_paths(order: Path, old: str, new: str) -> None:
    """A job resumes only if its order is what it was, and the order names files under the server's directory."""

    def moved(value: object) -> object:
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        if isinstance(value, list):
            return [moved(item) for item in value]
        return new + value.removeprefix(old) if isinstance(value, str) and value.startswith(old + "/") else value

    if order.is_file():
        durable.write_file(order, json.dumps(moved(read_object(order)), indent=1) + "\n")


def _reopen(database: Path) -> list[str]:
    """Ids of the jobs that had not ended. Their data is read again: what was made of it lay where the old server was."""
    connection = sqlite3.connect(database)
    try:
        with connection:
            connection.execute("UPDATE jobs SET intake = NULL WHERE ended IS NULL")
            if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'store'").fetchone():  # not in backups of older versions
                connection.execute("UPDATE store SET holder = '', place = ''")  # of the server that was copied
            connection.execute("UPDATE jobs SET status = 'preparing' WHERE ended IS NULL AND status != 'paused'")
            return [str(row[0]) for row in connection.execute("SELECT id FROM jobs WHERE ended IS NULL")]
    finally:
        connection.close()
