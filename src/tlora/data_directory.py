"""What lies in a directory of data: its files, and whether their names or a dataset card may define splits. Reads no row."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tlora.errors import DataError
from tlora.job import DATA_SUFFIXES

# Names of files and directories by which `datasets` infers a split (SPLIT_KEYWORDS and SPLIT_PATTERN_SHARDED of its data_files.py).
_SPLIT_NAME = re.compile(
    r"(?:^|[-._ 0-9/])(?:train|training|validation|valid|dev|val|test|testing|eval|evaluation)(?:$|[-._ 0-9/])"
    r"|^data/.*-\d{5}-of-\d{5}"
)
_CARD_BYTES = 1 << 20


def is_data(file: Path) -> bool:
    """By its name."""
    return file.suffix.lower() in DATA_SUFFIXES


def files_below(directory: Path) -> Iterator[Path]:
    """The data files in `directory` and below by name, first those directly in it. Hidden ones are left out, as `datasets` does, and links
    to directories are not followed. Raises DataError for a link to a file that is not there.
    """
    for place, inner, names in os.walk(directory):
        inner[:] = sorted(name for name in inner if not name.startswith((".", "__")))
        for file in (Path(place) / name for name in sorted(names) if name[0] != "."):
            if is_data(file):
                check_link(file)
                yield file


def check_link(path: Path) -> None:
    """Raises DataError if `path` is a symbolic link to what does not exist, or if links on the way to it lead in a circle."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{path}: its symbolic links lead in a circle; link it to the file that is meant, or remove it") from None
        if isinstance(error, FileNotFoundError) and path.is_symlink():
            target = str(path.readlink())
            raise DataError(f"{path}: a symbolic link to {target!r}, which does not exist; correct the link, or remove it") from None


def may_have_splits(directory: Path) -> bool:
    """Whether a dataset card, or a name of a file or directory in `directory`, may define splits, or all its files lie below it. What the
    splits are, only `datasets` knows.
    """
    if (directory / ".huggingface.yaml").exists():
        return True
    with suppress(OSError), (directory / "README.md").open("rb") as card:
        if (text := card.read(_CARD_BYTES)).startswith(b"---") and b"configs" in text:
            return True
    files = [file.relative_to(directory) for file in files_below(directory)]
    return any(_SPLIT_NAME.search(file.as_posix()) for file in files) or (bool(files) and all(len(file.parts) > 1 for file in files))
