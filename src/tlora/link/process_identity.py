"""The identity of a process: a pid alone may belong to another process by the time a signal is sent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """`start_ticks` is when it started, in the kernel's ticks since `boot`: a process that gets the pid later has others."""

    pid: int
    start_ticks: int
    boot: str

    @property
    def is_alive(self) -> bool:
        """Whether it still runs. A zombie, which its parent has not waited for, has ended."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start_ticks and found[0] not in "ZX" and self.boot == boot_id()

    @property
    def is_this_users(self) -> bool:
        try:
            return Path(f"/proc/{self.pid}").stat().st_uid == os.geteuid() and self.is_alive
        except OSError:
            return False

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped, by SIGSTOP or a debugger."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.start_ticks and found[0] in "Tt"

    def kill(self) -> None:
        """SIGKILL for this process and for no other; fine if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive:  # looked at after the handle was had: it is of the process that was looked at
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)

    def wait(self, timeout_seconds: float | None) -> bool:
        """Whether it ends within the timeout (None: no limit)."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            while self.is_alive:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                waiting = select.poll()
                waiting.register(handle, select.POLLIN)
                if waiting.poll(None if left is None else 1000 * left):
                    time.sleep(_LOOK_SECONDS)  # readable when it has ended; `is_alive` follows
            return True
        finally:
            os.close(handle)


def identify(pid: int) -> ProcessIdentity | None:
    """The process that has this pid now; None if there is none, or the system does not know."""
    found = _stat(pid)
    return None if found is None else ProcessIdentity(pid, found[1], boot_id())


def wait_for_session(session: int, deadline: float | None) -> bool:
    """Whether all processes of a session, whose leader has ended, have ended by `deadline` (of `time.monotonic`). None is killed."""
    while _has_members(session):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _has_members(session: int) -> bool:
    for path in Path("/proc").glob("[0-9]*"):
        fields = _fields(int(path.name))
        if fields is not None and int(fields[3]) == session and fields[0] not in "ZX" and path.name != str(session):
            return True
    return False


def boot_id() -> str:
    try:
        return _BOOT_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """The kernel's state letter and start time of a process."""
    fields = _fields(pid)
    return None if fields is None else (fields[0], int(fields[19]))


def _fields(pid: int) -> list[str] | None:
    """The fields of a process' stat after the name, which may have spaces and brackets; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split() or None
    except OSError:
        return None
