"""An adapter from a server to a directory: a stream, unpacked file by file, compared with its hashes, and only then in its place."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import httpx

from tlora import durable, manifest
from tlora.api import JobView
from tlora.client.connection import Connection
from tlora.errors import ConfigError, DataError

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MOST_FILES = 1000
_CHUNK = 1 << 20
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
