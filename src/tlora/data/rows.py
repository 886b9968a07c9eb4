"""Reads rows from data files one at a time, each with its file and line or row number.

Owns containers (JSONL, JSON array, CSV, text, Parquet, a directory of them, a saved `datasets` set) and what can be wrong with
their bytes. Knows nothing of what the columns mean (`formats.py`). Never holds more than one row, or one small batch.

JSON is read here and not by `datasets` or pyarrow: those give all rows of a column one type, and write text that looks like a date,
numbers and absent keys anew (docs/design.md, "Rows as they stand in the file").
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from tlora.data.data_files import SUFFIXES, list_files
from tlora.data.file_bytes import Source, check_head, open_bytes
from tlora.data_directory import data_suffix
from tlora.errors import DataError

MAX_ROW_BYTES = 16 << 20  # a row beyond it is no training sample but a broken file: the longest context holds some 4 MB of text
CHUNK_BYTES = 1 << 16
ARROW_BATCH_ROWS = 64
_JSON_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Row:
    """One row as read. `share` is the part of all bytes (or rows) read so far, for progress."""

    place: str  # file and row as a person looks for it: "sql.jsonl, line 3" or "sql.parquet, row 3" (both count from 1)
    value: dict[str, object]
    share: float


def read_rows(path: Path) -> Iterator[Row]:
    """Every row behind `path`, as `read_files`."""
    return read_files(list_files(path), str(path))


def _raise(error: DataError) -> None:
    raise error


Refuse = Callable[[DataError], None]


def read_files(files: Sequence[Path], called: str, refuse: Refuse = _raise) -> Iterator[Row]:
    """Every row of `files`, streaming. `refuse` is called with file and row for each that cannot be read, if those after it can be. Raises
    DataError where they cannot, and with the name `called` where there is no row.
    """
    sizes = [file.stat().st_size for file in files]
    total, before, count = max(1, sum(sizes)), 0, 0

    def refuse_one(error: DataError) -> None:
        nonlocal count
        count += 1
        refuse(error)

    for file, size in zip(files, sizes, strict=True):
        for row in _read_file(file, refuse_one):
            count += 1
            yield Row(row.place, row.value, (before + row.share * size) / total)
        before += size
    if not count:
        raise DataError(f"{called}: the {'file is empty' if len(files) == 1 else 'files are empty'}; at least one row is needed")


def _read_file(file: Path, refuse: Refuse) -> Iterator[Row]:
    kind = SUFFIXES[data_suffix(file)]
    try:
        check_head(file)
        if kind == "parquet":
            yield from _read_parquet(file)
        elif kind == "arrow":
            yield from _read_arrow(file)
        elif kind in ("csv", "tsv"):
            yield from _read_csv(file, "," if kind == "csv" else "\t", refuse)
        elif kind == "text":
            yield from _read_text(file, refuse)
        elif _first_character(file) == b"[":
            yield from _read_array(file, refuse)
        else:
            yield from _read_lines_of_json(file, refuse)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error}); check the file and its permissions") from error


# --- lines ---


@dataclass
class _Lines:
    """Decoded, numbered lines of a file; the size limit protects memory from a file without line breaks."""

    file: Path
    refuse: Refuse = _raise  # lines that are not UTF-8
    number: int = 0
    position: int = 0  # bytes read, decompressed
    source: Source | None = None

    def __iter__(self) -> Iterator[str]:
        with open_bytes(self.file) as self.source:
            while raw := self.source.stream.readline(MAX_ROW_BYTES + 1):
                self.number += 1
                if len(raw) > MAX_ROW_BYTES:
                    raise DataError(
                        f"{self.file}, line {self.number}: longer than {MAX_ROW_BYTES >> 20} MiB; a row is one sample: split it, "
                        "or check that the lines end in a newline"
                    )
                try:
                    line = self._decode(raw)
                except DataError as error:
                    self.refuse(error)
                else:
                    yield line

    def _decode(self, raw: bytes) -> str:
        start = self.position
        self.position += len(raw)
        try:
            return raw.decode("utf-8-sig" if start == 0 else "utf-8")
        except UnicodeDecodeError as error:
            where = f"{self.file}, line {self.number}, byte {start + error.start}"
            raise DataError(
                f"{where}: not UTF-8 ({error.reason}, {raw[error.start : error.start + 1]!r}); convert the file to UTF-8"
            ) from error

    def row(self, value: dict[str, object]) -> Row:
        return Row(f"{self.file}, line {self.number}", value, self.source.share if self.source else 0.0)


def _read_lines_of_json(file: Path, refuse: Refuse) -> Iterator[Row]:
    lines = _Lines(file, refuse)
    for line in lines:
        if line.strip():
            place = f"{file}, line {lines.number}"
            try:
                value = _object(_parse(line, place), place)
            except DataError as error:
                refuse(error)
            else:
                yield lines.row(value)


def _parse(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{place}: broken JSON ({error}); expected one JSON object a line, or one array of objects in the file") from error
    except RecursionError as error:
        raise DataError(f"{place}: JSON nested too deeply; expected one flat object of columns") from error


def _object(value: object, place: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DataError(f'{place}: {_short(value)} is no JSON object; expected a row like {{"text": ...}}')
    return cast("dict[str, object]", value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _read_text(file: Path, refuse: Refuse) -> Iterator[Row]:
    """A row of column `text` for each line that is not blank, as `datasets` reads text."""
    lines = _Lines(file, refuse)
    for line in lines:
        if text := line.rstrip("\r\n"):
            yield lines.row({"text": text})


def _read_csv(file: Path, delimiter: str, refuse: Refuse) -> Iterator[Row]:
    lines, mark = _Lines(file), "comma" if delimiter == "," else "tab"
    csv.field_size_limit(MAX_ROW_BYTES)  # the module's own limit of 128 KiB refuses long texts
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        if len(set(header)) != len(header) or not all(header):
            raise DataError(f"{file}, line 1: the header {_short(header)} needs a different name for every column")
        for cells in reader:
            if not cells:
                continue
            if len(cells) == len(header):
                yield lines.row(dict(zip(header, cells, strict=True)))
                continue
            why = f"{len(cells)} cells where the header has {len(header)}; quote cells that hold {mark}s"
            refuse(DataError(f"{file}, line {lines.number}: {why}"))
    except csv.Error as error:
        raise DataError(f'{file}, line {lines.number}: broken CSV ({error}); expected {mark}-separated cells, quoted with "') from error


# --- a JSON array, parsed as it comes ---


def _first_character(file: Path) -> bytes:
    with open_bytes(file) as source:
        while chunk := source.stream.read(CHUNK_BYTES):
            if found := chunk.removeprefix(codecs.BOM_UTF8).lstrip():
                return found[:1]
    return b""


class _Text:
    """A decoded window on a file that grows by `fill` and is consumed from its start."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""
        self.offset = 0  # bytes read
        self.failure: tuple[int, str] | None = None  # byte and reason of the first that is not UTF-8

    def fill(self) -> bool:
        """Read about as much again as the window holds, so that a long row costs linear time; False at the end."""
        if self.failure:
            return False
        chunk = self.stream.read(max(CHUNK_BYTES, len(self.text)))
        pending = len(self.decoder.getstate()[0])
        try:
            text = self.decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            self.failure = (self.offset - pending + error.start, error.reason)
            text = cast("bytes", error.object)[: error.start].decode()
        self.text += text.removeprefix("\ufeff") if self.offset == 0 else text
        self.offset += len(chunk)
        return bool(chunk)

    def skip_space(self) -> str:
        """Drop white space and return the next character, "" at the end."""
        while True:
            self.text = self.text.lstrip(_JSON_SPACE)
            if self.text or not self.fill():
                return self.text[:1]


