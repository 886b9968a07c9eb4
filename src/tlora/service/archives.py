"""A directory's files as one tar, made while it is sent: nothing is copied to the disk, and its length is known before."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 512
_CHUNK = 1 << 18
_END = 2 * _BLOCK


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, its name in the archive, and its size when it was looked at."""

    path: Path
    name: str
    bytes: int
    modified: int


def entries_of(directory: Path, folder: str) -> list[Entry]:
    """The plain files of an adapter's directory; checkpoints, logs and what names places of this machine are left out."""
    found: list[Entry] = []
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_file() or path.name.startswith(("tmp-", "bad-")) or path.name in _OWN:
            continue
        status = path.stat()
        found.append(Entry(path, f"{folder}/{path.name}", status.st_size, int(status.st_mtime)))
    return found


_OWN = frozenset({"MANIFEST.json", "job.json", "metrics.jsonl", "result.json", "data.json"})


def tar_bytes(entries: Sequence[Entry]) -> int:
    return sum(_BLOCK + entry.bytes + -entry.bytes % _BLOCK for entry in entries) + _END


def stream_tar(entries: Sequence[Entry]) -> Iterator[bytes]:
    """`tar_bytes` bytes in all. A file that has changed meanwhile ends the stream early, so that the receiver sees a torn archive."""
    for entry in entries:
        info = tarfile.TarInfo(entry.name)
        info.size, info.mtime, info.mode = entry.bytes, entry.modified, 0o644
        header = info.tobuf(tarfile.USTAR_FORMAT)
        assert len(header) == _BLOCK, entry.name
        yield header
        rest = entry.bytes
        with entry.path.open("rb") as file:
            while rest:
                chunk = file.read(min(_CHUNK, rest))
                if not chunk:
                    return
                rest -= len(chunk)
                yield chunk
        if padding := -entry.bytes % _BLOCK:
            yield bytes(padding)
    yield bytes(_END)
