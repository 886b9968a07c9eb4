"""Lists the files of a data directory, and whether their names or a dataset card may define splits. Reads no row."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tlora.errors import DataError
from tlora.job import COMPRESSED_SUFFIXES, DATA_SUFFIXES

# Names of files and directories by which `datasets` infers a split (SPLIT_KEYWORDS and SPLIT_PATTERN_SHARDED of its data_files.py).
_SPLIT_NAME = re.compile(
    r"(?:^|[-._ 0-9/])(?:train|training|validation|valid|dev|val|test|testing|eval|evaluation)(?:$|[-._ 0-9/])"
    r"|^data/.*-\d{5}-of-\d{5}"
)
_CARD_BYTES = 1 << 20
COMPRESSIONS: dict[str, str] = dict(zip(COMPRESSED_SUFFIXES, ("gzip", "zstd"), strict=True))
_COMPRESSED_INSIDE = (".parquet", ".arrow")  # by their own formats
SUFFIX_LIST = f"{', '.join(DATA_SUFFIXES)}, text formats also with {' or '.join(COMPRESSED_SUFFIXES)} after it"


def data_suffix(file: Path) -> str:
    """The suffix that says what a data file holds, such as ".jsonl" of "a.jsonl.gz", in lower case; empty for other files."""
    suffix = file.suffix.lower()
    inner = Path(file.stem).suffix.lower() if suffix in COMPRESSIONS else suffix
    known = inner in DATA_SUFFIXES and (inner == suffix or inner not in _COMPRESSED_INSIDE)
    return inner if known else ""


def files_below(directory: Path) -> Iterator[Path]:
    """The data files in `directory` and below by name, first those directly in it. Hidden ones are left out, as `datasets` does, and links
    to directories are not followed. Raises DataError for a link to a file that is not there.
    """
    for place, inner, names in os.walk(directory):
        inner[:] = sorted(name for name in inner if not name.startswith((".", "__")))
        for file in (Path(place) / name for name in sorted(names) if name[0] != "."):
            if data_suffix(file):
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


def check_kind(path: Path) -> None:
    """Raises DataError if `path` is there, and neither a file nor a directory."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: is neither a file nor a directory but a pipe, a socket or a device; write what it holds to a file first")


def nearest_name(path: Path) -> str | None:
    """The name in the directory of `path` that resembles its own most, with or without suffixes; None if there is none."""
    if not path.parent.is_dir():
        return None
    names = [item.name for item in path.parent.iterdir()]
    by_spelling = {name.split(".")[0]: name for name in names} | {name: name for name in names}
    near = difflib.get_close_matches(path.name, by_spelling, n=1)
    return by_spelling[near[0]] if near else None


def may_have_splits(directory: Path) -> bool:
    """Whether a dataset card, or a name of a file or directory in `directory`, may define splits, or all its files are in subdirectories.
    Only `datasets` knows what the splits are.
    """
    if (directory / ".huggingface.yaml").exists():
        return True
    with suppress(OSError), (directory / "README.md").open("rb") as card:
        if (text := card.read(_CARD_BYTES)).startswith(b"---") and b"configs" in text:
            return True
    files = [file.relative_to(directory) for file in files_below(directory)]
    return any(_SPLIT_NAME.search(file.as_posix()) for file in files) or (bool(files) and all(len(file.parts) > 1 for file in files))
