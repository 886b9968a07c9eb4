"""Stores to test against: SQLite, and a PostgreSQL server that is started once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.desk import JOBS, Desk, at_desk
from tests.service.postgres import make_database, postgres_server
from tests.service.served import ROW, Served, serving

_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def forked(forked_children: None) -> None:
    """Whatever a server starts, and what a test does. A test of a start itself says so (`real_start`)."""


@pytest.fixture(autouse=True)
def swept_by_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of this process does not sweep each minute, in the midst of a test on a busy machine: tests do when they want it."""
    monkeypatch.setattr("tlora.service.housekeeping._EVERY_SECONDS", 1e6)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    with postgres_server() as directory:
        yield directory


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store.db'}"
    return make_database(request.getfixturevalue("postgres"), f"store{next(_numbers)}")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server whose jobs are read and trained at once."""
    with serving(tmp_path / "server") as found:
        yield found


@pytest.fixture
def served_slowly(tmp_path: Path) -> Iterator[Served]:
    """One whose jobs train as the test says."""
    with serving(tmp_path / "server", eager=False) as found:
        yield found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a jobs file and its data, where the user is."""
    directory = tmp_path / "here"
    directory.mkdir()
    (directory / "jobs.yaml").write_text(JOBS)
    (directory / "data.jsonl").write_bytes(ROW * 8)
    (directory / "same.jsonl").write_bytes(ROW * 8)
    monkeypatch.chdir(directory)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("COLUMNS", "300")
    return directory


@pytest.fixture
def job_controller(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Jobs are trained at once."""
    yield from at_desk(tmp_path / "server", monkeypatch)


@pytest.fixture
def slow_desk(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    """Jobs are trained when the test says so."""
    yield from at_desk(tmp_path / "server", monkeypatch, eager=False)
