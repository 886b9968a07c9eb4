"""Plants a bug in a module of the program: words of its source are replaced by others, each found exactly once.

What the changed source defines (functions, classes, Triton kernels) then stands wherever the program or a test has imported its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tests.kernels.interpreter import interpreted

Changes = Sequence[tuple[str, str]]


def changed_source(module: ModuleType, changes: Changes) -> str:
    source = Path(str(module.__file__)).read_text()
    for old, new in changes:
        found = source.count(old)
        assert found == 1, f"{module.__name__} has {old!r} {found} times, not once: the bug must be planted anew"
        assert old != new, f"{old!r} is replaced by itself"
        source = source.replace(old, new)
    return source


@contextmanager
def planted(module: ModuleType, changes: Changes, directory: Path) -> Iterator[None]:
    """`directory` takes the changed source: Triton reads it there."""
    path = directory / f"{module.__name__}.py"
    path.write_text(changed_source(module, changes))
    changed = ModuleType(module.__name__)
    changed.__file__ = str(path)
    with interpreted():
        exec(compile(path.read_text(), path, "exec"), vars(changed))
    made_here = {
        id(value): getattr(changed, name) for name, value in vars(module).items() if _home(value) == module.__name__ and callable(value)
    }
    with ExitStack() as stack:
        for user in [m for n, m in sys.modules.items() if n.partition(".")[0] in ("tlora", "tests")]:
            for name, value in list(vars(user).items()):
                if id(value) in made_here:
                    stack.enter_context(patch.object(user, name, made_here[id(value)]))
        yield


def _home(value: Any) -> str | None:
    """The module that defines it; a kernel's is that of its function."""
    return getattr(getattr(value, "fn", value), "__module__", None)
