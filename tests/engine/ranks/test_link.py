"""The line between owner and rank, closed by whoever comes first."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe

import pytest

from tlora.engine.ranks.link import Line


def test_threads_that_close_a_line_at_once_close_its_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Pipe()
    handle, closed, close = ours.fileno(), list[int](), os.close
    both = threading.Barrier(2)

    def slow(number: int) -> None:
        closed.append(number)
        threading.Event().wait(0.05)  # another thread may come in between
        close(number)

    monkeypatch.setattr(type(ours), "_close", lambda self: slow(self._handle))
    line = Line(ours)

    def end() -> None:
        both.wait()
        line.close()

    threads = [threading.Thread(target=end) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert closed == [handle]
    theirs.close()
