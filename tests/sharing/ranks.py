"""Ranks for tests: processes that stay for a module and run one function after another, all of them at a time.

They are forked from a server that has imported what they need; a rank that does not answer is killed with the others, and the test fails.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 240.0  # against what hangs
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.sharing.rank_imports"])


class RankFailedError(AssertionError):
    """What a rank raised, as it printed it."""


class Ranks:
    """`count` processes, each of which knows its rank; those that use a GPU are `fresh`: a forked one cannot."""

    def __init__(self, count: int, fresh: bool = False) -> None:
        context: Any = multiprocessing.get_context("spawn") if fresh else _CONTEXT
        self._pipes: list[Connection] = []
        self._lost = False  # one does not answer
        self.processes: list[Any] = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(rank, *args)` on every rank at once; what each gave. Raises RankFailedError with what went wrong."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = self.answers()
        for rank, answer in enumerate(answers):
            if isinstance(answer, RankFailedError):
                raise RankFailedError(f"rank {rank}: {answer}")
        return answers

    def answers(self) -> list[Any]:
        """Of each rank: what it gave, a RankFailedError, or None of one that has died."""
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            ready = wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in found], _TIMEOUT_SECONDS)
            self._lost = not ready
            assert ready, f"ranks {set(range(len(self._pipes))) - set(found)} do not answer"
            for pipe in ready:
                try:
                    found[self._pipes.index(pipe)] = pipe.recv()  # type: ignore[arg-type, union-attr]
                except (EOFError, ConnectionResetError):
                    found[self._pipes.index(pipe)] = None  # type: ignore[arg-type]
        return [found[rank] for rank in range(len(self._pipes))]

    def send(self, rank: int, function: Callable[..., Any], *args: Any) -> None:
        self._pipes[rank].send((function, args))

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a rank ends when there is nothing more to read
        for process in self.processes:
            process.join(_TIMEOUT_SECONDS if not self._lost else 0)
            process.kill()
            process.join()


@contextmanager
def start_ranks(count: int, fresh: bool = False) -> Iterator[Ranks]:
    ranks = Ranks(count, fresh)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(rank: int, pipe: Connection) -> None:
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(rank, *args)
        except BaseException:
            answer = RankFailedError(traceback.format_exc())
        pipe.send(answer)


def store_path(directory: Path) -> str:
    """Of a FileStore that nobody has used."""
    return str(directory / f"store-{os.urandom(8).hex()}")
