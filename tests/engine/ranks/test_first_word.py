"""What a rank says first is waited for, but not without end; and a rank without its owner ends at once."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tlora.engine.messages import FROM_RANK, BaseFacts, Broken, Bye, Hello, Stop
from tlora.engine.ranks import external, link, rank
from tlora.engine.ranks import rank_group as crew_module
from tlora.engine.ranks.external import Launched, find_owner, tell_ranks
from tlora.engine.ranks.link import Meeting
from tlora.engine.ranks.rank_group import Lost, RankGroup
from tlora.errors import ConfigError
from tlora.link.authentication import AuthOk, Entry, admission_line, read_admission
from tlora.link.lines import Line
from tlora.worker_protocol import Refusal

SILENT = "import time\nwhile True:\n    time.sleep(60)\n"
STUCK = """
import signal, time
from tlora.processes import die_with_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)
die_with_parent()
print("stuck", flush=True)
while True:
    time.sleep(60)
"""
OWNER = """
import time
from tlora.engine.ranks.rank_group import RankGroup
rank_group = RankGroup(1, program=("stuck_rank",))
rank_group.start()
print(rank_group._processes[0].pid, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close(keep_logs=False)


def dial(meeting: Meeting, key: str | None = None) -> Line:
    """A line on which a Hello may follow, if the key is right."""
    path, _, right = meeting.address.rpartition(":")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    line = Line(connection)
    line.send(admission_line(Entry(right if key is None else key, os.getpid(), 0, "")))
    assert isinstance(read_admission(line, 600.0), AuthOk if key is None else Refusal)
    return line


def say_hello(line: Line, rank: int) -> Hello:
    hello = Hello(rank, os.getpid(), "host", {})
    line.send(FROM_RANK.encode(hello))
    return hello


def module(directory: Path, name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (directory / f"{name}.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]))


def test_a_rank_that_lives_and_never_says_hello_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "silent_rank", SILENT, monkeypatch)
    monkeypatch.setattr(crew_module, "_HELLO_SECONDS", 0.0)
    monkeypatch.setattr(crew_module, "LOOK_SECONDS", 0.0)
    rank_group = RankGroup(1, program=("silent_rank",))
    rank_group.start()
    (process,) = rank_group._processes.values()
    ((number, lost),) = rank_group.listen(0.0)
    assert number == 0 and isinstance(lost, Lost) and lost.reason == "has said nothing for 0 s since its start"
    assert process.has_ended and rank_group.living == []
    rank_group.close()


def test_a_launchers_rank_that_never_comes_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "_HELLO_SECONDS", 0.0)
    monkeypatch.setattr(crew_module, "LOOK_SECONDS", 0.0)
    rank_group = RankGroup(2, own=[])
    assert [(number, type(lost)) for number, lost in rank_group.listen(0.0)] == [(0, Lost), (1, Lost)]
    rank_group.close()


def test_a_hello_that_cannot_be_read_ends_its_line_and_is_said(meeting: Meeting) -> None:
    for sent, said in (
        (b"no message\n", "a rank's Hello was a message that cannot be read (Invalid JSON"),
        (b'{"kind":"hello","rank":"first"}\n', "a rank's Hello was a message that cannot be read (hello.rank: "),
        (FROM_RANK.encode(Bye()), "was Bye, and not Hello"),
    ):
        line = dial(meeting)
        line.send(sent)
        assert line.read_line(600.0) is None
        assert said in meeting.problem
        line.close()
    rank_group = RankGroup(1, program=("no_such_module",))
    rank_group._meeting.problem = meeting.problem
    rank_group.start()
    (lost,) = rank_group._lose(0, "")
    assert isinstance(lost[1], Lost) and lost[1].reason.endswith(meeting.problem)
    rank_group.close()


def test_a_later_message_that_cannot_be_read_loses_the_rank_with_its_reason(meeting: Meeting) -> None:
    line = dial(meeting)
    hello = say_hello(line, 3)
    line.send(b'{"kind":"no message"}\n')
    heard = [meeting.inbox.get() for _ in range(3)]
    assert heard[0] == (3, hello) and heard[2] == (3, None)
    assert heard[1] is not None and isinstance(heard[1][1], Broken) and "cannot be read" in heard[1][1].reason
    line.close()


def test_the_key_of_another_run_is_refused(meeting: Meeting) -> None:
    line = dial(meeting, "f" * 64)
    assert line.read_line(600.0) is None and meeting.inbox.empty()
    line.close()


def test_a_connection_that_says_nothing_keeps_no_other_out(meeting: Meeting) -> None:
    """It was asked for the key where connections are accepted, one after the other."""
    path = meeting.address.rpartition(":")[0]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(path)
        line = dial(meeting)
        hello = say_hello(line, 1)
        assert meeting.inbox.get() == (1, hello)
        line.close()


def test_accepting_rests_while_no_file_can_be_had(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A listener for which the system has no file three times."""

        left = 3

        def accept(self) -> object:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return listener.accept()

    listener, rests = meeting._listener, list[float]()
    monkeypatch.setattr(meeting, "_listener", Full())
    monkeypatch.setattr(link.time, "sleep", rests.append)
    first = dial(meeting)  # the accept that waits already
    second = dial(meeting)
    hello = say_hello(second, 1)
    assert meeting.inbox.get() == (1, hello)
    assert rests == [link._ACCEPT_SECONDS] * 3
    monkeypatch.undo()
    first.close()
    second.close()


# -- without an owner ------------------------------------------------------------------------------------------------------


def test_a_rank_of_a_killed_owner_ends_whatever_it_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module(tmp_path, "stuck_rank", STUCK, monkeypatch)
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as coordinator:
        try:
            assert coordinator.stdout is not None and coordinator.stderr is not None
            process = psutil.Process(int(coordinator.stdout.readline()))
            assert "stuck\n" in iter(coordinator.stderr.readline, ""), "what it says is in its owner's log"
        finally:
            os.kill(coordinator.pid, signal.SIGKILL)
        psutil.wait_procs([process], timeout=300)
        assert not process.is_running()


def test_an_orphaned_rank_ends_at_once_where_it_has_nothing_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread hears it: the main one may be in the middle of a step of minutes."""
    done: list[object] = []
    monkeypatch.setattr(rank.os, "_exit", done.append)
    monkeypatch.setattr(rank.time, "sleep", lambda seconds: done.append(f"{seconds:g} s"))
    before, training, stopping = rank._Orphaned(), rank._Orphaned(), rank._Orphaned()
    before.hear(None)
    assert done == [1]
    training.hear(BaseFacts({}))
    assert done == [1]
    training.hear(None)
    assert done == [1, f"{rank._LAST_SECONDS:g} s", 1]
    stopping.hear(BaseFacts({}))
    stopping.hear(Stop())
    stopping.hear(None)
    assert len(done) == 3, "its owner lives, and waits for it to save"


# -- RANK and WORLD_SIZE that nobody meant ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "meets"), [(0, tell_ranks), (1, lambda _, launch: find_owner(launch))])
def test_a_lone_process_with_a_launchers_environment_says_what_it_waits_for_and_gives_up(
    number: int, meets: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(external, "_MEET_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="Unset RANK and WORLD_SIZE to run alone, or launch all 2 processes"):
        meets("address", Launched(number, 2))  # type: ignore[operator]
    said = capsys.readouterr().err
    assert f"RANK={number} and WORLD_SIZE=2 are set" in said
    assert f"1 other process at 127.0.0.1:{port}. To run alone: unset RANK WORLD_SIZE" in said
