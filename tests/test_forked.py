"""A forked child is a process like one that was started: what tests of processes look at is the same of both."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tlora.data.request import PREPARE_MESSAGES, PrepareBatch

pytestmark = pytest.mark.usefixtures("forked_children")
WORKER = [sys.executable, "-P", "-m", "tlora.data.worker"]  # waits for an order
FACTS = """
import json, os, signal, sys
facts = {"directory": os.getcwd(), "mark": os.environ.get("MARK"), "none": os.environ.get("NONE"), "command": sys.orig_argv}
facts |= {"parent": os.getppid(), "leads": os.getsid(0) == os.getpgid(0) == os.getpid()}
facts |= {"interrupt": str(signal.getsignal(signal.SIGINT)).split(" at ")[0], "pipe": str(signal.getsignal(signal.SIGPIPE))}
facts["files"] = [number for number in range(4096) if os.path.exists(f"/proc/self/fd/{number}")]
with open(os.environ["FACTS"], "w") as file:
    json.dump(facts, file)
"""


@pytest.mark.slow
def test_streams_and_exit_code_of_a_command(tmp_path: Path) -> None:
    ended = [
        subprocess.run([sys.executable, "-m", "tlora", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
        for arguments in (["--version"], ["train", "nowhere.yaml"], ["--no-such-option"])
    ]
    assert [done.returncode for done in ended] == [0, 2, 2]
    assert ended[0].stdout.startswith("tlora ") and ended[1].stderr.startswith("error: nowhere.yaml") and "Usage" in ended[2].stderr


def test_a_child_is_what_a_started_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NONE", "of the test's, and not of its children's")
    (tmp_path / "sitecustomize.py").write_text(FACTS)
    (tmp_path / "elsewhere").mkdir()
    kept, others = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    found: list[Any] = []
    for popen in (subprocess.Popen, forked.ForkingPopen.__base__):
        assert popen is not None
        path = tmp_path / f"{popen.__name__}.json"
        environment = {k: v for k, v in os.environ.items() if k != "NONE"} | {"MARK": "m", "PYTHONPATH": str(tmp_path), "FACTS": str(path)}
        ours, theirs = socket.socketpair()
        streams = {"stdin": theirs, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with ours, popen(WORKER, cwd=tmp_path / "elsewhere", env=environment, start_new_session=True, pass_fds=[kept], **streams) as child:
            assert child.stderr
            theirs.close()
            ours.sendall(PREPARE_MESSAGES.encode(PrepareBatch(())))  # it takes the end of the line for its parent's
            assert child.wait(600) == 0, child.stderr.read()
        found.append(json.loads(path.read_text()))
    assert found[0] == found[1]
    assert (found[0]["mark"], found[0]["none"], found[0]["leads"], found[0]["parent"]) == ("m", None, True, os.getpid())
    assert found[0]["files"] == sorted([0, 1, 2, kept]) and found[0]["directory"] == str(tmp_path / "elsewhere")
    os.close(kept)
    os.close(others)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(WORKER, stdin=theirs, stdout=subprocess.PIPE) as child:
        child.send_signal(number)
        assert child.wait(600) == -number


def test_a_forked_command_forks_its_own_children(tmp_path: Path) -> None:
    """Its server is forked beside the command."""
    probe = "import json, os, subprocess, sys\nif sys.argv[:1] == ['tlora']:\n" + (
        "    child = subprocess.Popen([sys.executable, '-P', '-m', 'tlora.engine.worker'], stderr=subprocess.PIPE)\n"
        "    said = child.stderr.read().decode()\n"
        "    with open(os.environ['FACTS'], 'w') as file:\n"
        "        json.dump({'popen': type(child).__name__, 'said': said, 'status': child.wait()}, file)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(probe)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "FACTS": str(tmp_path / "facts")}
    with subprocess.Popen([sys.executable, "-m", "tlora", "--version"], env=environment, stdout=subprocess.PIPE) as command:
        assert command.stdout is not None and command.stdout.read() == b"" and command.wait(600) == -signal.SIGKILL
    found = json.loads((tmp_path / "facts").read_text())
    assert found["popen"] == "ForkingPopen" and found["status"] == 2 and "--connect" in found["said"], found


def test_a_server_ends_with_its_test_run() -> None:
    """However that ends: here it is killed. The server holds its stdout, whose end is seen when it has gone."""
    code = "import os\nfrom tests.forked import Server\nServer.start('tokenizing')\nos.kill(os.getpid(), 9)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=forked.REPOSITORY, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.read() == b"" and run.wait() == -signal.SIGKILL


def test_a_process_that_a_test_forks_has_children_of_its_own() -> None:
    """The server of the test run is not beneath it: what that forks would look ended at once."""
    command = [sys.executable, "-m", "tlora", "no-such-command"]
    assert subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 2  # the server is up
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


class InterruptedOnce(socket.socket):
    """Ctrl-C, or a test's time limit, comes while the first answer is waited for."""

    is_interrupted = False

    def recv(self, *given: Any) -> bytes:
        if not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return super().recv(*given)


def test_an_answer_that_was_not_waited_for_is_not_taken_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child that it is about ends: nothing has its end of the line any more."""
    with subprocess.Popen(WORKER, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        assert child.wait(600) == 1, "what it reads is no line"
    server = forked.ForkingPopen.servers["tokenizing"]
    ours, theirs = socket.socketpair()
    with InterruptedOnce(fileno=os.dup(server.fileno())) as requests, ours:
        monkeypatch.setattr(server, "_socket", requests)
        with theirs, pytest.raises(KeyboardInterrupt):
            subprocess.Popen(WORKER, stdin=theirs, stdout=subprocess.DEVNULL)
        with subprocess.Popen(WORKER, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
            ours.shutdown(socket.SHUT_WR)  # which the first would take for its parent's end
            assert child.wait(600) == 1
        assert ours.recv(1) == b""
        monkeypatch.undo()


def test_a_child_that_nobody_knows_is_ended() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    forked._end_child(child)
    with pytest.raises(ChildProcessError):
        os.waitpid(child, 0)
    forked._end_child(os.getppid())
