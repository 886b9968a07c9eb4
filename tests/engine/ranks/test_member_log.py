"""A rank of a wide worker whose log cannot be written, as on a full disk, still tells why it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.full_stream import FullStream
from tlora.engine.messages import Broken
from tlora.engine.ranks import rank


def test_the_reason_is_told_where_the_log_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Told:
        def send(self, message: object) -> None:
            told.append(message)

    def connect(_: str, hear: Callable[[Any], None]) -> Callable[[object], Told]:
        hear("no order to enter")
        return lambda _: Told()

    monkeypatch.setattr(rank, "connect", connect)
    monkeypatch.setattr(sys, "stderr", FullStream())
    assert rank.serve("somewhere", 0, 2, of_worker=True) == 1
    assert told == [Broken("AssertionError: no order to enter")]


@pytest.mark.slow
def test_a_rank_ends_where_its_log_takes_nothing() -> None:
    """Its exit goes without a look at threads, which may wait for a worker that is gone."""
    program = (
        "import sys, threading\n"
        "from tlora.engine.ranks import rank\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "rank.serve = lambda *_, **options: 7\n"
        "sys.stdout.write('what was not written yet')\n"
        "rank.main()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            check=False,
            input=b"",
            stdout=full,
            stderr=full,
            env=environment | {"RANK": "0", "WORLD_SIZE": "2"},
            timeout=600,
        )
    assert ended.returncode == 7
