"""Makes the import of the model libraries fast in a dedicated process, and controls garbage collection. Imports none of them itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager

_UNUSED = ("sklearn", "scipy", "torchvision", "torchaudio")


def leave_unused_out() -> None:
    """Hide unused optional packages before a dedicated process imports transformers, which would import them: saves up to 3 s."""
    for name in _UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def begin_imports() -> None:
    """Call before a program's imports: hides unused packages, and disables garbage collection, which saves a third of the time."""
    leave_unused_out()
    gc.disable()


def end_imports() -> None:
    """Call after the imports: excludes the imported objects from later garbage collections."""
    gc.freeze()
    gc.enable()


@contextmanager
def no_collection() -> Generator[None]:
    """Disable garbage collection in the block: searching objects that are known to stay is wasted time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
