"""Reads records from Parquet files and Arrow streams in batches, as Python values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pyarrow as pa
import pyarrow.parquet as pq

from tlora.errors import DataError, shown

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
    except pa.ArrowException as error:
        raise DataError(f"{file}: not a readable Parquet file ({shown(str(error))}); write it again") from error


def read_arrow(file: Path) -> Iterator[tuple[pa.RecordBatch, float]]:
    """As `read_parquet`; a stream does not say how many records it has, so the share is 0."""
    if file.stat().st_size == 0:
        return
    try:
        with pa.OSFile(str(file), "rb") as source:  # not mapped: the file may be cut meanwhile
            yield from ((batch, 0.0) for batch in _small(iter(pa.ipc.open_stream(source))))
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
