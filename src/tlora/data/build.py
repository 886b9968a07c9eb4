"""Makes one tokenized set from the sources of a job's data, or finds it in the cache.

Owns the cache key, cutting to `max_length`, skipping samples without trained tokens, and the report on these.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from tlora import durable
from tlora.data.columns import format_of
from tlora.data.dataset import FORMAT_VERSION, Writer, find_damage
from tlora.data.encode import Encoder
from tlora.data.encoded_blocks import EncodedBlock, Recipe, Task, encode_blocks, num_processes
from tlora.data.formats import COLUMNS, Format
from tlora.data.known_sets import VERSIONS, named
from tlora.data.report import DataReport
from tlora.data.request import DataLimits
from tlora.data.rows import BLOCK_BYTES, BLOCK_ROWS, Row, no_rows, read_blocks, rows_of
from tlora.data.sources import Source
from tlora.data_directory import data_suffix
from tlora.errors import DataError
from tlora.file_identity import identity_of
from tlora.job import Rows
from tlora.processes import LostProcessError
from tlora.version import __version__
from tlora.wording.numbers import quantity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MOST_LISTED = 20
_NUMBER = re.compile(r", (?:line|row) (\d+)")


@dataclass
class BadRows:
    """`first` are the messages of the first rows in the order of `files`, not of discovery."""

    files: Sequence[Path]
    count: int = 0
    reasons: set[str] = field(default_factory=set[str])  # without their places; two are enough to know that they differ
    first: list[str] = field(default_factory=list[str])
    _last: str = ""

    def add(self, error: DataError) -> None:
        """One more; several errors of one row count once if they come one after another."""
        message = str(error)
        place = self._place(message)
        if str(place) == self._last:
            return
        self._last = str(place)
        self.count += 1
        if len(self.reasons) < 2:
            self.reasons.add(message.partition(": ")[2])
        if len(self.first) < MOST_LISTED or place < self._place(self.first[-1]):
            self.first = sorted([*self.first, message], key=self._place)[:MOST_LISTED]

    def as_json(self) -> list[object]:
        return [self.count, sorted(self.reasons), self.first, self._last]

    def restore(self, saved: list[Any]) -> None:
        """`saved`: the value of `as_json`, written and read back."""
        self.count, reasons, self.first, self._last = saved
        self.reasons = set(reasons)

    def error(self, display_name: str, rows: int) -> DataError:
        """An error about all bad rows among `rows`; the first one's own message if there is no other, or if none is better."""
        if self.count == rows and len(self.reasons) == 1:
            return DataError(self.first[0])
        if self.count == 1:
            return DataError(f"{self.first[0]}. Mend the row, or leave it out with on_bad_rows: drop")
        more = [f"and {self.count - len(self.first):,} more"] if self.count > len(self.first) else []
        listed = "\n".join(f"  {line}" for line in [*self.first, *more])
        return DataError(
            f"{display_name}: {self.count:,} of {rows:,} rows are bad:\n{listed}\nMend them, or leave them out with on_bad_rows: drop"
        )

    def _place(self, message: str) -> tuple[int, int]:
        file = next((index for index, file in enumerate(self.files) if message.startswith(f"{file}, ")), len(self.files))
        number = _NUMBER.search(message)
        return file, int(number[1]) if number else 0


Beat = Callable[[int, float], None]  # rows so far, share of the bytes; called at least once a batch


@dataclass(frozen=True)
class SetSpec:
    """One set to make: the part of a job's `DataConfig` that determines its tokens, and where sets are kept."""

    sources: tuple[Source, ...]
    format: str
    max_length: int
    cache_dir: Path
    rows: Rows = "samples"
    limits: DataLimits | None = None  # no part of the tokens
    drop_bad_rows: bool = False
    keep_unfinished: bool = True

    @property
    def display_name(self) -> str:
        return " + ".join(source.display_name for source in self.sources)

    @property
    def files(self) -> list[Path]:
        return [file for source in self.sources for file in source.files]


