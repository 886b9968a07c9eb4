"""Files to a server and from it: data files, each content once, by its hash; adapters as a stream, unpacked, compared with their hashes."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import httpx

from tlora import durable, manifest
from tlora.api import FileList, FileView, JobView
from tlora.client.connection import Connection
from tlora.errors import ConfigError, DataError, ServiceError

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MOST_FILES = 1000

_NEEDED = ("adapter_config.json", "adapter_model.safetensors")


def download_adapter(connection: Connection, job: JobView, directory: Path) -> Path:
    """`directory/NAME` with the adapter of the job; durable on return, and not there at all on an error.

    Raises ConfigError where something lies there already, DataError for bytes that are not what the server sent, ServiceError.
    """
    final = directory / job.name
    if final.exists() or final.is_symlink():
        raise ConfigError(f"{final}: is there already, and nothing is replaced. Remove it, or choose another directory with --out")
    durable.make_directory(directory)
    with connection.stream(f"/v1/jobs/{job.id}/adapter") as answer:
        durable.write_directory(final, lambda temporary: _unpack(answer, temporary))
    return final


def _unpack(answer: httpx.Response, directory: Path) -> None:
    """Plain files with plain names, whatever the archive says. Its manifest is checked and left out: a new one is written."""
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", _Stream(answer)), mode="r|") as archive:
            for count, member in enumerate(archive):
                _, _, name = member.name.partition("/")
                if count >= _MOST_FILES or not member.isreg() or not _PLAIN.fullmatch(name) or (directory / name).exists():
                    raise DataError(f"the archive has an entry that no adapter has, {member.name[:100]!a}; nothing was kept")
                source = archive.extractfile(member)
                assert source is not None, member.name
                with (directory / name).open("xb") as file:
                    while chunk := source.read(_CHUNK):
                        file.write(chunk)
    except tarfile.TarError as error:
        raise DataError(f"the archive was cut off ({error}); nothing was kept. Download again") from None
    damage = manifest.find_damage(directory)
    missing = [name for name in _NEEDED if not (directory / name).is_file()]
    if damage is not None or missing:
        raise DataError(f"{damage or f'the archive has no {missing[0]}'}; nothing was kept. Download again")
    (directory / manifest.MANIFEST).unlink()


class _Stream(io.RawIOBase):
    """The body of an answer as a file that is read once."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__()
        self._chunks: Iterator[bytes] = answer.iter_raw(_CHUNK)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return b""
            self._rest = chunk
        count = len(self._rest) if size < 0 else size
        found, self._rest = self._rest[:count], self._rest[count:]
        return found


_CHUNK = 1 << 20
_OF_A_FILE = (400, 413, 422, 507)  # statuses of what is refused of one file: its form, its size, the room that is left
_KEPT = " ._-()[]+,@=~!#"  # characters of a file's name that servers take


def upload_files(connection: Connection, files: Sequence[Path], say: Callable[[str, int, bool], None]) -> dict[Path, str]:
    """The server's id of each file. `say` gets a file's name, its bytes, and whether the server had it already, once it has it.

    Raises DataError for a file that cannot be read or changes meanwhile, ServiceError for what the server refuses.
    """
    known: dict[tuple[str, str], str] = {}
    ids: dict[Path, str] = {}
    for path in files:
        size, digest = _read(path)
        content = (digest, path.suffix.lower())
        if content not in known:
            found = _find(connection, *content)
            known[content] = found.id if found is not None else _upload(connection, path, digest).id
            say(path.name, size, found is not None)
        ids[path] = known[content]
    return ids


def list_files(connection: Connection, most: int | None = None) -> Iterator[FileView]:
    """The newest first, `most` of them, or all."""
    for page in connection.pages("/v1/files", FileList, most):
        yield from page.data


def find_file(connection: Connection, name: str) -> str:
    """The id of the file of that id or name. Raises ServiceError where there is none of that name, or more than one."""
    if re.fullmatch(r"[a-z]+-[0-9a-z-]+", name):  # names have a suffix
        return name
    found = [file.id for file in list_files(connection) if file.filename == name]
    if not found:
        raise ServiceError(f"there is no file {name!r}. `tlora files list` lists those that there are", 404, "not_found")
    if len(found) > 1:
        listed = ", ".join(found[:5]) + (", …" if len(found) > 5 else "")
        raise ServiceError(f"{len(found)} files are named {name!r}: {listed}. Give an id", 409, "ambiguous")
    return found[0]


def _find(connection: Connection, digest: str, suffix: str) -> FileView | None:
    page = connection.get("/v1/files", FileList, sha256=digest, limit=100)
    return next((file for file in page.data if file.sha256 == digest and file.filename.lower().endswith(suffix)), None)


def _upload(connection: Connection, path: Path, digest: str) -> FileView:
    def make() -> tuple[dict[str, Any], dict[str, str]]:
        try:
            return {"file": (plain_name(path.name), path.open("rb"))}, {"purpose": "fine-tune"}
        except OSError as error:
            raise _unreadable(path, error) from None

    try:
        made = connection.send_form("/v1/files", FileView, make)
    except ServiceError as error:
        if error.status not in _OF_A_FILE:
            raise
        raise ServiceError(f"{path}: {error}", error.status, error.code) from None
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