def _read_array(file: Path, refuse: Refuse) -> Iterator[Row]:
    number = 0
    decoder = json.JSONDecoder()
    with open_bytes(file) as source:
        window = _Text(source.stream)
        window.skip_space()
        window.text = window.text[1:]  # the bracket
        if window.skip_space() == "]":
            return
        while True:
            number += 1
            place = f"{file}, row {number}"
            value = _next_element(window, decoder, place)
            try:
                row = _object(value, place)
            except DataError as error:
                refuse(error)
            else:
                yield Row(place, row, source.share)
            mark = window.skip_space()
            window.text = window.text[1:]
            if mark == "]":
                break
            if mark != ",":
                _check_utf8(window, f"{file}, after row {number}")
                found = repr(mark) if mark else "the end of the file"
                raise DataError(f"{file}, after row {number}: broken JSON, {found} where ',' or ']' is expected; is the file cut off?")
        if rest := window.skip_space():
            raise DataError(f"{file}, after row {number}: {rest!r} follows the array's end; expected one JSON array")


def _check_utf8(window: _Text, place: str) -> None:
    if window.failure:
        byte, reason = window.failure
        raise DataError(f"{place}, byte {byte}: not UTF-8 ({reason}); convert the file to UTF-8")


def _next_element(window: _Text, decoder: json.JSONDecoder, place: str) -> object:
    window.skip_space()
    consumed = 0
    while True:
        try:
            value, consumed = decoder.raw_decode(window.text)
            if consumed < len(window.text) or not window.fill():  # a number at the window's end may go on
                window.text = window.text[consumed:]
                return value
        except RecursionError as error:
            raise DataError(f"{place}: JSON nested too deeply; expected one flat object of columns") from error
        except ValueError as error:
            if len(window.text) > MAX_ROW_BYTES:
                raise DataError(
                    f"{place}: longer than {MAX_ROW_BYTES >> 20} MiB, or a quote is never closed; a row is one sample"
                ) from error
            position = getattr(error, "pos", 0)
            cut_off = str(error).startswith("Unterminated") or position > len(window.text) - 16  # an escape or a name may be cut
            if not (cut_off and window.fill()):
                _check_utf8(window, place)
                raise DataError(f"{place}: broken JSON ({error}, counted from the row's start); expected an array of objects") from error


