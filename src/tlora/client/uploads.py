"""Data files on their way to a server: each content once, by its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tlora.api import FileList, FileView
from tlora.client.connection import Connection
from tlora.errors import DataError

_CHUNK = 1 << 20
_KEPT = " ._-()[]+,@=~!#"  # characters of a file's name that servers take


def upload_files(connection: Connection, files: Sequence[Path], say: Callable[[str, int, bool], None]) -> dict[Path, str]:
    """The server's id of each file. `say` gets a file's name, its bytes, and whether the server had it already.

    Raises DataError for a file that cannot be read or changes meanwhile, ServiceError for what the server refuses.
    """
    known: dict[tuple[str, str], str] = {}
    ids: dict[Path, str] = {}
    for path in files:
        size, digest = _read(path)
        content = (digest, path.suffix.lower())
        if content not in known:
            found = _find(connection, *content)
            say(path.name, size, found is not None)
            known[content] = found.id if found is not None else _upload(connection, path, digest).id
        ids[path] = known[content]
    return ids


def _find(connection: Connection, digest: str, suffix: str) -> FileView | None:
    page = connection.get("/v1/files", FileList, sha256=digest, limit=100)
    return next((file for file in page.data if file.sha256 == digest and file.filename.lower().endswith(suffix)), None)


def _upload(connection: Connection, path: Path, digest: str) -> FileView:
    def make() -> tuple[dict[str, Any], dict[str, str]]:
        try:
            return {"file": (plain_name(path.name), path.open("rb"))}, {"purpose": "fine-tune"}
        except OSError as error:
            raise _unreadable(path, error) from None

    made = connection.send_form("/v1/files", FileView, make)
    if made.sha256 != digest:
        raise DataError(f"{path}: changed while it was uploaded. Submit again when nothing writes to it")
    return made


def plain_name(name: str) -> str:
    """A name that servers take, as near to the file's own as can be."""
    plain = "".join(char if char.isalnum() or char in _KEPT else "_" for char in name).strip(" ")
    while ".." in plain:
        plain = plain.replace("..", ".")
    if not plain[0].isalnum():
        plain = "data" + plain
    stem, dot, suffix = plain.rpartition(".")
    return f"{stem[:150]}{dot}{suffix}"


def _read(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256."""
    size, digest = 0, hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                digest.update(chunk)
    except OSError as error:
        raise _unreadable(path, error) from None
    return size, digest.hexdigest()


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: cannot be read: {error.strerror}; correct its rights or the path")
