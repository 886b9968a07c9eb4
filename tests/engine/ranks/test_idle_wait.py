"""A rank that waits: nobody is told that it waited for others while its own device computed."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch

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


def test_what_comes_later_has_cost_the_time_since_then() -> None:
    inbox: queue.SimpleQueue[str] = queue.SimpleQueue()
    looks: list[float] = []

    class Counted(Busy):
        @property
        def done(self) -> bool:
            looks.append(time.monotonic())
            if super().done:
                threading.Timer(0.05, inbox.put, ("mail",)).start()
                return True
            return False

    began = time.monotonic()
    found, seconds = wait_for(inbox, Counted(4))  # through at the fifth look
    assert found == "mail" and 0.04 < seconds <= time.monotonic() - began - (looks[4] - looks[0])


def test_a_device_that_fails_ends_the_wait() -> None:
    with pytest.raises(RuntimeError, match="CUDA error"):
        wait_for(queue.SimpleQueue(), Busy(2, RuntimeError("CUDA error: an illegal memory access")))
