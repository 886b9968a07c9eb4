"""The line between the owner of a run and its ranks: a Unix socket of `multiprocessing.connection`, authenticated by a key of the run.

Only processes of one user on one host can meet here: no other user may enter the socket's directory.
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
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from tlora.engine.ranks.messages import Broken, Command, Hello, Hold, Report
from tlora.errors import ConfigError

_ACCEPT_SECONDS = 0.05  # after a connection that could not be had: too many open files, for a while


class Line:
    """One end. `send` may be called from any thread; a line that is broken takes what is sent and forgets it."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, message: object) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def send_file(self, file: int, pid: int) -> None:
        """An open file for the process `pid` at the other end."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(Hold())
            send_handle(self._connection, file, pid)

    def end(self) -> None:
        """From any thread: the readers at both ends see the end of the line. It stays open for its own reader, which would else read from
        a closed file or one that was opened since under the same number.
        """
        with self._lock, contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as both_ways:
            both_ways.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By its reader, once."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.close()


class Meeting:
    """The owner's end of all lines: where ranks find it, and what they say.

    `inbox` gets (rank, report) from a thread per rank, and (rank, None) when its line has ended. `None` may be put in to wake the reader.
    `problem` says what was wrong with a connection that did not come so far as to say whose it is; "" where there was none.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tlora-"))  # mode 0700
        self.key = secrets.token_hex(32)
        self._listener = Listener(str(self.directory / "ranks"), family="AF_UNIX")
        self.inbox: queue.SimpleQueue[tuple[int, Report | None] | None] = queue.SimpleQueue()
        self.lines: dict[int, Line] = {}
        self.problem = ""
        self._closed = False
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()

    @property
    def address(self) -> str:
        """For `connect`: where the socket lies, and the key."""
        return f"{self.directory / 'ranks'}:{self.key}"

    def send(self, rank: int, command: object) -> None:
        if rank in self.lines:
            self.lines[rank].send(command)

    def end_lines(self) -> None:
        for line in list(self.lines.values()):
            line.end()

    def close(self, *, keep_logs: bool) -> None:
        """The directory is removed, unless logs in it tell why a rank was lost."""
        self._closed = True
        self.end_lines()
        with contextlib.suppress(OSError, AuthenticationError, EOFError):
            Client(str(self.directory / "ranks"), family="AF_UNIX").close()  # wakes the thread that accepts
        self._listener.close()
        if not keep_logs:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                time.sleep(_ACCEPT_SECONDS)
                continue
            try:
                threading.Thread(target=self._read, args=(connection,), daemon=True).start()
            except RuntimeError:  # no more threads: its rank hears that the line has ended
                connection.close()

    def _read(self, connection: Connection) -> None:
        rank, line, key = None, Line(connection), bytes.fromhex(self.key)
        try:
            deliver_challenge(connection, key)  # here: one that says nothing must not keep others from being accepted
            answer_challenge(connection, key)
            hello = connection.recv()
            if not isinstance(hello, Hello):
                self.problem = f"a rank's first message was {type(hello).__name__}, and not Hello"
                return
            rank = hello.rank
            self.lines[rank] = line
            self.inbox.put((rank, hello))
            while True:
                self.inbox.put((rank, connection.recv()))
        except (EOFError, OSError, AuthenticationError):
            if rank is not None:
                self.inbox.put((rank, None))
        except Exception as error:  # a message that cannot be read, as of another version of the program
            reason = f"a message that cannot be read ({type(error).__name__}: {error})"
            if rank is None:
                self.problem = f"a rank's Hello was {reason}"
            else:
                self.inbox.put((rank, Broken(f"it sent {reason}")))
                self.inbox.put((rank, None))
        finally:
            line.close()


def connect(address: str, hear: Callable[[Command | None], None]) -> Callable[[Hello], Line]:
    """A rank's end, to be opened with its Hello; `hear` is called by a thread with each command, and with None when the line has ended.

    Raises ConfigError if nothing listens at `address`.
    """
    path, _, key = address.rpartition(":")
    try:
        connection = Client(path, family="AF_UNIX", authkey=bytes.fromhex(key))
    except (OSError, ValueError, AuthenticationError, EOFError) as error:
        raise ConfigError(
            f"no run waits for its ranks at {path} ({error}). It has ended, or its rendezvous is stale: start all ranks anew"
        ) from None

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                command = connection.recv()
                if isinstance(command, Hold):
                    recv_handle(connection)  # stays open until this process ends
                else:
                    hear(command)
        hear(None)

    def begin(hello: Hello) -> Line:
        line = Line(connection)
        line.send(hello)
        threading.Thread(target=read, name="owner", daemon=True).start()
        return line

    return begin
