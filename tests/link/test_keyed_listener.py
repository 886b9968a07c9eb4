"""A port for those with its key, where connections come for which there is no thread, or that have ended already."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tlora.link import keyed_listener, tls_port
from tlora.link.address import tcp_place
from tlora.link.keyed_listener import KeyedListener, dial_keyed
from tlora.link.lines import Connection, Line


@pytest.mark.parametrize("fault", [OSError("it has ended"), RuntimeError("can't start new thread")])
def test_a_connection_that_cannot_be_taken_gives_its_place_back(fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [fault]

    def make_line(connection: Connection, send_seconds: int) -> Line:
        if faults:
            raise faults.pop()
        return Line(connection, send_seconds)

    monkeypatch.setattr(tls_port, "_MOST_STRANGERS", 1)
    monkeypatch.setattr(keyed_listener, "Line", make_line)
    listener = KeyedListener("127.0.0.1", tmp_path, Line.read_line)
    with socket.create_connection(tcp_place(listener.address)) as first:
        first.settimeout(60)
        assert not first.recv(1) and not faults
    dial_keyed(listener.address, listener.fingerprint, listener.key).close()
    listener.close()
