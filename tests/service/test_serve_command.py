"""`tlora serve` before it serves: addresses, options, and bases whose shape cannot be had."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.service.served import Served, config_of, serving
from tlora.cli.server_commands import _numbers, named_bases
from tlora.errors import ConfigError, ModelError
from tlora.service import base_shapes
from tlora.service.base_shapes import Precision, find_outline
from tlora.service.problems import RefusedError
from tlora.service.server import _listen, _stop_at_signals, with_store
from tlora.service.services import Notifier

BASE = str(Path(__file__).parents[2] / "demo" / "base")


def test_an_address_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen there"):
            _listen(config_of(tmp_path, port=taken.getsockname()[1]))


def test_options(tmp_path: Path) -> None:
    found = named_bases([f"a={tmp_path}", "org/name", str(tmp_path)])
    assert found == {
        "a": str(tmp_path),
        "org/name": "org/name",
        tmp_path.name: str(tmp_path),
    }
    assert _numbers("0, 2") == [0, 2]
    with pytest.raises(ConfigError, match="numbers of GPUs"):
        _numbers("all")


def test_whoever_owns_the_directory_reaches_the_store_of_a_running_server(served: Served) -> None:
    services = served.opened.services
    assert with_store(services.config, lambda connection: connection.exec_driver_sql("SELECT count(*) FROM tenants").scalar()) == 1


def test_an_outline_is_made_once_and_again_where_it_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = find_outline(tmp_path, BASE, Precision())
    assert first.linears and first.bytes > 0 and first.vocab_size > 0
    (path,) = tmp_path.glob("*.json")
    path.write_text("{torn")
    assert find_outline(tmp_path, BASE, Precision()) == first
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)  # it is there: nothing is started
        assert find_outline(tmp_path, BASE, Precision()) == first
    with pytest.raises(ModelError, match="nowhere"):
        find_outline(tmp_path, str(tmp_path / "nowhere"), Precision())
    monkeypatch.setattr(base_shapes, "_SECONDS", 0.0)
    with pytest.raises(ModelError, match="not found out within"):
        find_outline(tmp_path, BASE, Precision("float32"))


def test_room_for_streams_is_given_back(tmp_path: Path) -> None:
    with serving(tmp_path, limits={"streams": 1}) as served:
        services = served.opened.services
        caller = services.ring.find(served.key("alice"))
        assert caller is not None

        async def run() -> None:
            async with services.stream_of(caller):
                with pytest.raises(RefusedError, match="streams of this tenant"):
                    async with services.stream_of(caller):
                        pass
            async with services.stream_of(caller):
                pass

        asyncio.run(run())
        assert services.streams[caller.tenant] == 0


def test_a_bell_wakes_all_who_wait() -> None:
    async def run() -> None:
        notifier = Notifier()
        notifier.ring()  # nobody is attached: nothing happens
        notifier.attach()
        waiting = [asyncio.create_task(notifier.wait(3600)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.to_thread(notifier.ring)
        await asyncio.gather(*waiting)
        await notifier.wait(0.001)  # or its time is over

    asyncio.run(run())


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_second_ctrl_c_lets_the_server_end_in_order(tmp_path: Path, first: signal.Signals) -> None:
    """uvicorn alone breaks the application's end off there, and dies of a SIGHUP, which a closed terminal sends."""
    told: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGINT)
        told.append((await receive())["type"])
        await send({"type": "lifespan.shutdown.complete"})

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with closing(_listen(config_of(tmp_path, port=0))) as listener:
            server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="on"))
            received = _stop_at_signals(server)
            server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert received == [first, signal.SIGINT] and told == ["lifespan.shutdown"]
