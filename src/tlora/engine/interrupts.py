"""SIGINT, SIGTERM, SIGHUP and SIGUSR1 (a batch system's warning) end a run at the next micro-batch, with everything saved."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from tlora.errors import TloraError
from tlora.wording.numbers import quantity

OF_THE_TERMINAL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
"""Signals that reach all processes of a terminal or a service; what follows is decided by who leads."""


def describe_interrupt(number: int, unfinished: int) -> str:
    """Describe the effect of the first signal, `number`, with so many `unfinished` jobs."""
    jobs = quantity(unfinished, "unfinished job")
    more = "; press Ctrl-C again to quit at once, without what is not saved by then" if number == signal.SIGINT else ""
    return f"Interrupted: saving {jobs}{more}" if unfinished else "Interrupted: all jobs have ended, the page is written"


def ending_signals() -> list[signal.Signals]:
    """The ending signals of this system, without a SIGHUP that `nohup` has switched off."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
    found = [signal.Signals[name] for name in names if hasattr(signal, name)]
    return [number for number in found if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def interrupts(describe: Callable[[int], str], note: Callable[[str], None]) -> Iterator[list[int]]:
    """Collects these signals instead of dying, and notes the state at the first; a second SIGINT raises KeyboardInterrupt. For the main
    thread only.
    """
    received: list[int] = []
    noted = threading.Event()

    def tell(message: str) -> None:
        try:
            note(message)
        finally:
            noted.set()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def on_signal(number: int, _: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        if len(received) == 1:
            try:  # what was interrupted may hold stdout's lock, or one of threading.Thread
                _thread.start_new_thread(tell, (describe(number),))
            except RuntimeError:  # no more threads for this process
                noted.set()

    before = {number: signal.signal(number, on_signal) for number in ending_signals()}
    try:
        yield received
        if received:
            noted.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def blocked_in_children(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """A process that is started meanwhile gets these signals when it unblocks them, not before it has decided what they do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def recorded_end(record: Callable[[str], None]) -> Iterator[None]:
    """Record the status of a run that does not come to its results: "stopped" by a second SIGINT, "failed" by an error."""
    try:
        yield
    except BaseException as error:
        with suppress(OSError, TloraError):  # a full disk: the error that ended the run says more
            record("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
