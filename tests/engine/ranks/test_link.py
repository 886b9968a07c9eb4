"""The line between a leader and its ranks: ended by whoever comes first, and the way of an open file."""

from __future__ import annotations

import fcntl
import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.messages import FROM_RANK, BaseFacts, Fetched, Hello, Sent, Stop, ToRank
from tlora.engine.ranks.link import Meeting, connect
from tlora.engine.ranks.rank_group import RankGroup

HELLO = Hello(3, os.getpid(), "host", {})


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close(keep_logs=False)


@pytest.mark.parametrize("sent", [b"", b'{"kind"', FROM_RANK.encode(HELLO)[:-1]], ids=["nothing", "part", "without its end"])
def test_lines_that_end_while_a_message_is_read_are_over_at_both_ends(meeting: Meeting, sent: bytes) -> None:
    """The reader's file is its own to close: under another thread's close it read from no file, or from another one of that number."""
    heard: queue.SimpleQueue[ToRank | None] = queue.SimpleQueue()
    rank = connect(meeting.address, heard.put)(HELLO)
    assert meeting.inbox.get() == (3, HELLO)
    rank._line.send(sent)
    meeting.end_lines()
    assert meeting.inbox.get(timeout=600) == (3, None)
    assert heard.get(timeout=600) is None
    meeting.end_lines()
    meeting.send(3, Stop())  # nobody hears it
    rank.send(HELLO)


def test_a_lock_goes_with_a_command_and_outlives_its_owner(meeting: Meeting, tmp_path: Path) -> None:
    heard: queue.SimpleQueue[ToRank | None] = queue.SimpleQueue()
    connect(meeting.address, heard.put)(HELLO)
    assert meeting.inbox.get() == (3, HELLO)
    held, other = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    meeting.send_file(3, BaseFacts({}), held)
    assert heard.get(timeout=600) == BaseFacts({})
    os.close(held)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if os.path.realpath(f"/proc/self/fd/{name}") == str(tmp_path):
            assert not os.get_inheritable(int(name))
            os.close(int(name))


def test_what_ranks_tell_of_a_job_that_spans_them_is_passed_on_and_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    group, passed = RankGroup(3, own=()), list[tuple[int, ToRank]]()
    monkeypatch.setattr(group, "send", lambda rank, command: passed.append((rank, command)))
    group.spans["a"] = ReplicaPlacement(3, (1, 0, 2))
    gradient, read = Sent("a", 2, 0, ((1.0, 2.0),), 30), Fetched("a", 0)
    for note in (gradient, read, Sent("b", 2, 0, (), 0)):
        group._meeting.inbox.put((note.sender, note))
    assert not group.listen(1.0)
    assert passed == [(1, gradient), (0, gradient), (1, read)]
    group.close()