def cache_key(order: SetSpec, encoder: Encoder, file_hash: Callable[[Path], str], version: int = FORMAT_VERSION) -> str:
    """Hash of everything that determines the tokens: file contents, tokenizer, template, settings, and the `version` of their reading."""
    parts = {
        "version": version,
        "files": [(data_suffix(file), file_hash(file)) for file in order.files],
        "tokenizer": tokenizer_hash(encoder.tokenizer),
        "template": encoder.template.text(),
        "settings": [order.format, order.max_length, encoder.train_all, encoder.vocab_size],
    }
    if order.rows != "samples":
        parts["rows"] = order.rows
    if encoder.last_turn:
        parts["train_on"] = "last"
    if encoder.template.kwargs:
        parts["template_kwargs"] = dict(encoder.template.kwargs)
    if version > 2:
        parts["stops"] = sorted(encoder.template.stops)
    if order.drop_bad_rows:
        parts["on_bad_rows"] = "drop"
    if len(order.sources) > 1:  # with one source the key is that of earlier versions, so their sets are still found
        parts["sources"] = [len(source.files) for source in order.sources]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything in a tokenizer that determines token ids."""
    state = tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    return hashlib.sha256(
        json.dumps([state, {key: str(value) for key, value in tokenizer.special_tokens_map.items()}]).encode()
    ).hexdigest()


def hash_file(file: Path, beat: Beat) -> str:
    """sha256 of the content; calls `beat` while it reads."""
    return durable.sha256(file, lambda: beat(0, 0.0))


def build(order: SetSpec, encoder: Encoder, file_hash: Callable[[Path], str], beat: Beat) -> tuple[Path, str | None]:
    """The directory of the finished set, and the damage of an earlier one that had to be replaced.

    Raises DataError with file and row. With `keep_unfinished`, the next call continues an unfinished set if this process, or one of its
    pool, is killed or interrupted; any other error removes it.
    """
    final = order.cache_dir / cache_key(order, encoder, file_hash)

    def damage_of() -> str | None:
        return find_damage(final, encoder.vocab_size, lambda: beat(0, 0.0))

    damage = damage_of() if final.exists() else ""
    if damage is None:
        return final, None
    identity = _identity(order, final) if order.keep_unfinished else None
    writer = Writer(final, identity, lambda: beat(0, 0.0))
    try:
        report = _fill(writer, order, encoder, beat)
        if final.exists() and damage_of() is not None:  # another process may have repaired it meanwhile
            shutil.rmtree(final)
        earlier = [cache_key(order, encoder, file_hash, version) for version in range(1, FORMAT_VERSION)]
        writer.finish(report.as_meta() | {"earlier_keys": earlier})
    except LostProcessError as error:
        writer.leave()
        raise DataError(str(error)) from None
    except (KeyboardInterrupt, SystemExit):
        writer.leave()
        raise
    except BaseException:
        writer.abandon()
        raise
    return final, damage or None


def _identity(order: SetSpec, final: Path) -> object:
    """Identifies the inputs and code that make a set. Stricter than the cache's key: messages about rows name the files, and blocks are
    skipped by their number.
    """
    made_by = [__version__, FORMAT_VERSION, BLOCK_ROWS, BLOCK_BYTES, [version(name) for name in (*VERSIONS, "pyarrow")]]
    return [final.name, made_by, [[str(file), *named(file, identity_of(file.stat()))] for file in order.files]]


@dataclass
class _Progress:
    """The counts so far, and the position: after `blocks` blocks and `rows` rows of the source number `source`."""

    report: DataReport
    bad: BadRows
    formats: list[str] = field(default_factory=list[str])
    source: int = 0
    blocks: int = 0
    rows: int = 0
    only_numbers: bool = True
    only_empty: bool = True

    def as_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _OWN}
        return own | {"report": self.report.as_meta(), "bad": self.bad.as_json()}

    def restore(self, saved: dict[str, Any]) -> None:
        for name in _OWN:
            setattr(self, name, saved[name])
        self.report = DataReport.from_meta(saved["report"], self.report.files)
        self.bad.restore(saved["bad"])

    def add(self, block: EncodedBlock) -> None:
        self.only_numbers = self.only_numbers and block.only_numbers
        self.only_empty = self.only_empty and block.only_empty
        self.report.add(block.report)
        for error in block.bad:
            self.bad.add(error)
        self.blocks += 1

    def end_source(self) -> None:
        self.formats.append(self.report.format)
        self.report.sources.append(self.samples)
        self.source, self.blocks, self.rows = self.source + 1, 0, self.report.rows
        self.only_numbers = self.only_empty = True

    @property
    def samples(self) -> int:
        """Of the source that is read."""
        return self.report.samples - sum(self.report.sources)


_OWN = ("formats", "source", "blocks", "rows", "only_numbers", "only_empty")


def _fill(writer: Writer, order: SetSpec, encoder: Encoder, beat: Beat) -> DataReport:
    report = DataReport(files=[str(file) for file in order.files], stops=sorted(encoder.template.stops))
    done = _Progress(report, BadRows(order.files))
    if writer.counts is not None:
        done.restore(writer.counts)
    sizes = [sum(file.stat().st_size for file in source.files) for source in order.sources]
    for number in range(done.source, len(order.sources)):
        before, total = sum(sizes[:number]), max(1, sum(sizes))

        def beat_in_whole(rows: int, share: float, before: int = before, size: int = sizes[number], total: int = total) -> None:
            beat(rows, (before + share * size) / total)

        _fill_source(writer, replace(order, sources=(order.sources[number],)), encoder, done, beat_in_whole)
        done.end_source()
    report, bad = done.report, done.bad
    if bad.count and not order.drop_bad_rows:
        raise bad.error(order.display_name, report.rows)
    report.dropped, report.bad_rows = bad.count, bad.first
    report.format = ", ".join(dict.fromkeys(done.formats))
    return report


def _fill_source(writer: Writer, order: SetSpec, encoder: Encoder, done: _Progress, beat: Beat) -> None:
    """Add the samples of the one source of `order`, except those of the blocks that are done."""
    report, bad, tasks = done.report, done.bad, _tasks(order)
    for task in itertools.islice(tasks, done.blocks):
        beat(report.rows, task.block.share)
    recipe = Recipe(order.display_name, encoder, order.max_length, order.rows)
    processes = 1 if order.limits is not None else num_processes(sum(file.stat().st_size for file in order.files))
    with contextlib.closing(encode_blocks(recipe, tasks, processes)) as blocks:
        for block in blocks:
            writer.extend(block.samples)
            done.add(block)
            writer.save(done.as_json)
            beat(report.rows, block.share)
    rows, samples = report.rows - done.rows, done.samples
    if not rows:
        raise no_rows(order.files, order.display_name)
    if bad.count and not samples:
        raise bad.error(order.display_name, rows)
    if done.only_numbers and report.format == "text":
        raise DataError(
            f"{order.display_name}: all {rows} values of column 'text' are numbers; expected text: name the column of text 'text'"
        )
    if not samples:
        raise DataError(
            f"{order.display_name}: none of {quantity(rows, 'row')} has a token to train on within max_length {order.max_length}; "
            "raise max_length, or check that the rows hold assistant turns or completions (train_on: all trains everything)"
        )
    if done.only_empty:
        columns = " + ".join(COLUMNS[cast("Format", report.format)])
        raise DataError(
            f"{order.display_name}: all answers of {quantity(samples, 'row')} are empty; expected text to train on. Format {report.format} "
            f"reads {columns}: fill the answers there, or rename the column that holds them"
        )


def _tasks(order: SetSpec) -> Iterator[Task]:
    """The blocks of all files, each with the format that the first good row before it has. Raises DataError."""
    data_format, is_known, number = cast("Format | Literal['auto']", order.format), False, 0
    for block in read_blocks(order.files):
        if order.limits is not None:
            block = replace(block, content=tuple(rows_of(block)))
            for row in block.content:
                if isinstance(row, Row):
                    number += 1
                    order.limits.check_row(row.place, number, row.value)
        yield Task(block, data_format)
        for row in rows_of(block) if not is_known else ():
            if isinstance(row, Row):
                with contextlib.suppress(DataError):
                    data_format, is_known = format_of(row, data_format, order.rows), True
                    break
