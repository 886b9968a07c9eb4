"""The processes of a run's ranks: started on this host, watched, and ended for good before their jobs go on elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tlora.sharing.multicast import NO_MULTICAST

RANK = "tlora.engine.ranks.rank"
LOOK_SECONDS = 1.0  # between two looks whether a process is stopped
_LOOKS_STOPPED = 5  # in a row, after which a stopped process counts as lost
_KILL_SECONDS = 30.0  # for the kernel to end a process that has been killed
_TAIL_BYTES = 4000


class RankProcess:
    """One rank. `log` gets what it and its libraries print."""

    def __init__(
        self, rank: int, address: str, log: Path, environment: Mapping[str, str], module: str = RANK, *, apart: bool = True
    ) -> None:
        """`address` is that of the run's owner, `module` what the process runs. `apart`: in a session of its own."""
        self.rank, self._log = rank, log
        with log.open("ab") as output:
            # -P: without it a user's queue.py in the current directory would be run; a session of its own: Ctrl-C is the owner's
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **NO_MULTICAST, **environment, "RANK": str(rank)},
                start_new_session=apart,
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # not in argv, which everybody may read
            self._process.stdin.write(address.encode())
            self._process.stdin.close()
        self._stopped_looks = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def look(self) -> str:
        """Whether it can no longer be counted on: why, for a person; "" while it can. To be called every `LOOK_SECONDS`."""
        if self.has_ended:
            return self.how_it_ended()
        self._stopped_looks = self._stopped_looks + 1 if is_stopped(self.pid) else 0
        return f"was stopped for {self._stopped_looks * LOOK_SECONDS:.0f} s" if self._stopped_looks >= _LOOKS_STOPPED else ""

    def kill(self) -> None:
        """End it, and wait until it is gone: it writes nothing from then on."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it has ended by itself within so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        return self.has_ended

    def how_it_ended(self) -> str:
        """For a person: signal or exit status, and the last line of its log."""
        code = self._process.poll()
        if code is None:
            return "has not ended"
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        last = _last_line(self._log)
        return f"{ended}; its log, {self._log}, ends with {last!r}" if last else ended


class ForeignRank:
    """A rank that somebody else has started on this host, a cluster's launcher."""

    def __init__(self, rank: int, pid: int) -> None:
        self.rank, self.pid = rank, pid
        self._stopped_looks = 0

    @property
    def has_ended(self) -> bool:
        return not Path(f"/proc/{self.pid}/stat").exists() or _state(self.pid) == "Z"

    def look(self) -> str:
        """As `RankProcess.look`."""
        if self.has_ended:
            return self.how_it_ended()
        self._stopped_looks = self._stopped_looks + 1 if is_stopped(self.pid) else 0
        return f"was stopped for {self._stopped_looks * LOOK_SECONDS:.0f} s" if self._stopped_looks >= _LOOKS_STOPPED else ""

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait(_KILL_SECONDS)

    def wait(self, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while not self.has_ended and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.has_ended

    def how_it_ended(self) -> str:
        return "has ended; its launcher knows how" if self.has_ended else "has not ended"


def is_stopped(pid: int) -> bool:
    """Whether a process stands still, by SIGSTOP or a debugger. Only Linux tells; elsewhere False."""
    return _state(pid) in ("T", "t")


def _state(pid: int) -> str:
    """The letter of the kernel for what a process does; "" where it does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
