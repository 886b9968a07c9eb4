"""Which base a run trains over: digests of its files, kept in `run.json`, so that `--resume` never continues a job over another base.

At launch a quick digest is made of config, file sizes, headers and a block of each tensor. A background thread hashes every weight
file whole; the cache keeps each hash under the file's identity, so a file is read once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlora import durable
from tlora.base_digest import Fingerprint, quick_digest, weight_files
from tlora.cache_directory import cache_dir
from tlora.errors import ModelError
from tlora.file_identity import FileIdentity, identity_of

_PIECE_BYTES = 4 << 20  # per call: hashing and reading release Python's lock, and each call takes it once more
_NICE = 19  # the lowest: training has priority on every core


def _cache_file(identity: FileIdentity) -> Path:
    device, inode, size, changed, modified = identity
    return cache_dir() / "weights" / "-".join(format(number, "x") for number in (device, inode, size, modified, changed))


def _known_sha256(identity: FileIdentity) -> str | None:
    try:
        text = _cache_file(identity).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if len(text) == 64 else None


def _keep_sha256(identity: FileIdentity, sha256: str) -> None:
    if not identity.is_settled:
        return
    with contextlib.suppress(OSError):  # it is only read once more then
        durable.make_directory(_cache_file(identity).parent)
        durable.write_file(_cache_file(identity), sha256 + "\n")


class BaseGuard:
    """Keeps a run to one base: `earlier` is what `run.json` has of it on a resume, and None otherwise.

    Made at launch, before the base is loaded. `start` hashes in the background; then `check` between micro-batches and
    `wait_for_verdict` before a save raise ModelError if the base is not the earlier run's.
    """

    def __init__(self, base_model: str, directory: Path, earlier: Fingerprint | None) -> None:
        """`directory` holds the base's files. Raises ModelError at once where a quick digest, or a hash already in the cache, differs."""
        self._base_model, self._directory, self._earlier = base_model, directory, earlier
        self._identities: dict[Path, FileIdentity] = {}
        self._quick: str | None = None
        self._sha256: dict[str, str] = {}
        self._problem: str | None = None
        self._stop, self._done, self._told = threading.Event(), threading.Event(), False
        self._thread: threading.Thread | None = None
        self._look()
        known = {file.name: _known_sha256(identity) for file, identity in self._identities.items()}
        self._compare({name: sha256 for name, sha256 in known.items() if sha256 is not None})
        self._raise_problem()

    def _look(self) -> None:
        """Quick digest and identities of the files, if they are there."""
        try:
            self._identities = {file: identity_of(file.stat()) for file in weight_files(self._directory)}
            self._quick = quick = quick_digest(self._directory)
        except OSError:  # loading says which file cannot be read
            self._identities, self._quick = {}, None
            return
        if quick is not None and self._earlier is not None and quick != self._earlier.quick:
            self._problem = "sizes, headers or sampled blocks differ"

    def _compare(self, digests: Mapping[str, str]) -> None:
        earlier = self._earlier.sha256 if self._earlier is not None else {}
        differ = [name for name, sha256 in digests.items() if name in earlier and earlier[name] != sha256]
        if differ and self._problem is None:
            self._problem = f"{differ[0]} has another sha256"

    @property
    def quick(self) -> str:
        """The quick digest; empty where the base's files are unknown."""
        return self._quick or ""

    def facts(self) -> dict[str, Any]:
        """The fingerprint for `run.json`, as far as it is known; the earlier run's if the base turned out to be another."""
        if self._quick is None or self._problem is not None:
            fingerprint = self._earlier
        else:
            sha256 = self._sha256 if self._done.is_set() else {}
            fingerprint = Fingerprint(self._quick, sha256 or (self._earlier.sha256 if self._earlier is not None else {}))
        return {"base_files": {"quick": fingerprint.quick, "sha256": dict(fingerprint.sha256)}} if fingerprint is not None else {}

    def start(self) -> None:
        """Hash in the background; called when the base is loaded. A hub model's files are there by now."""
        if self._quick is None:
            self._look()
            self._raise_problem()
        if not self._identities:
            self._done.set()
            return
        thread = threading.Thread(target=self._hash_aside, name="fingerprint", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads for this process
            self._hash_all()
        else:
            self._thread = thread

    def _hash_aside(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a thread has a niceness of its own on Linux alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._hash_all()

    def _hash_all(self) -> None:
        try:
            digests: dict[str, str] = {}
            for file, identity in self._identities.items():
                sha256 = self._hash(file, identity)
                if sha256 is None:
                    return
                digests[file.name] = sha256
            self._compare(digests)
            self._sha256 = digests
        except OSError as error:
            if self._earlier is not None and self._earlier.sha256:
                self._problem = str(error)
        self._done.set()

    def _hash(self, file: Path, identity: FileIdentity) -> str | None:
        """None if interrupted by `stop`. Raises OSError for a file that has changed since launch."""
        known = _known_sha256(identity)
        if known is not None:
            return known
        digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
        with file.open("rb", buffering=0) as opened:
            while size := opened.readinto(piece):
                if self._stop.is_set():
                    return None
                digest.update(piece[:size])
            if identity_of(os.fstat(opened.fileno())) != identity:
                raise OSError(f"{file.name} was replaced after the launch")
        _keep_sha256(identity, digest.hexdigest())
        return digest.hexdigest()

    def check(self) -> bool:
        """Whether the hashes have become known since the last call. Raises ModelError if they are not the earlier run's."""
        if self._told or not self._done.is_set():
            return False
        self._told = True
        self._raise_problem()
        return bool(self._sha256)

    @property
    def must_compare(self) -> bool:
        """Whether it is not known yet that the base is the earlier run's."""
        return self._earlier is not None and bool(self._earlier.sha256) and not self._done.is_set()

    def wait_for_verdict(self) -> None:
        """Return when the base is known to be the earlier run's; at once if there is nothing to compare. Raises ModelError if it is not.

        Hashes in the caller's thread what the background has not hashed by now. Only one thread may call it.
        """
        if self.must_compare:
            self.close()  # the thread has the least priority: on busy cores it takes minutes for what takes seconds here
            self._stop.clear()
            self._hash_all()
        self._raise_problem()

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise ModelError(
                f"base_model {self._base_model}: is not the base that this run began with ({self._problem}), and a job cannot go on over "
                "another. Put the earlier files back, train anew with --overwrite, or use a new output_dir"
            )

    def close(self) -> None:
        """Stop the background thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
