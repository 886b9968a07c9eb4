"""Files between a controller's store and a worker that does not see it: the messages, and the worker's end of the connection.

A connection of its own, admitted as a worker's, so that no file delays a sign of life. The worker asks, the controller answers each
message with one. Files are known by name, size and sha256, move in pieces of at most `PIECE_BYTES`, go on where they stopped, and count
only when their hash is right. The controller's end is `cluster/file_service.py`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tlora import durable
from tlora.errors import CheckpointError
from tlora.link.authentication import AdmissionError
from tlora.link.endpoint import Endpoint, dial
from tlora.link.lines import Buffer, Line
from tlora.manifest import sha256
from tlora.message_codec import Codec, message

PIECE_BYTES = 4 << 20
ANSWER_SECONDS = 600.0  # for the controller to hash a base of hundreds of GB that nobody has asked for before
_SEND_SECONDS = 60
_REDIAL_SECONDS = (0.1, 2.0)
_MOST_TRIES = 3  # of a file whose hash is wrong
T = TypeVar("T")


class TransferError(CheckpointError):
    """The controller does not give or take a file; trying again would not help."""


class AgainError(TransferError):
    """Denied for now: a file that arrived damaged, or a full disk."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """`name`: relative to its tree, with slashes."""

    name: str
    num_bytes: int
    sha256: str


# -- worker to controller ----------------------------------------------------------------------------------------------


@message
class OpenStore:
    """The first line, in place of a Hello: for the files of the worker process `incarnation`."""

    incarnation: str
    protocol: int


@message
class ListTree:
    """The files of `tree`: base, or train:JOB, eval:JOB, start:JOB, job:JOB of a job that the worker holds."""

    tree: str


@message
class ReadPiece:
    """The next piece of a file that `ListTree` has named, from `offset` on."""

    tree: str
    name: str
    offset: int


@message
class AskStaged:
    """How much of a file with this hash the controller has."""

    job_id: str
    sha256: str


@message
class StagePiece:
    """The next `size` bytes of a file with this hash, which follow the line."""

    job_id: str
    sha256: str
    offset: int
    size: int


@message
class PutInPlace:
    """The staged `files` become plain files of the job's directory, or with `directory` a durable directory in it: all at once, if the
    attempt is still the job's.
    """

    job_id: str
    attempt: int
    files: tuple[FileFacts, ...]
    directory: str = ""


@message
class PutRows:
    """`size` bytes, which follow, are what the job's file of rows holds from `offset` on."""

    job_id: str
    attempt: int
    name: str
    offset: int
    size: int


@message
class Remove:
    """A checkpoint that the job keeps no longer, or a plain file of its directory."""

    job_id: str
    attempt: int
    name: str


# -- controller to worker ----------------------------------------------------------------------------------------------


@message
class TreeFiles:
    """Answers `ListTree`; () where there is no such tree."""

    files: tuple[FileFacts, ...]


@message
class Piece:
    """Answers `ReadPiece`: `size` bytes follow; 0 at the file's end."""

    size: int


@message
class Done:
    """`num_bytes` of the file are staged."""

    num_bytes: int = 0


@message
class Denied:
    """Nothing was changed. With `again` it may be tried again: a file arrived damaged, or the disk is full."""

    reason: str
    again: bool = False


FromStore = TreeFiles | Piece | Done | Denied
ToStore = OpenStore | ListTree | ReadPiece | AskStaged | StagePiece | PutInPlace | PutRows | Remove
_FROM_STORE: Codec[FromStore] = Codec(FromStore)
_TO_STORE: Codec[ToStore] = Codec(ToStore)
store_line, parse_store_line = _FROM_STORE.encode, _FROM_STORE.decode
request_line, parse_request_line = _TO_STORE.encode, _TO_STORE.decode


