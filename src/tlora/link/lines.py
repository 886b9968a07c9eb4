"""A socket as a sequence of lines, and the identity of its peer."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol, TypeVar

LONGEST_LINE = 64 << 20  # bytes; the orders of 1,000 jobs take 2 MB
_CHUNK = 1 << 16
T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
_PEER, _TIMEOUT = struct.Struct("3i"), struct.Struct("ll")  # seconds and microseconds, as the kernel has them; 0 of both: none


class Connection(Protocol):
    """A socket, or `TlsStream`."""

    def fileno(self) -> int: ...
    def sendall(self, content: Buffer, /) -> None: ...
    def send(self, content: memoryview, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def recv_into(self, target: memoryview, /) -> int: ...
    def setblocking(self, blocks: bool, /) -> None: ...
    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Line:
    """One end of a connection. `send` and `close` may be called from any thread; one thread reads."""

    def __init__(self, connection: Connection, send_seconds: int = 0, *, takes_files: bool = False) -> None:
        """`send_seconds`: the time the peer has to read a message before the connection is closed; 0: unlimited. With `takes_files`,
        over a unix socket, open files that come with lines stay open in this process.

        The connection is one that blocks, and stays so: who reads has the kernel's timeout. Python's own is of the whole socket, and a
        message that is being sent as it changes fails.
        """
        self._socket, self._lock = connection, threading.Lock()
        self._takes_files = takes_files
        self._read, self._searched = bytearray(), 0  # what was received, and how much of it has no line's end, as `read_ready` knows
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEOUT.pack(send_seconds, 0))
        self._has_timeout = False  # of what is read

    def send(self, *parts: Buffer) -> None:
        """Send a line with its end, and what follows it. If the peer is gone or does not read, the connection is closed, which the reader
        notices.
        """
        with self._lock:
            try:
                for part in parts:
                    self._socket.sendall(part)
            except OSError:
                self.end()

    def send_file(self, line: bytes, file: int) -> None:
        """A line, and with it an open file for the process at the other end of a unix socket: no message can hold one."""
        assert isinstance(self._socket, socket.socket), "a file cannot go over TLS"
        with self._lock:
            try:
                sent = socket.send_fds(self._socket, [line], [file])
                self._socket.sendall(line[sent:])
            except OSError:
                self.end()

    def end(self) -> None:
        """Send nothing more; the reader sees the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; called by the reading thread when it is done."""
        with self._lock:
            self._socket.close()

    def read_line(self, timeout_seconds: float | None = None, longest: int = LONGEST_LINE) -> bytes | None:
        """The next line with its end; None at the end of the connection, of which a torn last line is a part.

        Raises TimeoutError when not all of it has come by then, and ValueError for a line of more than `longest` bytes.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while (end := self._read.find(b"\n")) < 0:
            if len(self._read) > longest:
                raise ValueError(f"a line has more than {longest:,} bytes")
            try:
                chunk = self._until(deadline, self._receive)
            except TimeoutError:
                raise
            except OSError:
                return None
            if not chunk:
                return None
            self._read += chunk
        line = bytes(self._read[: end + 1])
        del self._read[: end + 1]
        return line

    def read_bytes(self, size: int, timeout_seconds: float) -> bytearray:
        """Exactly `size` bytes, which follow a line that announced them. Raises TimeoutError, and ConnectionError at the end before."""
        deadline, content = time.monotonic() + timeout_seconds, bytearray(size)
        target, come = memoryview(content), min(size, len(self._read))
        target[:come] = self._read[:come]
        del self._read[:come]
        while come < size:
            more = self._until(deadline, partial(self._socket.recv_into, target[come:]))
            if not more:
                raise ConnectionResetError("the other end has closed the connection within a file")
            come += more
        return content

    def _until(self, deadline: float | None, receive: Callable[[], T]) -> T:
        """What `receive` gets by then (None: whenever that is). Raises TimeoutError."""
        left = 0.0
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
        if left or self._has_timeout:
            of_kernel = _TIMEOUT.pack(*divmod(math.ceil(1e6 * left), 10**6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, of_kernel)
            self._has_timeout = bool(left)
        try:
            return receive()
        except BlockingIOError:
            raise TimeoutError from None

    def _receive(self) -> bytes:
        if self._takes_files and isinstance(self._socket, socket.socket):
            content, files, _, _ = socket.recv_fds(self._socket, _CHUNK, 1)
            for file in files:
                os.set_inheritable(file, False)
            return content
        return self._socket.recv(_CHUNK)

    # -- for one thread that has many (`reactor.py`) --------------------------------------------------------------------

    def stop_blocking(self) -> None:
        """From here on `read_ready` and `send_ready` are to be used, and none that waits."""
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_ready(self) -> list[bytes] | None:
        """The lines that were read before, or that one read completes, with their ends; None at the end of the connection. Raises
        BlockingIOError where nothing has come, ValueError as `read_line`.
        """
        if self._searched == len(self._read):
            try:
                chunk = self._receive()
            except BlockingIOError:
                raise
            except OSError:
                return None
            if not chunk:
                return None
            self._read += chunk
        end = self._read.rfind(b"\n", self._searched) + 1
        lines = [line + b"\n" for line in bytes(self._read[:end]).split(b"\n")[:-1]]
        del self._read[:end]
        self._searched = len(self._read)
        if self._searched > LONGEST_LINE:
            raise ValueError(f"a line has more than {LONGEST_LINE:,} bytes")
        return lines

    def send_ready(self, content: memoryview) -> int:
        """Send what the system takes: how many bytes. After BlockingIOError the same are to be given again. Raises OSError."""
        return self._socket.send(content)

    def lines(self) -> Iterator[bytes]:
        """All lines that follow. Raises ValueError as `read_line`."""
        while (line := self.read_line()) is not None:
            yield line


def peer_pid(connection: socket.socket) -> int | None:
    """The peer's pid on a unix socket, if it is this user's; 0 if the system does not know; None if it is another user's."""
    if not hasattr(socket, "SO_PEERCRED"):  # then the directory's mode is what keeps others out
        return 0
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid if uid == os.geteuid() else None
