"""Reads rows from data files one at a time, each with its file and line or row number.

Owns containers (JSONL, JSON array, CSV, text, Parquet, a directory of them, a saved `datasets` set) and what can be wrong with
their bytes. Knows nothing of what the columns mean (`formats.py`). Never holds more than one block of rows. To read blocks is quick; rows
of lines and Arrow records are parsed apart from that, in whichever process `rows_of` is called.

JSON is read here and not by `datasets` or pyarrow: those give all rows of a column one type, and write text that looks like a date,
numbers and absent keys anew (docs/adr/018-rows-are-read-as-they-stand-in-the-file.md).
"""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TypeVar, cast

import pyarrow as pa

from tlora.data.file_bytes import Source, check_head, open_bytes, read_arrow, read_parquet, records_of
from tlora.data.sources import SUFFIXES, list_files
from tlora.data_directory import data_suffix
from tlora.errors import DataError, shown
from tlora.json_file import DECODER, KeyTwiceError
from tlora.wording.numbers import quantity

MAX_ROW_BYTES = 16 << 20  # a row beyond it is no training sample but a broken file: the longest context holds some 4 MB of text
CHUNK_BYTES = 1 << 16
BLOCK_ROWS = 128
BLOCK_BYTES = 1 << 19
_JSON_SPACE = " \t\r\n"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Row:
    """One row as read. `share` is the part of all bytes (or rows) read so far, for progress: of a block all have that of its end."""

    place: str  # file and row as a person looks for it: "sql.jsonl, line 3" or "sql.parquet, row 3" (both count from 1)
    value: dict[str, object]
    share: float


@dataclass(frozen=True)
class Block:
    """Rows of a file one after another, as `read_blocks` gives them: lines (bytes) or Arrow records still to be parsed, or parsed rows and
    the errors of those that cannot be. `share` is the part of all bytes (or rows) read with it, for progress.
    """

    file: Path
    content: tuple[bytes, ...] | pa.RecordBatch | tuple[Row | DataError, ...]
    before: int = 0  # lines or records of the file before it
    start: int = 0  # bytes before it
    share: float = 0.0


Refuse = Callable[[DataError], None]


def read_rows(path: Path) -> Iterator[Row]:
    """Every row behind `path`, as `read_files`."""
    return read_files(list_files(path), str(path))


def read_files(files: Sequence[Path], display_name: str) -> Iterator[Row]:
    """Every row of `files`, streaming. Raises DataError with file and row for the first that cannot be read, and with `display_name`
    where there is none.
    """
    count = 0
    for block in read_blocks(files):
        for row in rows_of(block):
            if isinstance(row, DataError):
                raise row
            count += 1
            yield row
    if not count:
        raise no_rows(files, display_name)


def no_rows(files: Sequence[Path], display_name: str) -> DataError:
    return DataError(f"{display_name}: the {'file is empty' if len(files) == 1 else 'files are empty'}; at least one row is needed")


def read_blocks(files: Sequence[Path]) -> Iterator[Block]:
    """All rows of `files` in blocks; the same blocks for the same contents. Raises DataError where those after a row cannot be read."""
    sizes = [file.stat().st_size for file in files]
    total, before = max(1, sum(sizes)), 0
    for file, size in zip(files, sizes, strict=True):
        for block in _blocks_of(file):
            yield replace(block, share=(before + block.share * size) / total)
        before += size


def rows_of(block: Block) -> Iterator[Row | DataError]:
    """The rows of a block in their order, and errors with file and row in place of those that cannot be read."""
    if isinstance(block.content, pa.RecordBatch):
        records = records_of(block.content, block.file, block.before)
        yield from (Row(f"{block.file}, row {number}", value, block.share) for number, value in enumerate(records, block.before + 1))
        return
    is_text, start = SUFFIXES[data_suffix(block.file)] == "text", block.start
    for number, item in enumerate(block.content, block.before + 1):
        if isinstance(item, bytes):
            place = f"{block.file}, line {number}"
            try:
                line = _decode(item, start, place)
                value = _text_line(line) if is_text else _parse_line(line, place)
            except DataError as error:
                yield error
            else:
                if value is not None:
                    yield Row(place, value, block.share)
            start += len(item)
        else:
            yield Row(item.place, item.value, block.share) if isinstance(item, Row) else item


