"""One database has one server, and belongs to one data directory: what else meets it is refused, and nothing of anybody's jobs is lost."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from sqlalchemy import select, text, update

from tests.service.fake_cluster import fake_hall
from tests.service.postgres import make_database
from tests.service.served import Served, config_of, listening, serving, until
from tlora.errors import ConfigError, TloraError
from tlora.service import server as server_module
from tlora.service.database import lease as leases
from tlora.service.database.lease import Holder, Lease, take_lease
from tlora.service.database.store import open_store
from tlora.service.database.tables import store

_numbers = itertools.count()


@pytest.fixture
def url(postgres: str) -> str:
    """A database of PostgreSQL's that two servers can reach."""
    return make_database(postgres, f"lease{next(_numbers)}")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Beats that a test need not wait for."""
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.05)
    yield


def open_second(directory: Path, url: str | None) -> None:
    with serving(directory, database_url=url):
        pass


def test_a_second_server_on_the_database_is_refused_and_every_job_of_the_first_goes_on(tmp_path: Path, url: str, quick: None) -> None:
    with serving(tmp_path / "first", eager=False, database_url=url) as first:
        ids = [first.submit("alice", name=f"j{number}")["id"] for number in range(4)]
        for job in ids:
            first.wait("alice", job, "queued")
        for name in ("second", "third"):
            with pytest.raises(ConfigError, match=r"data_dir .*(new|no store.json).*of another directory.* a database of its own"):
                open_second(tmp_path / name, url)
        copied = tmp_path / "copy"  # a directory that knows the same store: only the lease tells the two servers apart
        copied.mkdir()
        (copied / "store.json").write_text((tmp_path / "first" / "store.json").read_text())
        with pytest.raises(ConfigError, match=rf"is held by the server over {tmp_path}/first \(process {os.getpid()} on .*since 20.*alive"):
            open_second(copied, url)
        first.cluster.eager = True
        for job in ids:
            until(lambda job=job: job in first.cluster.placed)
            first.cluster.step(job, 1)
            first.cluster.finish(job)
        assert {first.wait("alice", job, "succeeded", "failed")["status"] for job in ids} == {"succeeded"}


@pytest.mark.soak
@pytest.mark.parametrize("times", [0, *(pytest.param(times, marks=pytest.mark.soak) for times in range(1, 10))])
def test_of_many_servers_that_start_at_once_one_gets_the_database(tmp_path: Path, url: str, quick: None, times: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    open_store(url).dispose()
    engine = open_store(url)
    with ThreadPoolExecutor(8) as pool:
        tries = [
            pool.submit(take_lease, engine, Holder(f"server {n}", f"place {n}"), lambda _, found: found or "store-1") for n in range(8)
        ]
        first = until(lambda: next((one.result() for one in tries if one.done() and one.exception() is None), None))
        beating = Lease(first.store_id, first.epoch)
        while not all(one.done() for one in tries):
            with engine.begin() as connection:
                beating.beat(connection)
    assert sum(one.exception() is None for one in tries) == 1
    engine.dispose()


def test_the_next_server_starts_at_once_after_a_clean_end_and_after_a_kill_at_the_same_place(database_url: str) -> None:
    engine = open_store(database_url)
    first = take_lease(engine, Holder("one", "here"), lambda _, found: found or "store-1")
    assert take_lease(engine, Holder("one again", "here"), lambda _, found: found or "none").epoch == first.epoch + 1
    second = Lease("store-1", first.epoch + 1)
    with engine.begin() as connection:
        second.release(connection)
    assert take_lease(engine, Holder("other", "elsewhere"), lambda _, found: found or "none").epoch == first.epoch + 2
    engine.dispose()


@dataclass
class Clock:
    """Steady, and as fast as its test wants. `then` is called whenever it is waited for."""

    then: Callable[[], None] = lambda: None
    at: float = 0.0

    def wait(self, seconds: float) -> None:
        self.at += seconds
        self.then()


@pytest.mark.parametrize("set_by", [0.0, 2 * 3600.0, -2 * 3600.0], ids=["right", "two hours fast", "two hours slow"])
def test_a_holder_that_beats_no_more_is_followed_once_its_lease_has_ended(database_url: str, set_by: float) -> None:
    """Whatever the clock of the database has been set to since."""
    engine, clock = open_store(database_url), Clock()
    first = take_lease(engine, Holder("one", "here"), lambda _, found: found or "store-1")
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        connection.execute(update(store).values(heartbeat=store.c.heartbeat - set_by))
    second = take_lease(engine, Holder("two", "elsewhere"), lambda _, found: found or "none", lambda: clock.at, clock.wait)
    assert (second.epoch, second.store_id) == (first.epoch + 1, "store-1")
    assert leases.LEASE_SECONDS <= clock.at < leases.LEASE_SECONDS + 1
    engine.dispose()


def test_a_standby_waits_as_long_as_the_holder_beats_and_follows_one_lease_later(database_url: str) -> None:
    engine = open_store(database_url)
    first = take_lease(engine, Holder("one", "here"), lambda _, found: found or "store-1")
    dies_at = 10 * leases.LEASE_SECONDS

    def beat() -> None:
        if clock.at % leases.BEAT_SECONDS == 0 and clock.at <= dies_at:
            with engine.connect().execution_options(writes=True) as connection, connection.begin():
                first.beat(connection)

    clock = Clock(beat)
    following = Holder("two", "elsewhere")
    second = take_lease(engine, following, lambda _, found: found or "none", lambda: clock.at, clock.wait, standby=True)
    assert second.epoch == first.epoch + 1
    assert dies_at + leases.LEASE_SECONDS <= clock.at <= dies_at + leases.LEASE_SECONDS + 2
    engine.dispose()


@pytest.mark.parametrize("set_by", [2 * 3600.0, -2 * 3600.0], ids=["ahead", "back"])
def test_a_holder_that_beats_is_alive_by_any_clock(database_url: str, set_by: float, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_store(database_url)
    first = take_lease(engine, Holder("one", "here"), lambda _, found: found or "store-1")
    monkeypatch.setattr(leases, "_clock", lambda _: time.time() + set_by)

    def beat() -> None:
        if clock.at % leases.BEAT_SECONDS == 0:
            with engine.connect().execution_options(writes=True) as connection, connection.begin():
                first.beat(connection)

    clock = Clock(beat)
    with pytest.raises(ConfigError, match="is held by one since .*, which is alive"):
        take_lease(engine, Holder("two", "elsewhere"), lambda _, found: found or "none", lambda: clock.at, clock.wait)
    assert clock.at <= leases.BEAT_SECONDS + 1
    engine.dispose()


def test_a_server_that_loses_its_lease_writes_nothing_more_and_ends_with_a_message(tmp_path: Path, url: str) -> None:
    """In a process of its own, that is stopped for longer than its lease lasts."""
    config = config_of(tmp_path / "first", port=0, database_url=url)
    said = tmp_path / "said"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            backend_factory, _, _ = fake_hall(config.directory)
            opened = server_module.open_server
            server_module.open_server = lambda found: opened(found, backend_factory)  # type: ignore[assignment]
            server_module.serve(config, lambda _: None)
        except TloraError as error:
            said.write_text(str(error))
            status = 2
        finally:
            os._exit(status)
    until((config.directory / "address").is_file)
    with httpx.Client(base_url=(config.directory / "address").read_text().strip(), timeout=60) as client:
        client.headers["X-API-Key"] = (config.directory / "first-key").read_text().strip()
        until(lambda: client.get("/readyz").status_code == 200)
        os.kill(child, signal.SIGSTOP)
        engine = open_store(url)
        with engine.begin() as connection:
            connection.execute(update(store).values(heartbeat=0.0))
        clock = Clock()
        take_lease(engine, Holder("the other server", "elsewhere"), lambda _, found: str(found), lambda: clock.at, clock.wait)
        os.kill(child, signal.SIGCONT)
        answer = client.post("/v1/keys", json={"name": "late"})
    assert answer.status_code == 503, answer.text
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert "was taken over by the other server" in said.read_text()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM keys WHERE name = 'late'")).scalar() == 0
        assert connection.execute(select(store.c.holder)).scalar() == "the other server", "the loser released nothing"
    engine.dispose()


def upload_and_end(served: Served) -> str:
    file = served.upload("alice")
    job = served.submit("alice", file=file)
    served.wait("alice", job["id"], "succeeded")
    return file


@pytest.mark.parametrize("kind", ["gone", "gone and never known", "emptied"])
def test_without_its_database_a_directory_is_refused_and_keeps_all_uploads(tmp_path: Path, kind: str, url: str) -> None:
    place, address = tmp_path / "server", url if kind == "emptied" else None
    with serving(place, database_url=address) as served:
        upload_and_end(served)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.parent.parent.name == "files"}
    assert before
    if kind == "emptied":
        engine = open_store(url)
        with engine.begin() as connection:
            connection.execute(text("DROP SCHEMA public CASCADE"))
            connection.execute(text("CREATE SCHEMA public"))
        engine.dispose()
    else:
        for path in place.glob("tlora.db*"):
            path.unlink()
    if kind == "gone and never known":  # of a version that wrote none
        (place / "store.json").unlink()
    with pytest.raises(ConfigError, match=r"holds a server's uploads and jobs.*Put the database back from a backup, or begin anew"):
        open_second(place, address)
    assert {path: path.read_bytes() for path in before} == before and not (place / "tlora.db").exists()
    open_second(tmp_path / "new", None)  # the remedy


def test_a_database_of_another_directory_is_refused_in_both_ways(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with serving(tmp_path / name) as served:
            upload_and_end(served)
    (tmp_path / "b" / "tlora.db").replace(tmp_path / "a" / "tlora.db")
    with pytest.raises(ConfigError, match=r"belongs to the store store-\w+, and the database .* is that of the store store-"):
        open_second(tmp_path / "a", None)


def test_a_store_of_the_version_before_is_taken_with_its_directory_alone(tmp_path: Path, url: str) -> None:
    with serving(tmp_path / "old", database_url=url) as served:
        file = upload_and_end(served)
    (tmp_path / "old" / "store.json").unlink()
    engine = open_store(url)
    with engine.begin() as connection:
        connection.execute(store.delete())
    with pytest.raises(ConfigError, match=r"is new, and the database .* has the files and jobs of another directory"):
        open_second(tmp_path / "new", url)
    with serving(tmp_path / "old", database_url=url) as served:
        assert [one["id"] for one in served.ask("alice", "GET", "/v1/files", 200)["data"]] == [file]
    engine.dispose()
    assert json.loads((tmp_path / "old" / "store.json").read_text())["settled"] is True


@pytest.mark.parametrize("content", ["", "{", "[]", '{"store": "store-1"}', "\0\0\0"])
def test_a_damaged_id_of_the_store_is_refused(tmp_path: Path, content: str) -> None:
    open_second(tmp_path / "server", None)
    (tmp_path / "server" / "store.json").write_text(content)
    with pytest.raises(ConfigError, match=r"store.json: is damaged.*Put it back from a backup"):
        open_second(tmp_path / "server", None)


@pytest.mark.parametrize("content", ["", "\n", "00" * 31, "zz" * 32, "00" * 33])
def test_an_empty_or_cut_secret_is_refused_and_never_replaced(tmp_path: Path, content: str) -> None:
    open_second(tmp_path / "server", None)
    secret = tmp_path / "server" / "secret"
    secret.write_text(content)
    with pytest.raises(ConfigError, match=r"secret: does not hold 64 hexadecimal digits.*or remove it for a new one"):
        open_second(tmp_path / "server", None)
    assert secret.read_text() == content
    secret.unlink()
    open_second(tmp_path / "server", None)  # the remedy


def test_a_job_whose_files_the_server_has_lost_waits_and_is_not_failed(tmp_path: Path) -> None:
    place = tmp_path / "server"
    with serving(place, eager=False) as served:
        job = served.submit("alice")["id"]
        served.wait("alice", job, "queued")
        keys = served.keys
    (upload,) = (place / "files").glob("*/*.jsonl")
    upload.rename(tmp_path / "mounted later")
    for tokens in (place / "tokens").glob("*/*"):
        tokens.rename(tmp_path / f"{tokens.name} of the same disk")
    with serving(place) as served:
        served.keys = keys
        found = until(lambda: one if "lost" in ((one := served.ask("alice", "GET", f"/v1/jobs/{job}"))["waiting_for"] or "") else None)
        assert found["status"] in ("preparing", "queued") and "file data.jsonl" in found["waiting_for"]
        (tmp_path / "mounted later").rename(upload)
        served.opened.controller._look_again(job)  # pyright: ignore[reportPrivateUsage]  # it does so every ten seconds
        served.wait("alice", job, "succeeded")


def test_beats_are_written_and_stop_with_the_server(tmp_path: Path, quick: None) -> None:
    with listening(tmp_path / "server") as (served, _):
        services = served.opened.services

        def beat() -> float:
            return services.read(lambda connection: connection.execute(select(store.c.heartbeat)).scalar_one())

        first = beat()
        until(lambda: beat() > first)
        assert first <= time.time()
    engine = open_store(f"sqlite:///{tmp_path / 'server' / 'tlora.db'}")
    with engine.connect() as connection:
        assert connection.execute(select(store.c.holder, store.c.heartbeat)).one() == ("", 0.0)
    engine.dispose()
