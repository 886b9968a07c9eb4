"""Plants a bug: a function, method or Triton kernel is replaced by another one, wherever its name has been imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest.mock import patch

Change = tuple[ModuleType | type, str, object]
"""A module or class, a name in it, and what takes its place."""


@contextmanager
def planted(*changes: Change) -> Iterator[None]:
    """What a module has only imported is replaced there alone. A name that begins with `healthy` stays what it is: a bug may call it."""
    with ExitStack() as stack:
        for owner, name, buggy in changes:
            if isinstance(owner, type) or not _is_defined_in(owner, getattr(owner, name)):
                stack.enter_context(patch.object(owner, name, buggy, create=True))
                continue
            healthy = getattr(owner, name)
            for user in [module for key, module in sys.modules.items() if key.partition(".")[0] in ("tlora", "tests")]:
                for used, value in list(vars(user).items()):
                    if value is healthy and not used.startswith("healthy"):
                        stack.enter_context(patch.object(user, used, buggy))
        yield


def _is_defined_in(module: ModuleType, value: object) -> bool:
    """A kernel's home is that of its function."""
    return getattr(getattr(value, "fn", value), "__module__", None) == module.__name__