# --- Arrow ---


def _read_parquet(file: Path) -> Iterator[Row]:
    if file.stat().st_size == 0:
        return
    try:
        parquet = pq.ParquetFile(file, buffer_size=CHUNK_BYTES, pre_buffer=False)  # not mapped: the file may be cut meanwhile
        total = parquet.metadata.num_rows
        yield from _read_batches(file, parquet.iter_batches(batch_size=ARROW_BATCH_ROWS), total)
    except pa.ArrowException as error:
        raise DataError(f"{file}: not a readable Parquet file ({_short(str(error))}); write it again") from error


def _read_arrow(file: Path) -> Iterator[Row]:
    if file.stat().st_size == 0:
        return
    try:
        with pa.OSFile(str(file), "rb") as source:  # not mapped: the file may be cut meanwhile
            yield from _read_batches(file, iter(pa.ipc.open_stream(source)), None)
    except pa.ArrowException as error:
        raise DataError(f"{file}: not a readable Arrow stream ({_short(str(error))}); save the set again with save_to_disk") from error


def _read_batches(file: Path, batches: Iterator[pa.RecordBatch], total: int | None) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ARROW_BATCH_ROWS):
            for value in _python_rows(batch.slice(start, ARROW_BATCH_ROWS), file, number):
                number += 1
                yield Row(f"{file}, row {number}", value, number / total if total else 0.0)


def _python_rows(batch: pa.RecordBatch, file: Path, before: int) -> list[dict[str, object]]:
    try:
        return [{column: _without_absent(value) for column, value in row.items()} for row in batch.to_pylist()]
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            raise DataError(f"{file}, row {before + 1}: text that is not UTF-8 ({error.reason}); convert it") from error
        return [row for i in range(batch.num_rows) for row in _python_rows(batch.slice(i, 1), file, before + i)]


def _without_absent(value: object) -> object:
    """Without the null that Arrow puts where a record lacks a field of other records; one that was written cannot be told from it."""
    if isinstance(value, dict):
        return {key: _without_absent(item) for key, item in value.items() if item is not None}
    holds_records = isinstance(value, list) and any(isinstance(item, dict | list) for item in value)
    return [_without_absent(item) for item in cast("list[object]", value)] if holds_records else value
