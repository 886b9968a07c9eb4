"""A controller's end of one connection. A thread of its own admits it; from its Hello on the controller's thread reads and writes it, as it
does all others (`Inbox`).
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from tlora.cluster.listeners import Peer
from tlora.link.authentication import AdmissionError
from tlora.link.lines import Connection, Line
from tlora.link.reactor import Channel, Reactor
from tlora.link.transfer import OpenStore, parse_request_line
from tlora.worker_protocol import PROTOCOL, Alive, Envelope, FromController, FromWorker, Hello, Refusal, controller_line, parse_worker_line

HELLO_SECONDS = 10.0  # for the first line


@dataclass(frozen=True)
class Arrived:
    """A connection has said Hello. `peer` is the process at its other end."""

    session: Session
    peer: Peer
    hello: Hello


@dataclass(frozen=True)
class Spoke:
    session: Session
    message: Envelope | Alive


@dataclass(frozen=True)
class Gone:
    """The connection has ended, by itself or for `reason`."""

    session: Session
    reason: str = ""


Heard = Arrived | Spoke | Gone


T = TypeVar("T")


class Inbox(Generic[T]):
    """What is heard of connections, and what other threads put in."""

    def __init__(self, reactor: Reactor) -> None:
        self._reactor, self._items = reactor, queue.SimpleQueue[T]()
        self.is_closed = False

    def put(self, item: T) -> None:
        """From any thread."""
        self._items.put(item)
        self._reactor.wake()

    def get(self, timeout: float) -> T:
        """The next item. Where there is none, read and write the connections, and wait. Raises queue.Empty."""
        with contextlib.suppress(queue.Empty):
            return self._items.get_nowait()
        self._reactor.turn(timeout)
        return self._items.get_nowait()

    def close(self) -> list[T]:
        """What is in it; what comes later is nobody's."""
        self.is_closed = True
        return [self._items.get_nowait() for _ in range(self._items.qsize())]


class Session:
    """`inbox` gets all messages in order, and `Gone` last. A connection for files is all `serve_files`' own."""

    def __init__(
        self,
        connection: Connection,
        admit: Callable[[Line], Peer],
        inbox: Inbox[Any],
        serve_files: Callable[[Line, OpenStore], None],
        reactor: Reactor,
    ) -> None:
        """Raises OSError, RuntimeError: then nothing is admitted."""
        self._serve_files, self._reactor = serve_files, reactor
        self._admit, self._line, self._inbox = admit, Line(connection), inbox
        self._channel = Channel(self._line, self._hear, self._end)
        threading.Thread(target=self._get_in, name="session", daemon=True).start()

    # -- for the controller's thread, once it has `Arrived` ------------------------------------------------------------

    def open(self) -> None:
        """Hear what follows the Hello."""
        self._reactor.add(self._channel)

    def close(self) -> None:
        """End a connection that is not open."""
        self._line.end()
        self._line.close()

    def send(self, message: FromController) -> None:
        """Send it, if the connection has not ended. After a Refusal it ends."""
        self._reactor.send(self._channel, controller_line(message), is_last=isinstance(message, Refusal))

    # -- for its own ---------------------------------------------------------------------------------------------------

    def _get_in(self) -> None:
        """Read until the Hello, or all of a connection for files."""
        fault = None
        try:
            peer = self._admit(self._line)
            first = self._line.read_line(HELLO_SECONDS)
            if first is None:
                raise AdmissionError("a connection that ended before its Hello")
            opened = _parse_opening(first) if peer.is_remote else None
            if opened is None:
                self._inbox.put(Arrived(self, peer, _parse_hello(first)))
                if self._inbox.is_closed:
                    self.close()
                return
            self._serve_files(self._line, opened)
        except (OSError, ValueError) as error:
            fault = error
        self._line.send(self._end(fault))
        self.close()

    def _hear(self, line: bytes) -> None:
        message: FromWorker = parse_worker_line(line)
        if isinstance(message, Hello):
            raise AdmissionError("a second Hello")
        self._inbox.put(Spoke(self, message))

    def _end(self, error: Exception | None) -> bytes:
        """The connection has ended, for the error if there is one. Returns what its peer is told."""
        match error:
            case None:
                reason = ""
            case TimeoutError():
                reason = f"a connection without a Hello for {HELLO_SECONDS:g} s"
            case AdmissionError() | OSError():
                reason = str(error)
            case _:
                reason = f"a line that is none of protocol {PROTOCOL}: {_first_line(error)}"
        self._inbox.put(Gone(self, reason))
        is_stranger = isinstance(error, OSError) and not isinstance(error, TimeoutError)
        return controller_line(Refusal(reason)) if reason and not is_stranger else b""


def _parse_opening(line: bytes) -> OpenStore | None:
    """Read the first line of a connection for files; None if it is another's."""
    try:
        opened = parse_request_line(line)
    except ValueError:
        return None
    return opened if isinstance(opened, OpenStore) else None


def _parse_hello(line: bytes) -> Hello:
    """Read a Hello. Raises ValueError; of another version of the protocol only the number is read."""
    try:
        found: object = json.loads(line)
    except RecursionError:
        raise ValueError("the first line is nested too deeply to be a Hello") from None
    fields = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    if fields.get("kind") != "hello":
        raise ValueError("the first line must be a Hello")
    if fields.get("protocol") != PROTOCOL:
        raise ValueError(f"this worker speaks protocol {fields.get('protocol')!r}. Start it with the controller's version of tlora")
    hello = parse_worker_line(line)
    assert isinstance(hello, Hello), hello
    return hello


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
