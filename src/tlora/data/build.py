"""Makes one tokenized set from the sources of a job's data, or finds it made already.

Owns the cache key, cutting to `max_length`, skipping what has nothing to train, and the report of all that.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from tlora import durable
from tlora.data.bad_rows import BadRows
from tlora.data.columns import format_of, unused_columns
from tlora.data.dataset import FORMAT_VERSION, Sample, Writer, find_damage, join
from tlora.data.encode import Encoded, Encoder, encode, encode_labelled, encode_pairs
from tlora.data.formats import Chat, Example, Format, Labelled, Pair, Text, read_examples, read_labelled, read_pair
from tlora.data.limits import DataLimits
from tlora.data.report import DataReport
from tlora.data.rows import Row, read_files
from tlora.data.sources import Source
from tlora.data_directory import data_suffix
from tlora.errors import DataError
from tlora.job import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 128
BATCH_CHARACTERS = 1 << 19
Beat = Callable[[int, float], None]  # rows so far, share of the bytes; called at least once a batch


@dataclass(frozen=True)
class Order:
    """One set to make: the part of a job's `DataConfig` that determines its tokens, and where sets are kept."""

    sources: tuple[Source, ...]
    format: str
    max_length: int
    cache_dir: Path
    rows: Rows = "samples"
    limits: DataLimits | None = None  # no part of the tokens
    drop_bad_rows: bool = False

    @property
    def called(self) -> str:
        return " + ".join(source.called for source in self.sources)

    @property
    def files(self) -> list[Path]:
        return [file for source in self.sources for file in source.files]


def cache_key(order: Order, encoder: Encoder, file_hash: Callable[[Path], str], version: int = FORMAT_VERSION) -> str:
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


def build(order: Order, encoder: Encoder, file_hash: Callable[[Path], str], beat: Beat) -> tuple[Path, str | None]:
    """The directory of the finished set, and what was wrong with an earlier one that had to be made again.

    Raises DataError with file and row; leaves nothing half-made.
    """
    final = order.cache_dir / cache_key(order, encoder, file_hash)

    def damage_of() -> str | None:
        return find_damage(final, encoder.vocab_size, lambda: beat(0, 0.0))

    damage = damage_of() if final.exists() else ""
    if damage is None:
        return final, None
    writer = Writer(final)
    try:
        report = _fill(writer, order, encoder, beat)
        if final.exists() and damage_of() is not None:  # another process may have repaired it meanwhile
            shutil.rmtree(final)
        earlier = [cache_key(order, encoder, file_hash, version) for version in range(1, FORMAT_VERSION)]
        writer.finish(report.as_meta() | {"earlier_keys": earlier})
    except BaseException:
        writer.abandon()
        raise
    return final, damage or None


def _fill(writer: Writer, order: Order, encoder: Encoder, beat: Beat) -> DataReport:
    report = DataReport(files=[str(file) for file in order.files], stops=sorted(encoder.template.stops))
    sizes = [sum(file.stat().st_size for file in source.files) for source in order.sources]
    formats: list[str] = []
    bad = BadRows(order.files)
    for number, source in enumerate(order.sources):
        before, total = sum(sizes[:number]), max(1, sum(sizes))

        def beat_in_whole(rows: int, share: float, before: int = before, size: int = sizes[number], total: int = total) -> None:
            beat(rows, (before + share * size) / total)

        samples = report.samples
        _fill_source(writer, replace(order, sources=(source,)), encoder, report, bad, beat_in_whole)
        formats.append(report.format)
        report.sources.append(report.samples - samples)
    if bad.count and not order.drop_bad_rows:
        raise bad.error(order.called, report.rows)
    report.dropped, report.bad_rows = bad.count, bad.first
    report.format = ", ".join(dict.fromkeys(formats))
    return report


def _fill_source(writer: Writer, order: Order, encoder: Encoder, report: DataReport, bad: BadRows, beat: Beat) -> None:
    """Add the samples of the one source of `order`."""
    only_numbers, rows, samples = True, report.rows, report.samples
    for examples, places, share in _batches(order, report, bad):
        only_numbers = only_numbers and all(isinstance(example, Text) and _is_number(example.completion) for example in examples)
        report.has_chats = report.has_chats or any(isinstance(_answer(example), Chat) for example in examples)
        for unit in _encode_good(encoder, examples, places, order.rows, bad):
            added_before = report.samples
            _add(writer, unit, order.max_length, report, encoder)
            if order.rows == "labelled" and report.samples > added_before:
                report.count_label(bool(unit[0].sample.loss_weights.min() >= 0))
        beat(report.rows, share)
    rows, samples = report.rows - rows, report.samples - samples
    if bad.count and not samples:
        raise bad.error(order.called, rows)
    if only_numbers and report.format == "text":
        raise DataError(f"{order.called}: all {rows} values of column 'text' are numbers; expected text: name the column of text 'text'")
    if not samples:
        raise DataError(
            f"{order.called}: none of {rows} rows has a token to train on within max_length {order.max_length}; "
            "raise max_length, or check that the rows hold assistant turns or completions (train_on: all trains everything)"
        )


