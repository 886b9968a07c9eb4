"""A controller's end of one connection, with its own threads for reading and writing, so that no worker can block the controller."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from tlora.cluster.listeners import Admit, Peer
from tlora.link.authentication import AdmissionError
from tlora.link.lines import Connection, Line
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


class Session:
    """`inbox` gets all messages in order, and `Gone` last. A connection for files is all `serve_files`' own."""

    def __init__(
        self, connection: Connection, admit: Admit, inbox: queue.SimpleQueue[Heard], serve_files: Callable[[Line, OpenStore], None]
    ) -> None:
        self._serve_files = serve_files
        self._admit, self._line, self._inbox = admit, Line(connection), inbox
        self._outgoing: queue.SimpleQueue[FromController | None] = queue.SimpleQueue()
        self.ended = threading.Event()
        threading.Thread(target=self._read, name="session", daemon=True).start()
        threading.Thread(target=self._write, name="session-writer", daemon=True).start()

    def send(self, message: FromController) -> None:
        self._outgoing.put(message)

    def refuse(self, reason: str) -> None:
        """Send the worker the refusal and end the connection."""
        self._outgoing.put(Refusal(reason))
        self._outgoing.put(None)

    def close(self) -> None:
        self._outgoing.put(None)
        self._line.end()

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            self._line.send(controller_line(message))
        self._line.end()

    def _read(self) -> None:
        reason, refuse = "", True
        try:
            reason = self._converse()
        except TimeoutError:
            reason = f"a connection without a Hello for {HELLO_SECONDS:g} s"
        except AdmissionError as error:
            reason = str(error)
        except OSError as error:  # a stranger
            reason, refuse = str(error), False
        except ValueError as error:
            reason = f"a line that is none of protocol {PROTOCOL}: {_first_line(error)}"
        if reason and refuse:
            self._line.send(controller_line(Refusal(reason)))
        self._inbox.put(Gone(self, reason))
        self.ended.set()
        self.close()
        self._line.close()

    def _converse(self) -> str:
        """Read until the end. Returns the connection's fault, if it has one. Raises as `Admit` does, and TimeoutError, ValueError."""
        peer = self._admit(self._line)
        first = self._line.read_line(HELLO_SECONDS)
        if first is None:
            return "a connection that ended before its Hello"
        if peer.is_remote and (opened := _parse_opening(first)) is not None:
            self._serve_files(self._line, opened)
            return ""
        self._inbox.put(Arrived(self, peer, _parse_hello(first)))
        for line in self._line.lines():
            message: FromWorker = parse_worker_line(line)
            if isinstance(message, Hello):
                return "a second Hello"
            self._inbox.put(Spoke(self, message))
        return ""


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


def _first_line(error: ValueError) -> str:
    return " ".join(str(error).split())[:300]
