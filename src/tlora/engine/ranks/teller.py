"""Sends notes once the device has done the work that they report, in the order in which they were given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tlora.engine.ranks.messages import Note
from tlora.kernels.device import ToHost


class Teller:
    """Where the device is behind, a thread waits for it and tells. The caller is launching its next micro-batch then, and other ranks
    would have to wait until it is through with that.
    """

    def __init__(self, tell: Callable[[Note], None]) -> None:
        """`tell` is called here by one thread at a time, the caller's or another."""
        self._tell = tell
        self._thread = ThreadPoolExecutor(1, "teller")
        self._untold: deque[Future[None]] = deque()

    def tell_when(self, done: ToHost, make: Callable[[list[float]], Note]) -> None:
        """The note that `make` makes of the values of `done`; at once where they are there. Raises what an earlier note failed with."""
        self.flush()
        if done.done and not self._untold:
            self._tell_now(done, make)
        else:
            self._untold.append(self._thread.submit(self._tell_now, done, make))

    def flush(self, *, wait: bool = False) -> None:
        """Send the notes that are due, all of them with `wait`. Raises the error of a send that failed."""
        while self._untold and (wait or self._untold[0].done()):
            self._untold.popleft().result()

    def _tell_now(self, done: ToHost, make: Callable[[list[float]], Note]) -> None:
        self._tell(make(done.read()))
