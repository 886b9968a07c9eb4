"""How long a rank computes nothing: from when its device is through until the next command."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TypeVar

from tlora.kernels.device import ToHost

_T = TypeVar("_T")
_DEVICE_SECONDS, _FILES_SECONDS = 0.001, 0.05  # between two looks at the device, and at files that are being written


def wait_for(inbox: queue.SimpleQueue[_T], given: ToHost, look: Callable[[], bool]) -> tuple[_T, float]:
    """The next of `inbox`, and for how many seconds the device had nothing left to do by then; `given` is behind all that it was given.

    `look` is called now and then, until it says that there is nothing more to look for. Raises what the device fails with.
    """
    idle_since: float | None = None
    while True:
        if idle_since is None and given.done:
            idle_since = time.monotonic()
        looks_again = look()
        try:
            if idle_since is None:
                found = inbox.get(timeout=_DEVICE_SECONDS)
            else:
                found = inbox.get(timeout=_FILES_SECONDS if looks_again else None)
        except queue.Empty:
            continue
        return found, 0.0 if idle_since is None else time.monotonic() - idle_since
