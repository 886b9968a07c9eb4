"""The line between owner and rank, closed by whoever comes first."""

from __future__ import annotations

import os
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Client

import pytest

from tlora.engine.ranks.link import Line, Meeting
from tlora.engine.ranks.messages import Hello


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


@pytest.mark.parametrize("sent", [b"", (529).to_bytes(4, "big"), (529).to_bytes(4, "big") + b"a part"], ids=["nothing", "length", "part"])
def test_lines_that_end_while_a_message_is_read_are_over_at_both_ends(sent: bytes) -> None:
    """The reader's file is its own to close: under another thread's close it read from no file, or from another one of that number."""
    meeting = Meeting()
    path, _, key = meeting.address.rpartition(":")
    rank = Client(path, family="AF_UNIX", authkey=bytes.fromhex(key))
    rank.send(Hello(3, os.getpid(), "host", {}))
    assert meeting.inbox.get() == (3, Hello(3, os.getpid(), "host", {}))
    os.write(rank.fileno(), sent)
    meeting.end_lines()
    assert meeting.inbox.get(timeout=600) == (3, None)
    with pytest.raises(EOFError):
        rank.recv()
    meeting.end_lines()
    meeting.send(3, "what nobody hears")
    meeting.close(keep_logs=False)
    rank.close()
