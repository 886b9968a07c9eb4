"""Many simulations at once, one process for each core. Knows nothing of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import TypeVar

from tlora.errors import CapacityError
from tlora.processes import LostProcessError, Pool, num_cores, open_pool

_T = TypeVar("_T")
_R = TypeVar("_R")


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
    try:
        with open_pool(workers, "spawn") as pool:
            yield from _results(pool, function, tasks, watch)
    except LostProcessError:
        raise CapacityError(
            f"one of {workers} processes that simulate was killed, most likely for want of memory. Simulate fewer jobs or GPUs, or let it "
            "have fewer cores (taskset -c 0 tlora ...)"
        ) from None


def _results(pool: Pool, function: Callable[[_T], _R], tasks: Sequence[_T], watch: Callable[[Standing], None]) -> Generator[tuple[int, _R]]:
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
