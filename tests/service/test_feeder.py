"""Accepted jobs reach the controller whatever becomes of one of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from tests.service.served import until
from tlora.service import order_reader
from tlora.service.order_reader import Accepted, Feeder


class Row:
    def __init__(self, name: str) -> None:
        self.id = name


def accepted(*names: str) -> list[Any]:
    return [Accepted(Row(name)) for name in names]  # type: ignore[arg-type]


def test_jobs_are_taken_up_in_their_order_past_one_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    found: list[str] = []

    def take_up(job: Accepted, _: set[str]) -> None:
        found.append(job.row.id)
        if job.row.id == "bad":
            raise ZeroDivisionError("of the test")

    feeder = Feeder(take_up)
    feeder.put(accepted("a", "bad", "b"))
    feeder.start()
    feeder.put(accepted("c"))
    until(lambda: len(found) == 4)
    feeder.close()
    assert found == ["a", "bad", "b", "c"] and "bad: is taken up when the server starts again" in caplog.text


def test_where_the_store_does_not_answer_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_reader, "STORE_SECONDS", 0.0)
    found, there, failures = list[str](), list[set[str]](), iter([True, True, False])

    def take_up(job: Accepted, paths: set[str]) -> None:
        if job.row.id == "b" and next(failures, False):
            raise OperationalError("SELECT", {}, Exception("gone"))
        found.append(job.row.id)
        there.append(paths)

    feeder = Feeder(take_up)
    feeder.put(accepted("a", "b", "c"))
    feeder.start()
    until(lambda: len(found) == 3)
    feeder.close()
    assert found == ["a", "b", "c"] and there[0] is not there[1] and there[1] is there[2]


def test_those_that_wait_together_share_what_is_known_of_paths_and_the_end_is_at_once() -> None:
    gate, reached, sets = threading.Event(), threading.Event(), list[set[str]]()

    def take_up(_: Accepted, paths: set[str]) -> None:
        sets.append(paths)
        reached.set()
        gate.wait()

    feeder = Feeder(take_up)
    feeder.put(accepted("a"))
    feeder.start()
    reached.wait()
    feeder.put(accepted("b"))
    feeder.put(accepted("c"))
    gate.set()
    until(lambda: len(sets) == 3)
    assert sets[0] is not sets[1] and sets[1] is sets[2]
    feeder.close()
    until(lambda: not feeder._thread.is_alive())
