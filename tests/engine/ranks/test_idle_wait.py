"""A rank that waits: nobody is told that it waited for others while its own device computed."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
import torch

from tlora.engine import driver
from tlora.engine.driver import wait_for
from tlora.kernels.device import ToHost


class Busy(ToHost):
    """Of a device that is through after so many looks at it, or fails."""

    def __init__(self, looks: int, error: Exception | None = None) -> None:
        super().__init__(torch.empty(0))
        self.left, self._error = looks, error

    @property
    def done(self) -> bool:
        self.left -= 1
        if self.left < 0 and self._error is not None:
            raise self._error
        return self.left < 0


def test_what_comes_while_the_device_computes_has_cost_nothing() -> None:
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    inbox.put("mail")
    assert wait_for(inbox, Busy(1000)) == ("mail", 0.0)


def test_what_comes_later_has_cost_the_time_since_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds for each look at a device that computes, which do not count, and seven until the mail comes."""
    now = 100.0

    class Inbox(queue.SimpleQueue[str]):
        def get(self, block: bool = True, timeout: float | None = None) -> str:
            nonlocal now
            now += 7.0 if timeout is None else 3.0
            if timeout is not None:
                raise queue.Empty
            return "mail"

    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now))
    assert wait_for(Inbox(), Busy(4)) == ("mail", 7.0)
    assert now == 100.0 + 4 * 3.0 + 7.0, "it looks as often as the device is busy"


def test_a_device_that_fails_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match="CUDA error"):
        wait_for(queue.SimpleQueue(), Busy(2, RuntimeError("CUDA error: an illegal memory access")))
