"""A port of one process for those who have its key: TLS with a certificate of its own, which they know by its fingerprint.

Workers of several hosts meet so; the controller tells address, fingerprint and key to those that shall. What is said then is theirs.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from tlora import durable
from tlora.errors import ConfigError
from tlora.link.address import tcp_place
from tlora.link.authentication import AdmissionError, AuthOk, Entry, admission_line, read_admission
from tlora.link.lines import Connection, Line
from tlora.link.tls import CUT_SECONDS, connect_tls, make_certificate, server_context
from tlora.link.tls_port import ADMISSION_SECONDS, Stranger, TlsPort, accept_from
from tlora.worker_protocol import Refusal


class KeyedListener:
    """`serve` gets the line of each that comes with the key, in a thread of its own; the line is closed when it returns. What it raises as
    OSError or ValueError ends that line alone.
    """

    def __init__(self, address: str, directory: Path, serve: Callable[[Line], object]) -> None:
        """`address` is one of this host; `directory`, this user's alone, gets the certificate. Raises OSError."""
        text, self.fingerprint = make_certificate("tlora worker")
        certificate = directory / "listener.pem"
        durable.write_file(certificate, text, mode=0o600)
        self._serve, self.key = serve, secrets.token_hex(32)
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = TlsPort(listener, server_context(certificate), self._check)
        self.address, self.close = port.address, port.close
        threading.Thread(target=accept_from, args=(port, self._take), name="keyed-listener", daemon=True).start()

    def _check(self, _: Stranger, entry: Entry) -> None:
        if not secrets.compare_digest(entry.token.encode(), self.key.encode()):
            raise AdmissionError("it comes with another key")

    def _take(self, connection: Connection, admit: Callable[[Line], None]) -> None:
        line = Line(connection, CUT_SECONDS)
        threading.Thread(target=self._meet, args=(connection, line, admit), name="keyed-line", daemon=True).start()

    def _meet(self, connection: Connection, line: Line, admit: Callable[[Line], None]) -> None:
        with contextlib.suppress(OSError, ValueError):  # a stranger, a host that is gone, or a message that cannot be read
            try:
                admit(line)
                self._serve(line)
            except AdmissionError as error:
                line.send(admission_line(Refusal(str(error))))
            finally:
                line.end()
                line.close()


def dial_keyed(address: str, fingerprint: str, key: str) -> Line:
    """A line to a `KeyedListener`. Raises ConfigError, which says why not."""
    try:
        stream = connect_tls(tcp_place(address), fingerprint)
        line = Line(stream, CUT_SECONDS)
        line.send(admission_line(Entry(key, os.getpid(), 0, "")))
        try:
            if not isinstance(read_admission(line, ADMISSION_SECONDS), AuthOk):
                raise ConnectionRefusedError("it lets this worker in no more")
        except OSError:
            line.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{address}: the worker that leads this group is not reached from this host ({error.strerror or error}). Workers of all hosts "
            "must reach each other: open TCP between them, or start that one with --address and one that is reached"
        ) from None
    return line
