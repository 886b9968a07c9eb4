"""Makes the import of the model libraries fast in a dedicated process, and controls garbage collection. Imports none of them itself."""

from __future__ import annotations

import atexit
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
    """Call after the imports: excludes the imported objects from later garbage collections, but for the one at exit where that counts."""
    gc.freeze()
    gc.enable()
    atexit.register(_free_what_is_counted)


def _free_what_is_counted() -> None:
    """Extension modules of nanobind, as Triton's is from 3.9, print what is left of them at exit as leaked. It takes half a second."""
    library = sys.modules.get("triton._C.libtriton")
    if library is not None and any(type(value).__module__ == "nanobind" for value in vars(library).values()):
        gc.unfreeze()


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
