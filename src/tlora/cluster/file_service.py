"""The controller's end of `link/transfer.py`: gives workers that do not see the store the files of their jobs, and takes what they write.

A worker names trees and jobs, never paths, and gets those of the jobs that it holds. What it sends is staged by hash; it is put in place
whole, once its hash is right and while the attempt is still the job's: one lock holds both, so that nothing appears after `keep` has
returned.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tlora import durable
from tlora.file_identity import FileIdentity, identity_of
from tlora.link.job_lease import HeldError, JobLease, take_claim
from tlora.link.lines import Buffer, Line
from tlora.link.transfer import (
    PIECE_BYTES,
    AskStaged,
    Denied,
    Done,
    FileFacts,
    FromStore,
    ListTree,
    OpenStore,
    Piece,
    PutInPlace,
    PutRows,
    ReadPiece,
    Remove,
    StagePiece,
    ToStore,
    TreeFiles,
    parse_request_line,
    store_line,
)
from tlora.manifest import MANIFEST, sha256
from tlora.worker_protocol import PROTOCOL, Join

STAGING = "incoming"
_CLAIM_SECONDS = 5.0  # for a worker of this host to release the job's directory
_PIECE_SECONDS = 60.0
_REMEMBERED_BYTES = 1 << 20  # of a file whose hash is kept
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass
class _Grant:
    """A worker's attempt of a job. `trees` are what the job reads besides its directory. `claim` is taken when it is first used."""

    incarnation: str
    attempt: int
    trees: dict[str, Path] = field(default_factory=dict[str, Path])
    claim: JobLease | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    in_place: dict[str, Path] = field(default_factory=dict[str, Path])  # by sha256: a file may get a second name

    def end(self) -> None:
        """When this returns, nothing more is written under it."""
        with self.lock:
            self.over = True
            if self.claim is not None:
                self.claim.release()