def _blocks_of(file: Path) -> Iterator[Block]:
    kind = SUFFIXES[data_suffix(file)]
    try:
        check_head(file)
        if kind in ("parquet", "arrow"):
            number = 0
            for batch, share in read_parquet(file) if kind == "parquet" else read_arrow(file):
                yield Block(file, batch, number, share=share)
                number += batch.num_rows
        elif kind in ("csv", "tsv"):
            yield from _blocks_of_rows(file, lambda refuse: _read_csv(file, "," if kind == "csv" else "\t", refuse))
        elif kind != "text" and _first_character(file) == b"[":
            yield from _blocks_of_rows(file, lambda refuse: _read_array(file, refuse))
        else:
            yield from _blocks_of_lines(file)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error}); check the file and its permissions") from error


def _blocks_of_lines(file: Path) -> Iterator[Block]:
    lines, before, start = _Lines(file), 0, 0
    for held in _groups(lines.raw(), len):
        yield Block(file, tuple(held), before, start, lines.share)
        before, start = lines.number, lines.position


def _blocks_of_rows(file: Path, read: Callable[[Refuse], Iterator[Row]]) -> Iterator[Block]:
    """Of rows that are parsed as they are read, as one cannot tell where they end without it."""
    refused: list[DataError] = []

    def items() -> Iterator[Row | DataError]:
        for row in read(refused.append):
            yield from refused
            refused.clear()
            yield row
        yield from refused

    for held in _groups(items(), _characters):
        rows = [item for item in held if isinstance(item, Row)]
        yield Block(file, tuple(held), share=rows[-1].share if rows else 0.0)


def _characters(item: Row | DataError) -> int:
    return sum(len(value) for value in item.value.values() if isinstance(value, str | list)) if isinstance(item, Row) else 0


def _groups(items: Iterable[_T], size_of: Callable[[_T], int]) -> Iterator[list[_T]]:
    """By number, and by size, so that long ones do not pile up."""
    held, size = list[_T](), 0
    for item in items:
        held.append(item)
        size += size_of(item)
        if len(held) >= BLOCK_ROWS or size >= BLOCK_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


# --- lines ---


@dataclass
class _Lines:
    """Numbered lines of a file; the size limit protects memory from a file without line breaks."""

    file: Path
    number: int = 0
    position: int = 0  # bytes read, decompressed
    source: Source | None = None

    def raw(self) -> Iterator[bytes]:
        with open_bytes(self.file) as self.source:
            while raw := self.source.stream.readline(MAX_ROW_BYTES + 1):
                self.number += 1
                if len(raw) > MAX_ROW_BYTES:
                    raise DataError(
                        f"{self.file}, line {self.number}: longer than {MAX_ROW_BYTES >> 20} MiB; a row is one sample: split it, "
                        "or check that each row is a line of its own"
                    )
                self.position += len(raw)
                yield raw
        self.source = None

    def decoded(self, refuse: Refuse) -> Iterator[str]:
        """`refuse` gets the errors of those that are not UTF-8."""
        for raw in self.raw():
            try:
                yield _decode(raw, self.position - len(raw), f"{self.file}, line {self.number}")
            except DataError as error:
                refuse(error)

    @property
    def share(self) -> float:
        return self.source.share if self.source else 1.0