class StoreClient:
    """A worker's way to the store. Any thread may call it; one request is under way at a time. A connection that ends is opened again, and
    the request is made again: all of them may be.
    """

    def __init__(self, endpoint: Endpoint, hello: OpenStore) -> None:
        self._endpoint, self._hello = endpoint, hello
        self._line: Line | None = None
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()
        with self._lock:
            self._drop()

    def ask(self, request: ToStore, kind: type[T], content: bytes = b"", gave_up: Callable[[], bool] = lambda: False) -> tuple[T, Buffer]:
        """The answer, and the bytes that follow it. Raises TransferError where it is denied, ConnectionError once `gave_up`."""
        pause = _REDIAL_SECONDS[0]
        while True:
            try:
                with self._lock:
                    answer, following = self._exchange(request, content)
            except AdmissionError as error:
                raise TransferError(str(error)) from None
            except (OSError, ValueError):  # a line that was cut, or another's answer
                if self.closed.is_set() or gave_up():
                    raise ConnectionAbortedError("given up") from None
                self.closed.wait(pause)
                pause = min(2 * pause, _REDIAL_SECONDS[1])
                continue
            if isinstance(answer, Denied):
                raise (AgainError if answer.again else TransferError)(answer.reason)
            if not isinstance(answer, kind):
                raise TransferError(f"the controller answers {type(request).__name__} with {type(answer).__name__}")
            return answer, following

    def _exchange(self, request: ToStore, content: bytes) -> tuple[FromStore, Buffer]:
        try:
            if self.closed.is_set():
                raise ConnectionAbortedError("closed")
            if self._line is None:
                self._line = dial(self._endpoint, _SEND_SECONDS)
                self._line.send(request_line(self._hello))
            self._line.send(request_line(request), content)
            received = self._line.read_line(ANSWER_SECONDS)
            if received is None:
                raise ConnectionResetError("the controller has closed the connection")
            answer = parse_store_line(received)
            size = answer.size if isinstance(answer, Piece) else 0
            if not 0 <= size <= PIECE_BYTES:
                raise ValueError(f"a piece of {size} bytes")
            return answer, self._line.read_bytes(size, _SEND_SECONDS) if size else b""
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def fetch_tree(
    client: StoreClient, tree: str, place: Path, gave_up: Callable[[], bool], beat: Callable[[], object], name: str = ""
) -> Path | None:
    """The directory below `place` with the files of `tree`, named by their hashes, or `name` in that: what is there already is not fetched
    again, and what was cut goes on. None where there is no such tree. `beat` is called after each piece.

    The caller lets one process at a time in. Raises TransferError, ConnectionError, CheckpointError (disk full).
    """
    files = client.ask(ListTree(tree), TreeFiles, gave_up=gave_up)[0].files
    if not files:
        return None
    _check_names(files)
    lines = [f"{facts.name} {facts.num_bytes} {facts.sha256}\n" for facts in sorted(files, key=lambda facts: facts.name)]
    final = place / hashlib.sha256("".join(lines).encode()).hexdigest()[:32] / name
    if final.is_dir():
        return final
    partial = final.with_name(f"{final.name}.part")
    for facts in files:
        fetch_file(client, tree, facts, partial / facts.name, gave_up, beat)
    partial.rename(final)
    for directory in {place, final.parent}:
        durable.sync(directory)
    return final


def fetch_file(
    client: StoreClient, tree: str, facts: FileFacts, path: Path, gave_up: Callable[[], bool], beat: Callable[[], object]
) -> None:
    """One file of a tree, which goes on at the bytes that `path` has. Raises as `fetch_tree`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(_MOST_TRIES):
        with path.open("ab") as file:
            while file.tell() < facts.num_bytes:
                if gave_up():
                    raise ConnectionAbortedError("given up")
                piece = client.ask(ReadPiece(tree, facts.name, file.tell()), Piece, gave_up=gave_up)[1]
                if not piece:
                    break
                file.write(piece)
                beat()
            file.flush()
            os.fsync(file.fileno())
        if path.stat().st_size == facts.num_bytes and sha256(path) == facts.sha256:
            return
        path.unlink()
    raise TransferError(f"{tree}: {facts.name} has another content than the {facts.sha256[:12]} that was announced, {_MOST_TRIES} times")


def _check_names(files: tuple[FileFacts, ...]) -> None:
    for facts in files:
        parts = Path(facts.name).parts
        if not parts or Path(facts.name).is_absolute() or ".." in parts:
            raise TransferError(f"the controller names a file {facts.name!r}, which lies in no tree")


def stage_file(client: StoreClient, job_id: str, facts: FileFacts, path: Path) -> None:
    """Have the controller hold the file's content; goes on with what it has. Raises as `fetch_tree`, and OSError if `path` changes."""
    offset = client.ask(AskStaged(job_id, facts.sha256), Done)[0].num_bytes
    with path.open("rb") as file:
        while offset < facts.num_bytes:
            file.seek(offset)
            content = file.read(min(PIECE_BYTES, facts.num_bytes - offset))
            if not content:
                raise OSError(f"{path} has become shorter")
            request = StagePiece(job_id, facts.sha256, offset, len(content))
            offset = client.ask(request, Done, content)[0].num_bytes


def facts_of(path: Path, name: str) -> FileFacts:
    return FileFacts(name, path.stat().st_size, sha256(path))
