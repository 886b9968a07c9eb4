"""Notes of what a device has yet to do: told in order, each as soon as it has, while the caller does something else."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import torch

from tlora.engine.messages import Note, Published
from tlora.engine.ranks.spanning import EventSender
from tlora.kernels.device import ToHost

SECONDS = 60  # in which a thread that has something to do does it, on any machine


class Late(ToHost):
    """Of a device that is through when `passed` is set."""

    def __init__(self, value: float, error: Exception | None = None) -> None:
        super().__init__(torch.tensor([value]))
        self.passed, self._error = threading.Event(), error

    @property
    def done(self) -> bool:
        return self.passed.is_set()

    def read(self) -> Any:
        self.passed.wait()
        if self._error is not None:
            raise self._error
        return super().read()


def note(values: list[float]) -> Note:
    return Published("job", 0, int(values[0]))


def test_what_is_done_is_told_at_once_by_the_caller() -> None:
    told: list[tuple[Note, int]] = []
    event_sender = EventSender(lambda note: told.append((note, threading.get_ident())))
    event_sender.tell_when(ToHost(torch.tensor([1.0])), note)
    assert told == [(Published("job", 0, 1), threading.get_ident())]


def test_what_is_not_done_is_told_without_the_caller_and_in_order() -> None:
    told: queue.SimpleQueue[Note] = queue.SimpleQueue()
    event_sender, first, third = EventSender(told.put), Late(1), Late(3)
    event_sender.tell_when(first, note)
    event_sender.tell_when(ToHost(torch.tensor([2.0])), note)  # is done, and has to wait for its turn
    event_sender.tell_when(third, note)
    assert told.empty()
    first.passed.set()
    assert [told.get(timeout=SECONDS) for _ in range(2)] == [Published("job", 0, 1), Published("job", 0, 2)]
    assert told.empty()
    third.passed.set()
    event_sender.flush(wait=True)
    assert told.get_nowait() == Published("job", 0, 3)


def test_what_a_device_fails_with_is_raised_in_the_caller() -> None:
    event_sender, late = EventSender(lambda note: None), Late(1, RuntimeError("CUDA error: an illegal memory access"))
    event_sender.tell_when(late, note)
    event_sender.flush()
    late.passed.set()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        event_sender.flush(wait=True)
    event_sender.flush(wait=True)


def test_a_failure_is_raised_before_the_next_note() -> None:
    told: list[Note] = []
    event_sender, late = EventSender(told.append), Late(1, RuntimeError("CUDA error"))
    event_sender.tell_when(late, note)
    late.passed.set()
    with pytest.raises(RuntimeError, match="CUDA error"):
        while True:
            event_sender.tell_when(ToHost(torch.tensor([2.0])), note)
    assert set(told) <= {Published("job", 0, 2)}
