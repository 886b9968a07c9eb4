"""The manifest of a durable directory: the names, sizes and sha256 digests of its files; standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import cast

from tlora.errors import CheckpointError

MANIFEST = "MANIFEST.json"
Files = dict[str, dict[str, int | str]]  # name -> {"bytes": ..., "sha256": ...}

_PIECE_BYTES = 4 << 20


def verify(directory: Path, only: Container[str] | None = None) -> None:
    """Raise CheckpointError naming file, expected and found if `directory`, or its files `only`, is not what its manifest says."""
    damage = find_damage(directory, only=only)
    if damage is not None:
        raise CheckpointError(f"{damage}. Remedy: use another checkpoint; --resume takes the newest undamaged one")


def find_damage(directory: Path, beat: Callable[[], None] = lambda: None, *, only: Container[str] | None = None) -> str | None:
    """File, expected and found where `directory`, or its files `only`, is not what its manifest says; None where it is.

    Files that the manifest does not name are ignored: people put notes into their adapters' directories. `beat` is called every few MiB.
    """
    try:
        files = read_manifest(directory / MANIFEST)
        if isinstance(files, str):
            return files
        for name, expected in files.items():
            if only is not None and name not in only:
                continue
            path = directory / name
            if not path.is_file():
                return f"{path} is damaged: expected {expected['bytes']} bytes, found no file"
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path} is damaged: expected {expected['bytes']} bytes, found {size}"
            digest = sha256(path, beat)
            if digest != expected["sha256"]:
                return f"{path} is damaged: expected sha256 {expected['sha256']}, found {digest}"
    except OSError as error:
        return f"{directory} is damaged: expected to read it, found {error.strerror or error}"
    return None


def manifest_of(files: Files) -> bytes:
    return (json.dumps({"files": files}, indent=2, sort_keys=True) + "\n").encode()


def read_manifest(path: Path) -> Files | str:
    """A manifest's content, or its damage. Only the exact bytes that `manifest_of` makes are accepted, so that a flipped bit of white
    space is detected too.
    """
    if not path.is_file():
        return f"{path} is damaged: expected a manifest, found no file"
    content = path.read_bytes()
    try:
        files = cast(Files, json.loads(content)["files"])
        well_formed = manifest_of(files) == content
        well_formed &= all(entry.keys() == {"bytes", "sha256"} and Path(name).name == name for name, entry in files.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        well_formed, files = False, {}
    return files if well_formed else f"{path} is damaged: expected a manifest as written, found {len(content)} other bytes"


def sha256(path: Path, beat: Callable[[], None] = lambda: None) -> str:
    """The digest of a file's bytes, read in large pieces: each needs the GIL, for which a thread waits up to 5 ms while another computes.

    `beat` is called after each piece.
    """
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])
            beat()
    return digest.hexdigest()
