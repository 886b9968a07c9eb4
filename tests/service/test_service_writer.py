"""The only writer of the store, under cancelled requests and at its own end: no caller hangs, and the server says why it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import OperationalError

from tests.service.fake_cluster import fake_hall
from tests.service.served import Served, config_of, until
from tlora.errors import TloraError
from tlora.service import server as server_module
from tlora.service.database.store import open_store
from tlora.service.database.tables import tenants
from tlora.service.database.writer import StoreError, Together, Writer


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    found = open_store(database_url)
    yield found
    found.dispose()


class Gate:
    """An operation that keeps the writer until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, _: Connection) -> str:
        self.reached.set()
        self.open.wait()
        return "written"


def add(name: str) -> Any:
    return lambda connection: connection.execute(tenants.insert().values(id=name, name=name, created=0.0)) and None


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(tenants.c.name).order_by(tenants.c.name)).scalars())


@pytest.mark.soak
def test_cancelled_at_any_moment_nothing_is_half_told(engine: Engine) -> None:
    """Thousands of operations of which a third is cancelled from another thread: written if and only if not cancelled."""
    writer = Writer(engine)
    futures = {f"t{number:05d}": writer.submit(add(f"t{number:05d}")) for number in range(3000)}
    cancelled = {name for number, (name, future) in enumerate(futures.items()) if number % 3 == 0 and future.cancel()}
    writer.do(lambda _: None)
    assert set(names(engine)) == set(futures) - cancelled
    assert all(future.result() is None for name, future in futures.items() if name not in cancelled)
    writer.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), MemoryError("of the thread")], ids=lambda one: type(one).__name__)
def test_an_end_of_the_writer_fails_all_that_waits_and_is_reported(engine: Engine, error: BaseException) -> None:
    told: list[str] = []
    gate, calls = Gate(), list[str]()

    def fail(point: str) -> None:
        calls.append(point)
        if point == "answered" and len(calls) > 3:
            raise error

    writer = Writer(engine, failpoint=fail)
    writer.end.tell = told.append
    held = writer.submit(gate)
    gate.reached.wait()
    later = [writer.submit(add("first")), writer.submit(add("second"))]
    gate.open.set()
    assert held.result() == "written"
    for future in later:
        assert isinstance(future.exception(), StoreError)
    with pytest.raises(StoreError, match="ended"):
        writer.do(add("too late"))
    until(lambda: told)
    assert told == [writer.end.reason] and type(error).__name__ in told[0]
    writer.close()


def add_all(connection: Connection, wanted: Sequence[str]) -> list[str | Exception]:
    """All of `wanted` in one call, but for those that are refused; a name that is there already makes it raise."""
    for name in wanted:
        if not name.startswith("refused"):
            add(name)(connection)
    return [ValueError(name) if name.startswith("refused") else f"{name} of {len(wanted)}" for name in wanted]


def written_together(engine: Engine, *operations: Any) -> list[Any]:
    """Their futures: all have waited while the writer was busy."""
    writer, gate = Writer(engine), Gate()
    writer.submit(gate)
    gate.reached.wait()
    found = [writer.submit(one) for one in operations]
    gate.open.set()
    writer.close()
    return found


def test_neighbours_of_one_work_are_done_in_one_call(engine: Engine) -> None:
    found = written_together(
        engine, *(Together(add_all, name) for name in ("a", "refused", "b")), add("between"), Together(add_all, "c"), Together(add_all, "d")
    )
    assert [future.result() for future in (found[0], found[2], *found[3:])] == ["a of 3", "b of 3", None, "c of 2", "d of 2"]
    with pytest.raises(ValueError, match="refused"):
        found[1].result()
    assert names(engine) == ["a", "b", "between", "c", "d"]


def test_a_database_that_cannot_be_written_is_logged_once_and_when_it_can_again(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """With what its driver says; requests are told no address."""
    words = 'connection to server at "10.0.0.7", port 5432 failed'
    silent: list[Exception] = []

    def fail(where: str) -> None:
        if silent and where == "before commit":
            raise silent[0]

    writer = Writer(engine, failpoint=fail)
    with caplog.at_level(logging.WARNING):
        silent.append(OperationalError("COMMIT", {}, psycopg.OperationalError(words)))
        for _ in range(2):
            with pytest.raises(StoreError, match=r"the database cannot be written \(its server cannot be reached\); nothing was kept"):
                writer.do(add("no"))
        silent.clear()
        writer.do(add("one"))
        writer.do(add("two"))
    writer.close()
    assert [caplog.text.count(line) for line in (words, "the database can be written again")] == [1, 1] and names(engine) == ["one", "two"]


def test_a_bell_that_cannot_ring_ends_nothing(engine: Engine) -> None:
    def break_bell() -> None:
        raise RuntimeError("no loop")

    writer = Writer(engine, break_bell)
    writer.do(add("a"))
    writer.do(add("b"))
    assert names(engine) == ["a", "b"]
    writer.close()


def test_a_request_that_is_cancelled_after_its_commit_is_announced_all_the_same(served: Served) -> None:
    services, gate, told = served.opened.services, Gate(), list[str]()

    async def run() -> None:
        request = asyncio.create_task(services.write(gate, told.append))
        await asyncio.to_thread(gate.reached.wait)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        gate.open.set()
        while not told:
            await asyncio.sleep(0)

    asyncio.run(run())
    assert told == ["written"]
    served.submit("alice")  # the writer goes on


def test_the_writers_end_ends_the_server_with_a_message_and_answers_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: `serve` until its end."""
    config = config_of(tmp_path / "server", port=0)
    trigger, said = tmp_path / "trigger", tmp_path / "said"

    def fail(point: str) -> None:
        if trigger.exists() and point == "operation":
            raise SystemExit("of the thread alone")

    child = os.fork()
    if child == 0:
        status = 1
        try:
            backend_factory, _, _ = fake_hall(config.directory)
            opened = server_module.open_server
            monkeypatch.setattr(server_module, "open_server", lambda found: opened(found, backend_factory, fail))
            lines: list[str] = []
            server_module.serve(config, lines.append)
        except TloraError as error:
            said.write_text("\n".join([*lines, str(error)]))
            status = 2
        finally:
            os._exit(status)
    until((config.directory / "address").is_file)
    address = (config.directory / "address").read_text().strip()
    key = (config.directory / "first-key").read_text().strip()
    with httpx.Client(base_url=address, headers={"X-API-Key": key}, timeout=60) as client:
        until(lambda: client.get("/readyz").status_code == 200)
        trigger.touch()
        answer = client.post("/v1/keys", json={"name": "one"})
    assert answer.status_code == 503 and answer.headers["Retry-After"], answer.text
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert f"find it with TLORA_HOME={config.directory} TLORA_URL={address}\n" in said.read_text()
    assert "writer ended (SystemExit" in said.read_text() and "started again" in said.read_text()
