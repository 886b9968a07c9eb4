"""Stores to test against: SQLite, and a PostgreSQL server that is started once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.postgres import make_database, postgres_server
from tests.service.served import Served, serving

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
