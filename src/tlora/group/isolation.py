"""The wall between a job and its neighbours: an exception in one job's step fails that job alone, and the others continue.

Also here: what counts as running out of memory.
"""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from tlora.errors import TloraError

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_OUT_OF_MEMORY = (  # what torch's RuntimeErrors say: its CPU allocator on Linux and on Windows, its C++ library, its GPU libraries
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "out of memory",
    "ALLOC_FAILED",
)


@dataclass(frozen=True)
class Failure:
    """A step that raised. `reason` is for a person."""

    error: BaseException

    @property
    def reason(self) -> str:
        """What a user can mend says so itself; before anything else stands what kind of error it is."""
        if isinstance(self.error, TloraError | OSError):
            return str(self.error)
        return f"{type(self.error).__name__}: {self.error}".removesuffix(": ")


def try_call(step: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result | Failure:
    """What `step` returns, or how it failed. An interrupt or an exit is not the job's, and passes.

    Nothing stays alive that only the failed step held: after running out of memory that may be most of it.
    """
    try:
        return step(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in a library written in Rust is no Exception
        traceback.clear_frames(error.__traceback__)
        return Failure(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left. Predictions (CapacityError) do not count."""
    if isinstance(error, TloraError):
        return False
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one
        return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError)  # numpy's are too