def _decode(raw: bytes, start: int, place: str) -> str:
    try:
        return raw.decode("utf-8-sig" if start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        where = f"{place}, byte {start + error.start}"
        raise DataError(
            f"{where}: not UTF-8 ({error.reason}, {raw[error.start : error.start + 1]!r}); convert the file to UTF-8"
        ) from error


def _text_line(line: str) -> dict[str, object] | None:
    """A row of column `text` for each line that is not blank, as `datasets` reads text."""
    text = line.rstrip("\r\n")
    return {"text": text} if text else None


def _parse_line(line: str, place: str) -> dict[str, object] | None:
    return _object(_parse(line, place), place) if line.strip() else None


def _parse(text: str, place: str) -> object:
    try:
        return DECODER.decode(text)
    except KeyTwiceError as error:
        return error
    except ValueError as error:
        problem = "an object over several lines" if text.strip() == "{" else f"broken JSON ({error})"
        raise DataError(f"{place}: {problem}; expected one JSON object a line, or one array of objects in the file") from error
    except RecursionError as error:
        raise DataError(f"{place}: JSON nested too deeply; expected one flat object of columns") from error


def _object(value: object, place: str) -> dict[str, object]:
    if isinstance(value, KeyTwiceError):
        raise DataError(f"{place}: {value}")
    if not isinstance(value, dict):
        raise DataError(f'{place}: {shown(value)} is no JSON object; expected a row like {{"text": ...}}')
    return cast("dict[str, object]", value)


_SEPARATORS = {";": "semicolon", "\t": "tab", "|": "bar", ",": "comma"}


def _read_csv(file: Path, delimiter: str, refuse: Refuse) -> Iterator[Row]:
    lines, mark = _Lines(file), "comma" if delimiter == "," else "tab"
    csv.field_size_limit(MAX_ROW_BYTES)  # the module's own limit of 128 KiB refuses long texts
    reader = csv.reader(lines.decoded(refuse), delimiter=delimiter, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        if len(set(header)) != len(header) or not all(header):
            raise DataError(f"{file}, line 1: the header {shown(header)} needs a different name for every column")
        if len(header) == 1 and (other := next((each for each in _SEPARATORS if each in header[0]), None)):
            raise DataError(
                f"{file}, line 1: the header {shown(header[0])} is one column, for {mark}s separate cells here, and not "
                f"{_SEPARATORS[other]}s. Save it with {mark}s" + (", or name it .tsv" if other == "\t" else "")
            )
        for cells in reader:
            if not cells:
                continue
            if len(cells) == len(header):
                yield Row(f"{file}, line {lines.number}", dict(zip(header, cells, strict=True)), lines.share)
                continue
            why = f"{quantity(len(cells), 'cell')} where the header has {len(header)}; quote cells that hold {mark}s"
            refuse(DataError(f"{file}, line {lines.number}: {why}"))
    except csv.Error as error:
        raise DataError(f'{file}, line {lines.number}: broken CSV ({error}); expected {mark}-separated cells, quoted with "') from error


# --- a JSON array, parsed as it comes ---


def _first_character(file: Path) -> bytes:
    with open_bytes(file) as source:
        while chunk := source.stream.read(CHUNK_BYTES):
            if text := chunk.removeprefix(codecs.BOM_UTF8).lstrip():
                return text[:1]
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
    with open_bytes(file) as source:
        window = _Text(source.stream)
        window.skip_space()
        window.text = window.text[1:]  # the bracket
        if window.skip_space() == "]":
            return
        while True:
            number += 1
            place = f"{file}, row {number}"
            value = _next_element(window, place)
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
                actual = repr(mark) if mark else "the end of the file"
                raise DataError(f"{file}, after row {number}: broken JSON, {actual} where ',' or ']' is expected; is the file cut off?")
        if rest := window.skip_space():
            raise DataError(f"{file}, after row {number}: {rest!r} follows the array's end; expected one JSON array")


def _check_utf8(window: _Text, place: str) -> None:
    if window.failure:
        byte, reason = window.failure
        raise DataError(f"{place}, byte {byte}: not UTF-8 ({reason}); convert the file to UTF-8")


def _next_element(window: _Text, place: str) -> object:
    window.skip_space()
    decoder, twice = DECODER, None
    while True:
        try:
            value, consumed = decoder.raw_decode(window.text)
            if consumed < len(window.text) or not window.fill():  # a number at the window's end may go on
                window.text = window.text[consumed:]
                return twice or value
        except KeyTwiceError as error:
            decoder, twice = json.JSONDecoder(), error  # which finds the row's end
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
