"""Pools of processes on this machine's cores, which end with the program, however it ends. Knows nothing of what they compute."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, Literal, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


class LostProcessError(Exception):
    """A process of a pool was killed; the text says by what."""


def num_cores() -> int:
    """Cores that this process may use: those of its affinity, and no more than the quota of its control groups, as containers have one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, min(cores, math.ceil(min(quota, cores))))


def _quota(memberships: Path, root: Path) -> float:
    """The number of cores that the control groups in `memberships`, each with all above it, allow; infinite without a limit.

    `root` is where their files are: those of version 2 in one tree (cpu.max), those of version 1 below a directory of the controller.
    """
    groups = control_groups("cpu", memberships, root)
    return min((_quota_of(directory, version) for directory, version in groups), default=math.inf)


def control_groups(controller: str, memberships: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """Directories of the control groups named in `memberships` that `controller` rules, each with all above it, and their version."""
    with suppress(OSError, ValueError):
        for line in memberships.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top = root / controllers if controllers else root
            group = top / path.lstrip("/")
            for directory in (group, *group.parents):
                yield directory, 1 if controllers else 2
                if directory == top:
                    break


def _quota_of(directory: Path, version: int) -> float:
    """The quota of one control group; infinite without one, or without its files: a container does not see the groups above its own."""
    try:
        if version == 2:
            quota, period = (directory / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota, period = ((directory / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in ("quota", "period"))
        return float(quota) / float(period) if quota != "max" and float(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def die_with_parent(yes: bool = True) -> None:
    """Have the kernel kill this process as soon as the thread that started it has ended. To be called by the main thread. Has no effect
    outside Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, int(signal.SIGKILL) if yes else 0, 0, 0, 0)


class Pool:
    """Processes that `open_pool` has started."""

    def __init__(self, executor: ProcessPoolExecutor) -> None:
        self._executor = executor
        self._before = set[BaseProcess](active_children())
        self._started = set[BaseProcess]()

    def submit(self, function: Callable[[_T], _R], task: _T) -> Future[_R]:
        """`function` is one of a module; it and `task` are pickled."""
        with warnings.catch_warnings():  # Python 3.12 warns of any fork of a threaded process; a caller that forks knows its threads
            warnings.simplefilter("ignore", DeprecationWarning)
            future = self._executor.submit(function, task)
        self._started |= set(active_children()) - self._before
        return future

    def map_in_order(self, function: Callable[[_T], _R], tasks: Iterable[_T], most_waiting: int) -> Iterator[_R]:
        """The results in the order of `tasks`, which are taken while at most `most_waiting` results are not.

        Raises what `function` raised.
        """
        waiting: deque[Future[_R]] = deque()
        for task in tasks:
            waiting.append(self.submit(function, task))
            if len(waiting) >= most_waiting:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def kill(self) -> None:
        for process in self._started:
            process.kill()

    def how_it_broke(self) -> str:
        """The others have been terminated by the pool itself."""
        codes = [process.exitcode for process in self._started]
        ends = [code for code in codes if code not in (None, 0, -signal.SIGTERM)] or [-signal.SIGTERM]
        return f"was killed by signal {-ends[0]}" if ends[0] < 0 else f"ended with exit status {ends[0]}"


@contextmanager
def open_pool(workers: int, method: Literal["fork", "spawn"], begin: Callable[..., None] | None = None, *arguments: Any) -> Generator[Pool]:
    """A pool of processes, each of which calls `begin(*arguments)` first. They ignore Ctrl-C, which reaches all processes of a terminal:
    an exception in this block ends them at once.

    Raises LostProcessError when one of them was killed.
    """
    executor = ProcessPoolExecutor(workers, get_context(method), initializer=_begin, initargs=(begin, arguments))
    pool = Pool(executor)
    try:
        yield pool
    except BrokenProcessPool:
        executor.shutdown(cancel_futures=True)
        raise LostProcessError(pool.how_it_broke()) from None
    except BaseException:  # the closing of a generator is one as well
        pool.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin(begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    assert parent is not None, "not a process of a pool"
    die_with_parent()
    if not parent.is_alive():  # it has ended before the kernel was asked
        os._exit(1)
    if sys.platform != "linux":
        Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    if begin is not None:
        begin(*arguments)


def _end_with_parent(parent: Any) -> None:
    parent.join()
    os._exit(1)
