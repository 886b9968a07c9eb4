"""What lies in a data file: its bytes, decompressed by its suffix, and the records of Parquet files and Arrow streams, in batches.

Detects placeholders such as Git LFS pointers.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from tlora.data_directory import COMPRESSIONS
from tlora.errors import DataError, shown

_HEAD_BYTES = 1 << 12
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype html", b"<html")
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ARROW_FILE = b"ARROW1"  # with its blocks in any order, and a footer that says where each is


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
    """Raises DataError if a file holds a Git LFS pointer or a web page instead of data, UTF-16, or an Arrow file instead of a stream."""
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
    if head.startswith(_UTF_16):
        raise DataError(f"{file}: UTF-16, as Windows PowerShell's `>` writes it; convert it: `iconv -f UTF-16 -t UTF-8 OLD > NEW`")
    if head.startswith(_ARROW_FILE):
        remedy = "write it with pyarrow.parquet.write_table(pyarrow.feather.read_table(OLD), NEW), NEW ending in .parquet"
        raise DataError(f"{file}: an Arrow file (Feather), and Arrow is read as a stream, which save_to_disk writes; {remedy}")


BATCH_ROWS = 64
_BATCH_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 16


def read_parquet(file: Path) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Yield batches of records, each with the share of all records read so far. Raises DataError."""
    if file.stat().st_size == 0:
        return
    try:
        parquet = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)  # not mapped: the file may be cut meanwhile
        number, total = 0, parquet.metadata.num_rows
        for batch in _small(parquet.iter_batches(batch_size=BATCH_ROWS)):
            number += batch.num_rows
            yield batch, number / total
    except MemoryError:  # Arrow's is one of its other errors too
        raise
    except pa.ArrowException as error:
        raise DataError(f"{file}: not a readable Parquet file ({shown(str(error))}); write it again") from error


def read_arrow(file: Path) -> Iterator[tuple[pa.RecordBatch, float]]:
    """As `read_parquet`; a stream does not say how many records it has, so the share is 0."""
    if file.stat().st_size == 0:
        return
    try:
        with pa.OSFile(str(file), "rb") as source:  # not mapped: the file may be cut meanwhile
            yield from ((batch, 0.0) for batch in _small(iter(pa.ipc.open_stream(source))))
    except MemoryError:
        raise
    except pa.ArrowException as error:
        raise DataError(f"{file}: not a readable Arrow stream ({shown(str(error))}); save the set again with save_to_disk") from error


def _small(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = max(1, min(BATCH_ROWS, batch.num_rows * _BATCH_BYTES // max(1, batch.nbytes)))
        yield from (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def records_of(batch: pa.RecordBatch, file: Path, before: int) -> list[dict[str, object]]:
    """The values of each record; `before`: the number of records before them in the file. Raises DataError."""
    try:
        return [{column: _without_absent(value) for column, value in row.items()} for row in batch.to_pylist()]
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            raise DataError(f"{file}, row {before + 1}: text that is not UTF-8 ({error.reason}); convert it") from error
        return [row for i in range(batch.num_rows) for row in records_of(batch.slice(i, 1), file, before + i)]


def _without_absent(value: object) -> object:
    """Without the nulls that Arrow adds where a record lacks a field of other records. Nulls in the file look the same and go too."""
    if isinstance(value, dict):
        return {key: _without_absent(item) for key, item in value.items() if item is not None}
    holds_records = isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    return [_without_absent(item) for item in cast("list[object]", value)] if holds_records else value