def _answer(example: Example | Pair | Labelled) -> Example:
    return example.chosen if isinstance(example, Pair) else example.example if isinstance(example, Labelled) else example


def _read(row: Row, data_format: Format, rows: Rows) -> Sequence[Example | Pair | Labelled]:
    if rows == "pairs":
        return [read_pair(row)]
    return [read_labelled(row, data_format)] if rows == "labelled" else read_examples(row, data_format)


def _encode(
    encoder: Encoder, examples: Sequence[Example | Pair | Labelled], places: Sequence[str], rows: Rows
) -> Sequence[Sequence[Encoded]]:
    """The sequences of each unit."""
    if rows == "pairs":
        return encode_pairs(encoder, cast("list[Pair]", examples), places)
    if rows == "labelled":
        return [(encoded,) for encoded in encode_labelled(encoder, cast("list[Labelled]", examples), places)]
    return [(encoded,) for encoded in encode(encoder, cast("list[Example]", examples), places)]


def _encode_good(
    encoder: Encoder, examples: Sequence[Example | Pair | Labelled], places: Sequence[str], rows: Rows, bad: BadRows
) -> Sequence[Sequence[Encoded]]:
    """As `_encode`, of those that can be encoded; the others are added to `bad`."""
    try:
        return _encode(encoder, examples, places, rows)
    except DataError as error:
        if len(examples) == 1:
            bad.add(error)
            return []
    middle = len(examples) // 2
    halves = (slice(None, middle), slice(middle, None))
    return [unit for half in halves for unit in _encode_good(encoder, examples[half], places[half], rows, bad)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _batches(order: Order, report: DataReport, bad: BadRows) -> Iterator[tuple[list[Example | Pair | Labelled], list[str], float]]:
    """Rows as examples, some at a time: by number, and by size, so that long rows do not pile up. Bad ones are added to `bad`."""
    examples: list[Example | Pair | Labelled] = []
    places: list[str] = []
    data_format, size, share = cast("Format | Literal['auto']", order.format), 0, 0.0

    def refuse(error: DataError) -> None:
        report.count_row([])
        bad.add(error)

    for number, row in enumerate(read_files(order.files, order.called, refuse), 1):
        if order.limits is not None:
            order.limits.check_row(row.place, number, row.value)
        try:
            data_format = report.format = format_of(row, data_format, order.rows)
            read = _read(row, data_format, order.rows)
        except DataError as error:
            refuse(error)
            continue
        report.count_columns(unused_columns(row, data_format, order.rows))
        report.count_row(read)
        examples += read
        places += [row.place] * len(read)
        size += sum(len(value) if isinstance(value, (str, list)) else 0 for value in row.value.values())
        share = row.share
        if len(examples) >= BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield examples, places, share
            examples, places, size = [], [], 0
    if examples:
        yield examples, places, share


def _add(writer: Writer, unit: Sequence[Encoded], max_length: int, report: DataReport, encoder: Encoder) -> None:
    """One row: its sequences are cut one by one, and it is left out if one of them has nothing to train."""
    samples = [encoded.sample for encoded in unit]
    longest = max(len(sample.input_ids) for sample in samples)
    report.longest = max(report.longest, longest)
    report.trained_characters += sum(encoded.trained_characters for encoded in unit)
    report.count_changes(change for encoded in unit for change in encoded.changes)
    report.count_unstopped(encoded.unstopped for encoded in unit)
    report.unended += any(encoded.unended for encoded in unit)
    if longest > max_length:
        report.truncated += 1
        report.trained_tokens_lost += sum(int(np.count_nonzero(sample.loss_weights[max_length:])) for sample in samples)
        samples = [Sample(sample.input_ids[:max_length], sample.loss_weights[:max_length]) for sample in samples]
    trained = [int(np.count_nonzero(sample.loss_weights[1:])) for sample in samples]
    if not all(trained):
        report.skipped += 1
        return
    if len(samples) == 2 and _are_equal(samples[0], samples[1]):
        report.equal_pairs += 1
        report.equal_when_cut += not _are_equal(unit[0].sample, unit[1].sample)
    writer.add(samples[0] if len(samples) == 1 else join(samples))
    report.samples += 1
    report.tokens += sum(len(sample.input_ids) for sample in samples)
    report.trained_tokens += sum(trained)
    if not report.rendered:
        heads = ("",) if len(samples) == 1 else ("chosen:\n", "\n\nrejected:\n")
        runs = [[(head, 0.0), *_runs(sample, encoder)] for head, sample in zip(heads, samples, strict=True)]
        report.rendered = [run for each in runs for run in each if run[0]]


def _are_equal(first: Sample, second: Sample) -> bool:
    return np.array_equal(first.input_ids, second.input_ids) and np.array_equal(first.loss_weights, second.loss_weights)


def _runs(sample: Sample, encoder: Encoder) -> list[tuple[str, float]]:
    edges = [0, *(np.flatnonzero(np.diff(sample.loss_weights)) + 1).tolist(), len(sample.loss_weights)]
    decode = encoder.tokenizer.decode
    return [
        (str(decode(sample.input_ids[a:b].tolist(), clean_up_tokenization_spaces=False)), float(sample.loss_weights[a]))
        for a, b in itertools.pairwise(edges)
    ]
