"""The line between the process that leads several ranks and these: `link.lines.Line` over a unix socket, with a key of its own.

Only processes of one user on one host can meet here: no other user may enter the socket's directory. What ranks of other hosts say comes
through the process that has started them there (`lent_ranks.py`, `lending.py`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tlora.engine.messages import FROM_RANK, TO_RANK, Broken, FromRank, Hello, Sending, ToRank, Written
from tlora.errors import ConfigError
from tlora.link.authentication import AuthOk, Entry, admission_line, read_admission
from tlora.link.lines import Buffer, Line
from tlora.link.transfer import PIECE_BYTES
from tlora.message_codec import Codec
from tlora.worker_protocol import Refusal

_ACCEPT_SECONDS = 0.05  # after a connection that could not be had: too many open files, for a while
T = TypeVar("T")
_CONTENT_SECONDS = 60.0  # for the bytes that follow a line
_ADMIT_SECONDS = 600.0  # for either end to say its part of the admission: on a busy machine a process may be slow to start


class Sender(Protocol):
    """A rank's line, as who leads it writes there."""

    def send(self, *parts: Buffer) -> None: ...
    def end(self) -> None: ...


def encode(codec: Codec[Any], message: Any) -> tuple[Buffer, ...]:
    """A message's line, and the bytes that follow that of a `Sending`."""
    return (codec.encode(message.written), message.content) if isinstance(message, Sending) else (codec.encode(message),)


def with_content(message: T, line: Line) -> T | Sending:
    """The message that came on that line, with the bytes that follow it. Raises ValueError for more than one piece."""
    if not isinstance(message, Written):
        return message
    if not 0 < message.size <= PIECE_BYTES:
        raise ValueError(f"a piece of {message.size} bytes")
    return Sending(message, line.read_bytes(message.size, _CONTENT_SECONDS))


class Meeting:
    """The leader's end of all lines: where ranks find it, and what they say.

    `inbox` gets (rank, report) from a thread per rank, and (rank, None) when its line has ended. `None` may be put in to wake the reader.
    `problem` says what was wrong with a connection that did not come so far as to say whose it is; "" where there was none.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tlora-"))  # mode 0700
        self.key = secrets.token_hex(32)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / "ranks"))
        self._listener.listen()
        self.inbox: queue.SimpleQueue[tuple[int, FromRank | Sending | None] | None] = queue.SimpleQueue()
        self.lines: dict[int, Sender] = {}
        self.problem = ""
        self._closed = False
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    @property
    def address(self) -> str:
        """For `connect`: where the socket lies, and the key."""
        return f"{self.directory / 'ranks'}:{self.key}"

    def send(self, rank: int, command: ToRank | Sending) -> None:
        if rank in self.lines:
            self.lines[rank].send(*encode(TO_RANK, command))

    def send_file(self, rank: int, command: ToRank, file: int) -> None:
        """A command, and a copy of an open file, which the rank keeps until its end."""
        line = self.lines[rank]
        assert isinstance(line, Line), "an open file goes to ranks of this host only"
        line.send_file(TO_RANK.encode(command), file)

    def end_lines(self) -> None:
        for line in list(self.lines.values()):
            line.end()

    def close(self, *, keep_logs: bool) -> None:
        """The directory is removed, unless logs in it tell why a rank was lost."""
        self._closed = True
        self.end_lines()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        if not keep_logs:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                time.sleep(_ACCEPT_SECONDS)
                continue
            try:
                threading.Thread(target=self._read, args=(Line(connection),), daemon=True).start()
            except RuntimeError:  # no more threads: its rank hears that the line has ended
                connection.close()

    def _read(self, line: Line) -> None:
        rank = None
        try:
            hello = self._admit(line)
            if hello is None:
                return
            rank = hello.rank
            self.lines[rank] = line
            self.inbox.put((rank, hello))
            for received in line.lines():
                self.inbox.put((rank, with_content(FROM_RANK.decode(received), line)))
        except OSError:  # it has ended within what it sent
            pass
        except ValueError as error:  # a message that cannot be read, as of another version of the program
            reason = f"a message that cannot be read ({error})"
            if rank is None:
                self.problem = f"a rank's Hello was {reason}"
            else:
                self.inbox.put((rank, Broken(f"it sent {reason}")))
        finally:
            if rank is not None:
                self.inbox.put((rank, None))
            line.end()
            line.close()

    def _admit(self, line: Line) -> Hello | None:
        """Of a rank that has shown the key; None for any other process. Raises ValueError for a Hello that cannot be read."""
        try:
            entry = read_admission(line, _ADMIT_SECONDS)
        except OSError:  # the connection has ended, or says something else
            return None
        if not isinstance(entry, Entry) or not secrets.compare_digest(entry.token.encode(), self.key.encode()):
            line.send(admission_line(Refusal("it comes with the key of another run")))
            return None
        line.send(admission_line(AuthOk()))
        first = line.read_line()
        if first is None:
            return None
        hello = FROM_RANK.decode(first)
        if not isinstance(hello, Hello):
            self.problem = f"a rank's first message was {type(hello).__name__}, and not Hello"
            return None
        return hello


class RankLine:
    """A rank's end. `send` may be called from any thread; a line that is broken takes what is sent and forgets it."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def send(self, report: FromRank | Sending) -> None:
        self._line.send(*encode(FROM_RANK, report))


def connect(address: str, hear: Callable[[ToRank | Sending | None], None]) -> Callable[[Hello], RankLine]:
    """A rank's end, to be opened with its Hello; `hear` is called by a thread with each command, and with None when the line has ended.

    Raises ConfigError if nothing listens at `address`.
    """
    path, _, key = address.rpartition(":")
    connection = socket.socket(socket.AF_UNIX)
    line = Line(connection, takes_files=True)
    try:
        connection.connect(path)
        line.send(admission_line(Entry(key, os.getpid(), 0, "")))
        answer = read_admission(line, _ADMIT_SECONDS)
        if not isinstance(answer, AuthOk):
            raise ConnectionError(answer.reason if isinstance(answer, Refusal) else "it answers out of turn")
    except OSError as error:
        line.close()
        raise ConfigError(
            f"no run waits for its ranks at {path} ({error}). It has ended, or its rendezvous is stale: start all ranks anew"
        ) from None

    def read() -> None:
        with contextlib.suppress(ValueError, OSError):  # no command: its sender cannot be obeyed any longer
            for received in line.lines():
                hear(with_content(TO_RANK.decode(received), line))
        line.end()
        line.close()
        hear(None)

    def begin(hello: Hello) -> RankLine:
        made = RankLine(line)
        made.send(hello)
        threading.Thread(target=read, name="coordinator", daemon=True).start()
        return made

    return begin
