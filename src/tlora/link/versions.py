"""The versions of what decides about results, without importing any of it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from tlora.version import __version__

_LIBRARIES = ("torch", "transformers")


def versions() -> dict[str, str]:
    """Of this process: tlora, python, and the libraries that are installed."""
    found = {"tlora": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
