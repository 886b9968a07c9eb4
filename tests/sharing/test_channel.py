"""How long one waits for a peer (`sharing/channel.py`)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from tlora.sharing import channel
from tlora.sharing.channel import InterruptedWaitError, PeerWait


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a clock that goes on by a second each time that somebody looks at it."""
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=itertools.count().__next__, sleep=lambda _: None))
    return SimpleNamespace(is_alive=lambda _: True)


def becomes_true(after: int) -> Any:
    """At its call number `after`, from 0 on."""
    calls = itertools.count()
    return lambda: next(calls) >= after


def test_a_wait_is_counted_from_when_the_device_is_idle(peers: Any) -> None:
    always, busy_at_first, busy = (PeerWait(peers, idle=idle) for idle in (lambda: True, becomes_true(10), lambda: False))
    for wait in (always, busy_at_first, busy):
        wait.until(becomes_true(20), 1)
    assert always.seconds > busy_at_first.seconds > busy.seconds == 0
    ready = PeerWait(peers)
    ready.until(lambda: True, 1)
    assert ready.seconds == 0


def test_an_interrupted_wait_counts_too(peers: Any) -> None:
    wait = PeerWait(peers, becomes_true(3))
    with pytest.raises(InterruptedWaitError):
        wait.until(lambda: False, 1)
    assert wait.seconds > 0
