"""Starts, watches and ends long-lived Python processes: ranks, workers, the data worker, intake.

Knows nothing of what the process computes. A child is waited for; a process that was started elsewhere (a launcher's rank, the worker of
an earlier controller) is known by its identity, and its end is noticed by a pidfd.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tlora.link.lines import Line
from tlora.link.process_identity import ProcessIdentity, identify, wait_for_session

LOOK_SECONDS = 1.0  # between two looks whether a process is stopped
_LOOKS_STOPPED = 5  # in a row, after which a stopped process counts as lost
_TAIL_BYTES = 4000  # of a log, in which its last line is looked for

Log = Path | IO[bytes]


class SupervisedProcess:
    """`log` gets what it and its libraries print; None if the log is unknown."""

    def __init__(
        self,
        identity: ProcessIdentity | None,
        log: Log | None = None,
        child: subprocess.Popen[bytes] | None = None,
        *,
        whole_session: bool = False,
    ) -> None:
        """`child` is this process' own; else it is known by `identity` alone (None: it has ended already). With `whole_session` it has
        ended when all processes of the session that it leads have.
        """
        self.identity, self._log, self._child, self.whole_session = identity, log, child, whole_session
        self._stopped_looks = 0

    @property
    def pid(self) -> int:
        if self._child is not None:
            return self._child.pid
        return self.identity.pid if self.identity is not None else 0

    @property
    def exit_status(self) -> int | None:
        """The exit status as in `subprocess`, negative for a signal; None while it lives. Known for children only."""
        return self._child.poll() if self._child is not None else None

    @property
    def has_ended(self) -> bool:
        if self._child is not None:
            return self._child.poll() is not None
        return self.identity is None or not self.identity.is_alive

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped, by SIGSTOP or a debugger; always False outside Linux."""
        return self.identity is not None and self.identity.is_stopped

    def why_lost(self) -> str:
        """Why it counts as lost, in words; "" if it does not. Call every `LOOK_SECONDS`."""
        if self.has_ended:
            return self.how_it_ended()
        self._stopped_looks = self._stopped_looks + 1 if self.is_stopped else 0
        return f"was stopped for {self._stopped_looks * LOOK_SECONDS:.0f} s" if self._stopped_looks >= _LOOKS_STOPPED else ""

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Whether it ends within the timeout (None: no limit)."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout_seconds)
            ended = self._child.returncode is not None
        else:
            ended = self.identity is None or self.identity.wait(timeout_seconds)
        return ended and (not self.whole_session or wait_for_session(self.pid, deadline))

    def give_stdin(self, text: str) -> None:
        """All that a child reads on its stdin, if none was given at its start."""
        assert self._child is not None and self._child.stdin is not None, "its stdin is not ours"
        with contextlib.suppress(BrokenPipeError), self._child.stdin as stdin:  # if it has died, its watcher notices
            stdin.write(text.encode())

    def kill(self, timeout_seconds: float | None = None) -> None:
        """Kill it and wait for its end: it writes nothing from then on."""
        if self._child is not None:
            self._child.kill()
        elif self.identity is not None:
            self.identity.kill()
        self.wait(timeout_seconds)

    def how_it_ended(self) -> str:
        """How it ended, in words: signal or exit status, if known, and the last line of its log."""
        if not self.has_ended:
            return "has not ended"
        if self._log is None:
            return "has ended; its launcher knows how"
        status, last = self.exit_status, self.last_line()
        ended = "ended" if status is None else describe_exit(status)
        return f"{ended}; its log, {self._log}, ends with {last!r}" if last else ended

    def last_line(self) -> str:
        """The last line of its log, stripped; "" if there is none, or none that can be read. An open log is written meanwhile, from where
        it is: that stays.
        """
        if self._log is None:
            return ""
        try:
            with self._log.open("rb") if isinstance(self._log, Path) else contextlib.nullcontext(self._log) as log:
                size = os.fstat(log.fileno()).st_size
                lines = os.pread(log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1].strip() if lines else ""


def start_process(
    module: str,
    log: Log,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    stdin: str | None = "",
    *,
    own_session: bool = True,
) -> SupervisedProcess:
    """Run `python -m module`. `environment` is added to this process' own. The text of `stdin`, such as a secret, which argv would show to
    everybody, is all that it can read there; None: it waits there for `give_stdin`. With `own_session` Ctrl-C is this process' alone.
    Raises OSError.
    """
    return _start((module, *arguments), log, environment, stdin, own_session=own_session)


def start_talking(
    module: str,
    log: Log,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    own_session: bool = True,
) -> tuple[SupervisedProcess, Line]:
    """As `start_process`, of a process that calls `line_to_parent`: what it prints on stdout goes to `log` from then on. The line ends with
    either process; the caller closes it. Raises OSError.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = _start((module, *arguments), log, environment, theirs.fileno(), own_session=own_session)
        except BaseException:
            ours.close()
            raise
    return process, Line(ours)


def line_to_parent() -> Line:
    """In a process of `start_talking`: its end of the line. No library can write there, or read what is not for it."""
    line = Line(socket.socket(fileno=os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return line


def _start(
    command: Sequence[str],
    log: Log,
    environment: Mapping[str, str] | None,
    stdin: str | int | None,
    *,
    own_session: bool = True,
) -> SupervisedProcess:
    place = log.open("ab") if isinstance(log, Path) else contextlib.nullcontext(log)
    with place as output:
        # -P: without it a user's queue.py in the current directory would be run
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", *command],
            stdin=stdin if isinstance(stdin, int) else subprocess.DEVNULL if stdin == "" else subprocess.PIPE,
            stdout=stdin if isinstance(stdin, int) else output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=own_session,
        )
    process = SupervisedProcess(identify(child.pid), log, child)
    if isinstance(stdin, str) and stdin:
        process.give_stdin(stdin)
    return process


def describe_exit(status: int) -> str:
    """An exit status in words. `status` as in `subprocess`, negative for a signal."""
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"
