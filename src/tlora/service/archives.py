"""A directory's files as one tar, made while it is sent: nothing is copied to the disk, and its length is known before.

Its last file is a manifest (`tlora.manifest`) with the hashes of what was sent, so that the receiver can tell.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tlora.base_digest import BASE_FILE, served_facts
from tlora.json_file import read_object
from tlora.manifest import MANIFEST, manifest_of
from tlora.wording.card_seal import CARD_FILE, rename

_BLOCK = 512
_CHUNK = 1 << 18
_END = 2 * _BLOCK


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, its name in the archive, and its size when it was looked at; `content` is sent in place of the file's."""

    path: Path
    name: str
    bytes: int
    modified: int
    content: bytes | None = None

    def open(self) -> IO[bytes]:
        return self.path.open("rb") if self.content is None else io.BytesIO(self.content)


def entries_of(directory: Path, folder: str, base: str, names: Mapping[str, str]) -> list[Entry]:
    """The plain files of an adapter's directory; checkpoints, logs and what names places of this machine are left out.

    `base` is what the adapter's base is called where its own name is a path of this machine, which is of use to nobody else; its
    `base.json` then says that this is this server's name. That file also has the digest of the base's files. The model card has `names` in
    place of those by which this server knows job and files.
    """
    found: list[Entry] = []
    config = _without_path(directory / _CONFIG, base)
    facts = served_facts(directory, base if config is not None else None)
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_file() or path.name.startswith(("tmp-", "bad-")) or path.name in _OWN:
            continue
        status = path.stat()
        content = config if path.name == _CONFIG else _card(path, names) if path.name == CARD_FILE else None
        size = status.st_size if content is None else len(content)
        found.append(Entry(path, f"{folder}/{path.name}", size, int(status.st_mtime), content))
    if facts is not None:
        content = (json.dumps(facts, indent=1) + "\n").encode()
        modified = max((entry.modified for entry in found), default=0)
        found.append(Entry(directory / BASE_FILE, f"{folder}/{BASE_FILE}", len(content), modified, content))
    return found


_CONFIG, _BASE = "adapter_config.json", "base_model_name_or_path"


def _card(path: Path, names: Mapping[str, str]) -> bytes | None:
    try:
        return rename(path.read_text(encoding="utf-8"), names).encode()
    except (OSError, UnicodeDecodeError):  # it is somebody else's then
        return None


def _without_path(path: Path, base: str) -> bytes | None:
    """The adapter's config with `base` in place of a directory; None where it has none."""
    try:
        config = read_object(path)
    except (OSError, ValueError):  # the receiver sees that it is damaged
        return None
    named = config.get(_BASE)
    if not isinstance(named, str) or not Path(named).is_absolute():
        return None
    return (json.dumps(config | {_BASE: base}, indent=2) + "\n").encode()


_OWN = frozenset({MANIFEST, "job.json", "metrics.jsonl", "result.json", "data.json", BASE_FILE})


def tar_bytes(entries: Sequence[Entry]) -> int:
    return sum(_BLOCK + size + -size % _BLOCK for size in (*(entry.bytes for entry in entries), len(_manifest(entries, {})))) + _END


def stream_tar(entries: Sequence[Entry]) -> Iterator[bytes]:
    """`tar_bytes` bytes in all. A file that has changed meanwhile ends the stream early, so that the receiver sees a torn archive."""
    digests: dict[str, str] = {}
    for entry in entries:
        yield _header(entry.name, entry.bytes, entry.modified)
        rest, digest = entry.bytes, hashlib.sha256()
        with entry.open() as file:
            while rest:
                chunk = file.read(min(_CHUNK, rest))
                if not chunk:
                    return
                rest -= len(chunk)
                digest.update(chunk)
                yield chunk
        digests[entry.name] = digest.hexdigest()
        yield bytes(-entry.bytes % _BLOCK)
    manifest = _manifest(entries, digests)
    folder = entries[0].name.partition("/")[0] if entries else "empty"
    yield _header(f"{folder}/{MANIFEST}", len(manifest), max((entry.modified for entry in entries), default=0))
    yield manifest + bytes(-len(manifest) % _BLOCK) + bytes(_END)


def _header(name: str, size: int, modified: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, modified, 0o644
    header = info.tobuf(tarfile.USTAR_FORMAT)
    assert len(header) == _BLOCK, name
    return header


def _manifest(entries: Sequence[Entry], digests: dict[str, str]) -> bytes:
    """As long before the hashes are known as afterwards."""
    unknown = "0" * 64
    return manifest_of({entry.path.name: {"bytes": entry.bytes, "sha256": digests.get(entry.name, unknown)} for entry in entries})
