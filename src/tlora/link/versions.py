"""The versions of what decides about results, without importing any of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from tlora.version import __version__

_LIBRARIES = ("torch", "transformers")


def versions() -> dict[str, str]:
    """Of this process: tlora, python, and the libraries that are installed."""
    return {"tlora": __version__, "python": platform.python_version(), **_libraries()}


@cache  # each looks through the files of a package, which takes milliseconds: a controller asks for every worker that comes
def _libraries() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def unlike_tlora(theirs: Mapping[str, str]) -> str:
    """In what a process of these versions differs from this one, in words; "" if in nothing."""
    version = theirs.get("tlora")
    return "" if version == __version__ else f"is of tlora {version}, and this is {__version__}"


def unlike_torch(theirs: Mapping[str, str]) -> str:
    """Likewise. Builds of one release are alike, and a process without torch knows nothing of it."""
    ours, other = versions().get("torch", ""), theirs.get("torch", "")
    if not ours or other.partition("+")[0] == ours.partition("+")[0]:
        return ""
    return f"has torch {other or 'of no version'}, and this is {ours}: results would depend on the host"
