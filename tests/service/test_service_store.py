"""The store, SQLite and PostgreSQL alike: schema, migrations, group commit, and what is refused."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, select, text
from sqlalchemy.exc import IntegrityError

from tests.service.served import until
from tlora.api import OrderedData, OrderSpec
from tlora.errors import ConfigError
from tlora.service.config import Limits
from tlora.service.database import answer_rows, job_rows, store
from tlora.service.database.store import SCHEMA, open_store, refuse_network_system
from tlora.service.database.tables import files, jobs, metadata, tenants
from tlora.service.database.writer import StoreError, Writer
from tlora.service.keys import create_key, write_first_key
from tlora.service.problems import RefusedError


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    found = open_store(database_url)
    yield found
    found.dispose()


@pytest.fixture
def writer(engine: Engine) -> Iterator[Writer]:
    found = Writer(engine)
    yield found
    found.close()


def add_tenant(connection: Connection, name: str) -> None:
    connection.execute(tenants.insert().values(id=name, name=name, created=0.0))


def names(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(tenants.c.name).order_by(tenants.c.name)).scalars())


def test_migrations_make_the_tables_and_opening_again_changes_nothing(database_url: str, engine: Engine) -> None:
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == SCHEMA
    again = open_store(database_url)
    again.dispose()


def test_a_newer_schema_is_refused(database_url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match="schema 9999 is newer"):
        open_store(database_url)


def test_an_older_sqlite_store_is_copied_before_it_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"sqlite:///{tmp_path / 'tlora.db'}"
    engine = open_store(url)
    with engine.begin() as connection:
        add_tenant(connection, "kept")
    engine.dispose()
    monkeypatch.setattr(store, "SCHEMA", "0004")  # as if this program had one more
    open_store(url).dispose()
    (copy,) = tmp_path.glob("tlora.db.before-0004-*")
    with sqlite3.connect(copy) as found:
        assert found.execute("SELECT name FROM tenants").fetchall() == [("kept",)]
    found.close()
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0})())
    with pytest.raises(ConfigError, match="too little room for a copy"):
        open_store(url)


def test_addresses_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a database's address"):
        open_store("nonsense")
    with pytest.raises(ConfigError, match="Check the address"):
        open_store("postgresql://nobody:secret@127.0.0.1:1/none")
    (tmp_path / "text.db").write_text("this is no database, and long enough to be seen as none " * 10)
    with pytest.raises(ConfigError, match="not a database"):
        open_store(f"sqlite:///{tmp_path / 'text.db'}")


def test_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        open_store("postgresql://nobody:secret@127.0.0.1:1/none")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre"])
def test_sqlite_on_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda1 / ext4 rw 0 0\nserver:/x {tmp_path} {kind} rw 0 0\ntmpfs {tmp_path}/fast tmpfs rw 0 0\n")
    with pytest.raises(ConfigError, match="network file system"):
        refuse_network_system(tmp_path / "data" / "tlora.db", mounts)
    (tmp_path / "fast").mkdir()
    refuse_network_system(tmp_path / "fast" / "tlora.db", mounts)
    refuse_network_system(Path("/tlora.db"), mounts)
    refuse_network_system(tmp_path / "tlora.db", tmp_path / "nothing")


def test_sqlite_is_durable_at_every_commit(tmp_path: Path) -> None:
    engine = open_store(f"sqlite:///{tmp_path / 'tlora.db'}")
    with engine.connect() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar() == 2  # FULL
    engine.dispose()


def test_operations_that_come_together_share_a_commit(engine: Engine) -> None:
    rung: list[int] = []
    writer = Writer(engine, lambda: rung.append(1))
    gate, reached = threading.Event(), threading.Event()

    def hold(_: Connection) -> None:
        reached.set()
        gate.wait()

    first = writer.submit(hold)
    reached.wait()
    waiting = [writer.submit(lambda connection, name=f"t{number:03d}": add_tenant(connection, name)) for number in range(100)]
    gate.set()
    for future in (first, *waiting):
        future.result()
    assert writer.commits <= 3 and writer.operations == 101 and len(rung) == writer.commits
    writer.close()
    assert len(names(engine)) == 100


def test_an_operation_that_raises_undoes_itself_alone(engine: Engine, writer: Writer) -> None:
    def bad(connection: Connection) -> None:
        add_tenant(connection, "half")
        raise RefusedError(409, "no", "no")

    def twice(connection: Connection) -> None:
        add_tenant(connection, "good")

    gate = threading.Event()
    futures = [writer.submit(lambda _: gate.wait()), writer.submit(twice), writer.submit(bad), writer.submit(twice), writer.submit(_other)]
    gate.set()
    assert isinstance(futures[2].exception(), RefusedError)
    assert isinstance(futures[3].exception(), IntegrityError)
    futures[4].result()
    assert names(engine) == ["good", "other"]


def _other(connection: Connection) -> None:
    add_tenant(connection, "other")


def test_a_commit_that_fails_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    """A full disk, as SQLite tells it: its own limit of pages."""
    engine = open_store(f"sqlite:///{tmp_path / 'tlora.db'}")
    writer = Writer(engine)

    def fill(connection: Connection) -> None:
        connection.execute(text("PRAGMA max_page_count = 1"))
        for number in range(200):
            add_tenant(connection, f"{number}" + "x" * 3000)

    with pytest.raises(StoreError, match=r"full.*nothing was kept"):
        writer.do(fill)
    assert names(engine) == []

    def release(connection: Connection) -> None:
        connection.execute(text("PRAGMA max_page_count = 1000000"))

    writer.do(release)
    writer.do(_other)  # it goes on once there is room
    writer.close()
    engine.dispose()


def test_after_its_end_a_writer_refuses(engine: Engine) -> None:
    writer = Writer(engine)
    writer.close()
    writer.close()
    with pytest.raises(StoreError, match="shutting down"):
        writer.do(_other)


def test_a_dead_connection_fails_what_was_on_it_and_nothing_else(postgres: str, request: pytest.FixtureRequest) -> None:
    from tests.service.postgres import make_database

    engine = open_store(make_database(postgres, "dying"))
    writer = Writer(engine)

    def die(connection: Connection) -> None:
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(StoreError):
        writer.do(die)
    writer.do(_other)
    assert names(engine) == ["other"]
    writer.close()
    engine.dispose()


ORDER = OrderSpec.model_validate({"name": "a", "base_model": "base", "data": {"file": "file-1"}})


def prepare(connection: Connection) -> None:
    row = {"id": "file-1", "tenant": "t", "filename": "a.jsonl", "purpose": "fine-tune", "bytes": 1, "sha256": "0", "suffix": ".jsonl"}
    connection.execute(files.insert().values(row | {"created": 0.0}))


def test_jobs_change_by_compare_and_set(engine: Engine, writer: Writer) -> None:
    writer.do(prepare)
    (job,) = writer.do(lambda connection: job_rows.insert_jobs(connection, "t", [ORDER], Limits()))
    change = job_rows.change
    assert writer.do(lambda connection: change(connection, job.id, ("preparing",), "queued"))
    assert not writer.do(lambda connection: change(connection, job.id, ("preparing",), "queued"))
    assert writer.do(lambda connection: change(connection, job.id, ("queued", "running"), "cancelled"))
    assert not writer.do(lambda connection: change(connection, job.id, ("queued", "running"), "succeeded"))
    assert writer.do(lambda connection: job_rows.take_intake(connection, job.id, {})) is None, "it has ended"
    with engine.connect() as connection:
        row = job_rows.row_of(connection, job.id)
        assert row is not None and row.status == "cancelled" and row.ended is not None
        kinds = [event.kind for event in job_rows.list_events(connection, "t", job.id, 0, 10)]
        assert kinds == ["created", "queued", "cancelled"] and job_rows.last_event(connection) == 3
        assert job_rows.open_jobs(connection) == []


@pytest.mark.parametrize("returning", [True, False], ids=["", "a database that returns no inserted rows"])
def test_jobs_keep_the_order_of_their_submission_and_steps_never_go_back(
    engine: Engine, writer: Writer, returning: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not returning:
        monkeypatch.setattr(engine.dialect, "insert_executemany_returning_sort_by_parameter_order", False)
    writer.do(prepare)
    made = writer.do(lambda connection: job_rows.insert_jobs(connection, "t", [ORDER] * 1200, Limits()))
    with engine.connect() as connection:
        assert job_rows.open_jobs(connection) == made and [row.steps for row in made] == [0] * 1200
    for steps in ({made[0].id: 5, made[1].id: 7}, {made[0].id: 3}):
        writer.do(lambda connection, steps=steps: job_rows.set_steps(connection, steps))
    with engine.connect() as connection:
        found = [job_rows.row_of(connection, made[number].id) for number in (0, 1)]
    assert [row.steps for row in found if row is not None] == [5, 7]


def test_batches_that_are_written_together_are_refused_alone(engine: Engine, writer: Writer) -> None:
    def order(**changes: Any) -> OrderSpec:
        return ORDER.model_copy(update=changes)

    absent = order(data=OrderedData.model_validate({"file": ["file-1", "file-2"]}))
    batches = [
        job_rows.Batch("t", [ORDER, order(name="b")]),
        job_rows.Batch("t", [absent]),
        job_rows.Batch("u", [ORDER]),  # another tenant's file
        job_rows.Batch("t", [order(start_from="job-0")]),
        job_rows.Batch("t", [order(name="c"), order(name="d")]),  # the fourth open job would be one too many
        job_rows.Batch("t", [order(name="e")], job_rows.Origin(sweep="sweep-1")),
    ]
    writer.do(prepare)
    found = writer.do(lambda connection: job_rows.insert_batches(connection, batches, Limits(open_jobs=3)))
    assert [error.code for error in found if isinstance(error, RefusedError)] == ["not_found", "not_found", "not_found", "too_many_jobs"]
    assert "'file-2'" in str(found[1]) and "'file-1'" in str(found[2]) and "'job-0'" in str(found[3])
    first, last = found[0], found[5]
    assert isinstance(first, list) and isinstance(last, list)
    assert [(row.name, row.sweep) for row in (*first, *last)] == [("a", None), ("b", None), ("e", "sweep-1")]
    with engine.connect() as connection:
        assert job_rows.open_jobs(connection) == [*first, *last]
        assert [row.job for row in job_rows.list_events(connection, "t", None, 0, 10)] == [row.id for row in (*first, *last)]


def test_answers_are_given_once_a_key(engine: Engine, writer: Writer) -> None:
    counted: list[int] = []

    def work() -> answer_rows.Answer:
        counted.append(1)
        return answer_rows.Answer(201, f"{len(counted)}")

    def ask(tenant: str, key: str | None, payload: str = "p") -> str:
        return writer.do(lambda connection: answer_rows.once(connection, tenant, key, payload, work)).body

    assert [ask("t", "k"), ask("t", "k"), ask("u", "k"), ask("t", None), ask("t", None)] == ["1", "1", "2", "3", "4"]
    with pytest.raises(RefusedError, match="another request"):
        ask("t", "k", "other")
    writer.do(lambda connection: answer_rows.forget_answers(connection, 0.0, time.time()))
    assert ask("t", "k", "other") == "5"


def test_the_first_key_is_made_once_and_lies_in_a_file_of_its_owner_alone(engine: Engine, writer: Writer, tmp_path: Path) -> None:
    path = tmp_path / "first-key"
    path.write_text("of an attacker")
    path.chmod(0o666)
    made = writer.do(lambda connection: write_first_key(connection, path))
    assert made is not None and path.read_text() == made.secret + "\n" and path.stat().st_mode & 0o777 == 0o600
    assert writer.do(lambda connection: write_first_key(connection, path)) is None
    for bad in (("a/b", "x", ["read"]), ("a", "", ["read"]), ("a", "x", ["root"]), ("a", "x", [])):
        with pytest.raises(ConfigError):
            writer.do(lambda connection, bad=bad: create_key(connection, *bad))


def test_a_row_with_text_that_the_database_cannot_hold_fails_alone(engine: Engine, writer: Writer) -> None:
    def odd(connection: Connection) -> Any:
        return add_tenant(connection, "a\x00b")

    gate = threading.Event()
    futures: list[Any] = [writer.submit(lambda _: gate.wait()), writer.submit(odd), writer.submit(_other)]
    gate.set()
    until(lambda: all(future.done() for future in futures))
    assert futures[2].exception() is None and "other" in names(engine)


def test_no_table_is_without_a_tenant_but_those_of_the_operator() -> None:
    assert {name for name, table in metadata.tables.items() if "tenant" not in table.c} == {
        "tenants",
        "job_files",
        "bases",
        "store",
    }
    assert jobs.c.tenant.nullable is False
