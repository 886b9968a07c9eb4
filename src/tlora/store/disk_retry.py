"""Saves that wait for room on a full disk, for callers that can wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tlora import durable
from tlora.group.isolation import Failure, try_call

_Result = TypeVar("_Result")

WaitsForRoom = Callable[[str, OSError], bool]
"""Takes a job and the error of its write that found no space, and returns after a while: True to try again, False to give up."""


def retry_when_disk_full(job: str, step: Callable[[], _Result], wait: WaitsForRoom | None) -> _Result | Failure:
    """`try_call(step)`, repeated while the disk is full and `wait` returns True; once without `wait`."""
    while True:
        result = try_call(step)
        error = result.error if isinstance(result, Failure) else None
        if wait is None or not durable.is_full(error) or not wait(job, error):
            return result
