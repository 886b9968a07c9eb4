"""The bytes of a data file, decompressed by its suffix; detects placeholders such as Git LFS pointers."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import pyarrow as pa

from tlora.data_directory import COMPRESSIONS
from tlora.errors import DataError

_HEAD_BYTES = 1 << 12
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")


class Source:
    """An open file: `stream` gives its decompressed bytes, `share` the part of it that has been read."""

    def __init__(self, file: Path, stream: IO[bytes], raw: IO[bytes] | pa.NativeFile) -> None:
        self.stream = stream
        self._raw, self._size = raw, max(1, file.stat().st_size)

    @property
    def share(self) -> float:
        return min(1.0, self._raw.tell() / self._size)


@contextmanager
def open_bytes(file: Path) -> Iterator[Source]:
    """Open a file. Reading raises DataError where a compressed stream is broken or cut off."""
    compression = COMPRESSIONS.get(file.suffix.lower())
    if compression is None:
        with file.open("rb") as stream:
            yield Source(file, stream, stream)
        return
    with file.open("rb") as raw:  # not by pyarrow: its errors about a file that cannot be opened name no file
        try:
            inner = pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression)
            yield Source(file, cast("IO[bytes]", io.BufferedReader(inner)), raw)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno is not None or not str(error):  # of the disk
                raise
            raise DataError(f"{file}: not a readable {compression} stream ({error}); fetch or compress the file again") from error


def check_head(file: Path) -> None:
    """Raises DataError if a file holds a Git LFS pointer or a web page instead of data."""
    with open_bytes(file) as source:
        head = source.stream.read(_HEAD_BYTES)
    if head.startswith(_LFS_POINTER):
        raise DataError(
            f"{file}: a Git LFS pointer, not the data that it stands for; run `git lfs pull` in the clone, or download the file itself"
        )
    if head.removeprefix(codecs.BOM_UTF8).lstrip()[:20].lower().startswith(_PAGES):
        raise DataError(
            f"{file}: a web page (HTML), not data; download the file itself: the hub and GitHub give it at an address with /resolve/ or "
            "/raw/ in place of /blob/. To train on the text of pages, write it into rows of JSONL"
        )
