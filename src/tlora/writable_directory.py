"""Whether a directory that a person names can be written, looked at before anything is loaded. Changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from tlora.errors import ConfigError
from tlora.json_file import is_utf8

_BELOW = 256  # bytes of the longest path in it: a job's name (63), a temporary directory, a tokenizer's file


def check_writable(directory: Path, key: str) -> None:
    """Raises ConfigError if `directory`, the value of `key`, cannot be made or written: its name or its path with what will be in it is too
    long for the file system, or not UTF-8, something else is in its place or on the way to it, or this user may not write there.
    """
    absolute = directory.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    if not existing.is_dir():
        kind = "a file" if existing.exists() else "a symbolic link to nothing"
        raise ConfigError(f"{key} {directory}: {existing} is {kind}. Choose another {key}")
    # Some file systems in user space give no limit: 0, or less.
    longest_name, longest_path = os.pathconf(existing, "PC_NAME_MAX"), os.pathconf(existing, "PC_PATH_MAX") - 1 - _BELOW
    name = max((os.fsencode(part) for part in absolute.relative_to(existing).parts), key=len, default=b"")
    if 0 < longest_name < len(name):
        raise ConfigError(f"{key} {directory}: a name in it has {len(name)} bytes, and may have {longest_name}. Choose a shorter one")
    if 0 < longest_path < (length := len(os.fsencode(absolute))):
        rule = f"has {length} bytes, and may have {longest_path}, so that files in it have names too"
        raise ConfigError(f"{key} {directory}: {rule}. Choose a shorter one")
    if not is_utf8(str(absolute)):
        rule = "has bytes that are not UTF-8, and files that name it are UTF-8"
        raise ConfigError(f"{key} {directory}: {str(absolute)!a} {rule}. Choose another {key}")
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise ConfigError(f"{key} {directory} cannot be written ({existing} is read-only for you). Choose one where you may write")