class FileService:
    """Of one store. `grant` and `keep` are for the controller's thread, `serve` for the thread of each connection."""

    def __init__(self, store: Path) -> None:
        """`store` has the directories jobs and workers."""
        self._jobs, self._staging = store / "jobs", store / "workers" / STAGING
        self._grants: dict[str, _Grant] = {}
        self._of: dict[str, set[str]] = {}  # incarnation -> jobs that it was granted; some may be another's by now
        self._bases: dict[str, Path] = {}  # by incarnation
        self._readable: dict[str, dict[str, dict[str, Path]]] = {}  # likewise: trees of jobs that others hold, by job and kind
        self._hashes: dict[FileIdentity, str] = {}
        self._lock, self._is_closed = threading.Lock(), False

    def grant(self, incarnation: str, base: str, jobs: Mapping[str, tuple[int, Join | None]]) -> None:
        """The worker may read the base, and have these attempts of jobs."""
        with self._lock:
            self._bases[incarnation] = Path(base)
            for name, (attempt, join) in jobs.items():
                known = self._grants.get(name)
                if known is None or (known.incarnation, known.attempt) != (incarnation, attempt):
                    if known is not None:
                        known.end()
                    self._grants[name] = known = _Grant(incarnation, attempt)
                    self._of.setdefault(incarnation, set()).add(name)
                known.trees |= _trees_of(join) if join is not None else {}

    def let_read(self, incarnation: str, jobs: Iterable[Join]) -> None:
        """The worker computes parts of these jobs, and no others, for the worker that holds them: it may have what they read."""
        with self._lock:
            self._readable[incarnation] = {join.job.name: _trees_of(join) for join in jobs}

    def keep(self, incarnation: str, held: Mapping[str, int]) -> None:
        """Job -> attempt of all that the worker still holds. When this returns, nothing is written under another of its attempts."""
        over: list[_Grant] = []
        with self._lock:
            names = self._of.get(incarnation, set())
            for name in list(names):
                grant = self._grants.get(name)
                if grant is None or grant.incarnation != incarnation or held.get(name) != grant.attempt:
                    names.discard(name)
                    if grant is not None and grant.incarnation == incarnation:
                        over.append(self._grants.pop(name))
        for grant in over:
            grant.end()

    def end(self, incarnation: str) -> None:
        """The worker is lost. When this returns, nothing is written for it."""
        self.keep(incarnation, {})
        with self._lock:
            self._bases.pop(incarnation, None)
            self._of.pop(incarnation, None)
            self._readable.pop(incarnation, None)
        shutil.rmtree(self._staging / incarnation, ignore_errors=True)

    def close(self) -> None:
        """When this returns, nothing more is written, and the next controller may. Connections end with their next request to write."""
        self._is_closed = True
        with self._lock:
            grants, self._grants = list(self._grants.values()), {}
        for grant in grants:
            grant.end()

    # -- a connection --------------------------------------------------------------------------------------------------

    def serve(self, line: Line, opened: OpenStore) -> None:
        """Answer until the connection ends. Raises ValueError for what is no request."""
        if opened.protocol != PROTOCOL:
            line.send(store_line(Denied(f"this worker speaks protocol {opened.protocol}")))
            return
        for received in line.lines():
            request = parse_request_line(received)
            size = request.size if isinstance(request, StagePiece | PutRows) else 0
            if not 0 <= size <= PIECE_BYTES:
                raise ValueError(f"a piece of {size} bytes")
            content = line.read_bytes(size, _PIECE_SECONDS) if size else b""
            try:
                answer, following = self._answer(opened.incarnation, request, content)
            except HeldError as error:
                if self._is_closed:
                    raise ConnectionError("this controller has ended, and the next one knows whose the job is") from None
                answer, following = Denied(str(error)), b""
            except OSError as error:  # CheckpointError is one
                answer, following = Denied(error.strerror or str(error), again=durable.is_full(error)), b""
            line.send(store_line(answer), following)

    def _answer(self, incarnation: str, request: ToStore, content: Buffer) -> tuple[FromStore, bytes]:
        match request:
            case ListTree(tree):
                return TreeFiles(tuple(self._facts(path, name) for name, path in self._files(incarnation, tree))), b""
            case ReadPiece(tree, name, offset):
                piece = self._read(dict(self._files(incarnation, tree)).get(name), offset)
                return Piece(len(piece)), piece
            case AskStaged(job_id, digest):
                return Done(self._staged_bytes(incarnation, job_id, digest)), b""
            case StagePiece(job_id, digest, offset):
                return self._stage(self._staged(incarnation, job_id, digest), offset, content), b""
            case PutInPlace():
                return self._put(incarnation, request), b""
            case PutRows():
                return self._put_rows(incarnation, request, content), b""
            case Remove(job_id, attempt, name):
                with self._writing(incarnation, job_id, attempt) as (jobs, check):
                    check("")
                    durable.remove_checkpoints(jobs, {path.name for path in jobs.glob("checkpoint-*")} - {name})
                    if _PLAIN.fullmatch(name) and (jobs / name).is_file():
                        (jobs / name).unlink()
                return Done(), b""
            case _:
                return Denied("a connection is opened once"), b""

    # -- what is read --------------------------------------------------------------------------------------------------

    def _files(self, incarnation: str, tree: str) -> Iterator[tuple[str, Path]]:
        """The names and paths of a tree's files; of none that the worker may not have."""
        kind, _, job_id = tree.partition(":")
        if kind == "base":
            root = self._bases.get(incarnation)
        elif kind == "job":
            grant = self._grant_of(incarnation, job_id)
            with grant.lock:
                self._claim(grant, job_id)
            root = self._jobs / job_id
        elif (readable := self._readable.get(incarnation, {}).get(job_id)) is not None:
            root = readable.get(kind)
        else:
            root = self._grant_of(incarnation, job_id).trees.get(kind)
        if root is None or not root.is_dir():
            return
        for path in sorted(root.rglob("*")):
            name = path.relative_to(root).as_posix()
            of_job = kind != "job" or path.parent == root or (path.parent.parent == root and (path.parent / MANIFEST).is_file())
            if of_job and path.is_file() and not any(_is_private(part) for part in name.split("/")):
                yield name, path

    def _facts(self, path: Path, name: str) -> FileFacts:
        status = path.stat()
        identity = identity_of(status)
        digest = self._hashes.get(identity) or sha256(path)
        if identity.is_settled and status.st_size >= _REMEMBERED_BYTES:
            self._hashes[identity] = digest
        return FileFacts(name, status.st_size, digest)

    def _read(self, path: Path | None, offset: int) -> bytes:
        if path is None or offset < 0:
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PIECE_BYTES)

    # -- what is written -----------------------------------------------------------------------------------------------

    def _grant_of(self, incarnation: str, job_id: str) -> _Grant:
        grant = self._grants.get(job_id)
        if grant is None or grant.incarnation != incarnation:
            raise HeldError(f"{job_id} is not this worker's, or no longer. Nothing is written")
        return grant

    @contextlib.contextmanager
    def _writing(self, incarnation: str, job_id: str, attempt: int) -> Generator[tuple[Path, Callable[[str], None]]]:
        """The job's directory, and what is to be called before each rename, while the attempt is the job's."""
        grant = self._grant_of(incarnation, job_id)
        with grant.lock:
            if grant.attempt != attempt:
                raise HeldError(f"{job_id} was handed over: attempt {grant.attempt} writes it, and this is {attempt}. Nothing is written")
            claim = self._claim(grant, job_id)
            durable.make_directory(self._jobs / job_id)
            yield self._jobs / job_id, claim.check

    def _claim(self, grant: _Grant, job_id: str) -> JobLease:
        if grant.over:
            raise HeldError(f"{job_id} is no longer this worker's. Nothing is written")
        if grant.claim is None:
            grant.claim = take_claim(self._jobs, job_id, grant.attempt, _CLAIM_SECONDS)
        return grant.claim

    def _staged(self, incarnation: str, job_id: str, digest: str) -> Path:
        self._grant_of(incarnation, job_id)
        if not _SHA256.fullmatch(digest) or not _PLAIN.fullmatch(incarnation):
            raise HeldError(f"{digest[:80]!r} is no sha256")
        durable.make_directory(self._staging / incarnation)
        return self._staging / incarnation / f"{job_id}-{digest}"

    def _staged_bytes(self, incarnation: str, job_id: str, digest: str) -> int:
        path = self._staged(incarnation, job_id, digest)
        known = self._grant_of(incarnation, job_id).in_place.get(digest)
        if not path.exists() and known is not None:
            with contextlib.suppress(OSError):  # no hard links, or it has gone: it is sent once more
                path.hardlink_to(known)
        return path.stat().st_size if path.is_file() else 0

    def _stage(self, path: Path, offset: int, content: Buffer) -> Done:
        with path.open("ab") as file:
            if file.tell() == offset:  # else it has come already, or what is before it has not
                file.write(content)
        return Done(path.stat().st_size)

    def _put(self, incarnation: str, request: PutInPlace) -> FromStore:
        names = [facts.name for facts in request.files]
        if not all(_PLAIN.fullmatch(name) for name in [*names, *([request.directory] if request.directory else [])]):
            return Denied(f"names {names[:20]} of files that no job has")
        staged = {facts.name: self._staged(incarnation, request.job_id, facts.sha256) for facts in request.files}
        for facts in request.files:
            path = staged[facts.name]
            if not path.is_file() or path.stat().st_size != facts.num_bytes or sha256(path) != facts.sha256:
                path.unlink(missing_ok=True)
                return Denied(f"{facts.name} arrived damaged", again=True)
        with self._writing(incarnation, request.job_id, request.attempt) as (jobs, check):
            if request.directory:
                digests = {facts.name: facts.sha256 for facts in request.files}

                def write(scratch: Path) -> dict[str, str]:
                    for name, path in staged.items():
                        (scratch / name).hardlink_to(path)
                    return digests

                durable.write_directory(jobs / request.directory, write, failpoint=check)
            for facts in request.files if not request.directory else ():
                durable.link_file(staged[facts.name], jobs / facts.name, failpoint=check)
            place = jobs / request.directory if request.directory else jobs
            self._grant_of(incarnation, request.job_id).in_place |= {facts.sha256: place / facts.name for facts in request.files}
        for path in set(staged.values()):
            path.unlink(missing_ok=True)
        return Done()

    def _put_rows(self, incarnation: str, request: PutRows, content: Buffer) -> FromStore:
        if not _PLAIN.fullmatch(request.name) or not request.name.endswith(".jsonl"):
            return Denied(f"{request.name[:80]!r} is no file of rows")
        with self._writing(incarnation, request.job_id, request.attempt) as (jobs, check):
            path = jobs / request.name
            check("")
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            with os.fdopen(handle, "r+b") as file:
                there = file.seek(0, os.SEEK_END)
                if request.offset > there:
                    return Done(there)
                file.truncate(request.offset)
                file.seek(request.offset)
                file.write(content)
        return Done(request.offset + len(content))


def _trees_of(join: Join) -> dict[str, Path]:
    named = {"train": join.train_set, "eval": join.eval_set, "start": join.job.adapter_path}
    return {kind: Path(path) for kind, path in named.items() if path}


def _is_private(name: str) -> bool:
    """Temporary names, what was replaced or set aside, and hidden files are nobody's but their writer's."""
    return name.startswith((".", "bad-")) or durable.is_leftover(Path(name)) or name.endswith(".replaced")
