"""Many simulations at once, one process for each core. Knows nothing of what they compute."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import TypeVar

from tlora.errors import CapacityError

_T = TypeVar("_T")
_R = TypeVar("_R")


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Standing:
    """How many tasks there are and are done, and the numbers of those that run."""

    total: int
    done: int
    running: tuple[int, ...]


def map_in_processes(function: Callable[[_T], _R], tasks: Sequence[_T], watch: Callable[[Standing], None]) -> Generator[tuple[int, _R]]:
    """(number of the task, its result) in the order in which they end; `function` must be one of a module.

    A single task, or a single core, needs no second process. When the iterator is closed early, running tasks are ended.
    Raises what `function` raised, and CapacityError when a process was killed.
    """
    workers = min(num_cores(), len(tasks))
    if workers <= 1:
        for number, task in enumerate(tasks):
            watch(Standing(len(tasks), number, (number,)))
            yield number, function(task)
        watch(Standing(len(tasks), len(tasks), ()))
        return
    before = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin)
    try:
        yield from _results(pool, function, tasks, watch)
    except BrokenProcessPool:
        raise CapacityError(
            f"one of {workers} processes that simulate was killed, most likely for want of memory. Simulate fewer jobs or GPUs, or let it "
            "have fewer cores (taskset -c 0 tlora ...)"
        ) from None
    except BaseException:  # the iterator's closing is one as well
        for process in set(active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In a worker. Ctrl-C reaches all processes: the workers end without a word. They end too when this program was killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "no worker"
    parent.join()
    os._exit(1)


def _results(
    pool: ProcessPoolExecutor, function: Callable[[_T], _R], tasks: Sequence[_T], watch: Callable[[Standing], None]
) -> Generator[tuple[int, _R]]:
    """Hands out no more tasks than there are workers, so that each that is handed out runs."""
    running: dict[Future[_R], int] = {}
    waiting = iter(range(len(tasks)))
    for done in range(len(tasks)):
        while len(running) < num_cores() and (number := next(waiting, None)) is not None:
            running[pool.submit(function, tasks[number])] = number
        watch(Standing(len(tasks), done, tuple(running.values())))
        ended = next(iter(wait(running, return_when=FIRST_COMPLETED).done))
        yield running.pop(ended), ended.result()
    watch(Standing(len(tasks), len(tasks), ()))
