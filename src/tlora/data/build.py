"""Makes one tokenized set from one `path` of a job's data, or finds it made already.

Owns the cache key, cutting to `max_length`, skipping what has nothing to train, and the report of all that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from tlora.data.dataset import FORMAT_VERSION, Sample, Writer, is_whole
from tlora.data.encode import Encoder, encode
from tlora.data.formats import Example, Text, detect, read_example
from tlora.data.rows import list_files, read_rows
from tlora.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 128
BATCH_CHARACTERS = 1 << 19
Beat = Callable[[int, float], None]  # rows so far, share of the bytes; called at least once a batch


@dataclass(frozen=True)
class DataReport:
    """What a set holds. `rendered` is its first sample as runs of text with one loss weight; `longest` is before cutting."""

    format: str
    files: list[str]
    rows: int
    samples: int
    skipped: int  # no trained token, or none left after cutting
    truncated: int
    tokens: int
    trained_tokens: int  # targets whose loss weight is not 0
    trained_tokens_lost: int  # by cutting
    longest: int
    rendered: list[tuple[str, float]]

    @staticmethod
    def from_meta(meta: dict[str, object], files: list[str]) -> DataReport:
        """The report of a finished set, with the files' names of today: equal content may have moved."""
        fields = cast("dict[str, object]", meta["report"]) | {"files": files}
        rendered = [(str(text), float(weight)) for text, weight in cast("list[tuple[str, float]]", fields["rendered"])]
        return DataReport(**cast("dict[str, int]", fields | {"rendered": rendered}))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Order:
    """One set to make: what of a job's `DataConfig` decides about its tokens, and where sets are kept."""

    path: Path
    format: str
    max_length: int
    cache_dir: Path


@dataclass
class _Counts:
    rows: int = 0
    samples: int = 0
    skipped: int = 0
    truncated: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    trained_tokens_lost: int = 0
    longest: int = 0
    rendered: list[tuple[str, float]] = field(default_factory=list)


def cache_key(order: Order, encoder: Encoder, file_hash: Callable[[Path], str]) -> str:
    """Same key, same tokens: the files' contents, the tokenizer, the template and the settings that decide."""
    parts = {
        "version": FORMAT_VERSION,
        "files": [(file.suffix.lower(), file_hash(file)) for file in list_files(order.path)],
        "tokenizer": tokenizer_hash(encoder.tokenizer),
        "template": encoder.template.text(),
        "settings": [order.format, order.max_length, encoder.train_all, encoder.vocab_size],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of everything in a tokenizer that decides about ids."""
    state = tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    return hashlib.sha256(
        json.dumps([state, {key: str(value) for key, value in tokenizer.special_tokens_map.items()}]).encode()
    ).hexdigest()


def hash_file(file: Path, beat: Beat) -> str:
    """sha256 of the content, with a sign of life every 16 MiB."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(16 << 20):
            digest.update(chunk)
            beat(0, 0.0)
    return digest.hexdigest()


def build(order: Order, encoder: Encoder, file_hash: Callable[[Path], str], beat: Beat) -> Path:
    """The directory of the finished set. Raises DataError with file and row; leaves nothing half-made."""
    final = order.cache_dir / cache_key(order, encoder, file_hash)
    if is_whole(final):
        return final
    if final.exists():  # damaged
        shutil.rmtree(final)
    writer = Writer(final)
    try:
        data_format, counts = _fill(writer, order, encoder, beat)
        files = [str(file) for file in list_files(order.path)]
        report = DataReport(format=data_format, files=files, **vars(counts))
        writer.finish({"report": dataclasses.asdict(report)})
    except BaseException:
        writer.abandon()
        raise
    return final


def _fill(writer: Writer, order: Order, encoder: Encoder, beat: Beat) -> tuple[str, _Counts]:
    counts, data_format, only_numbers = _Counts(), order.format, True
    for found_format, examples, places, share in _batches(order):
        data_format = found_format
        only_numbers = only_numbers and all(isinstance(example, Text) and _is_number(example.completion) for example in examples)
        for sample in encode(encoder, examples, places):
            _add(writer, sample, order.max_length, counts, encoder)
        counts.rows += len(examples)
        beat(counts.rows, share)
    if only_numbers and data_format == "text":
        raise DataError(
            f"{order.path}: all {counts.rows} values of column 'text' are numbers; expected text: name the column of text 'text'"
        )
    if not counts.samples:
        raise DataError(
            f"{order.path}: none of {counts.rows} rows has a token to train on within max_length {order.max_length}; "
            "raise max_length, or check that the rows hold assistant turns or completions (train_on: all trains everything)"
        )
    return data_format, counts


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _batches(order: Order) -> Iterator[tuple[str, list[Example], list[str], float]]:
    """Rows as examples, some at a time: by number, and by size, so that long rows do not pile up."""
    examples: list[Example] = []
    places: list[str] = []
    data_format, size, share = order.format, 0, 0.0
    for row in read_rows(order.path):
        if data_format == "auto":
            data_format = detect(row)
        examples.append(read_example(row, cast("Literal['text']", data_format)))
        places.append(row.place)
        size += sum(len(value) if isinstance(value, (str, list)) else 0 for value in row.value.values())
        share = row.share
        if len(examples) >= BATCH_ROWS or size >= BATCH_CHARACTERS:
            yield data_format, examples, places, share
            examples, places, size = [], [], 0
    if examples:
        yield data_format, examples, places, share


def _add(writer: Writer, sample: Sample, max_length: int, counts: _Counts, encoder: Encoder) -> None:
    length = len(sample.input_ids)
    counts.longest = max(counts.longest, length)
    if length > max_length:
        counts.truncated += 1
        counts.trained_tokens_lost += int(np.count_nonzero(sample.loss_weights[max_length:]))
        sample = Sample(sample.input_ids[:max_length], sample.loss_weights[:max_length])
    trained = int(np.count_nonzero(sample.loss_weights[1:]))
    if not trained:
        counts.skipped += 1
        return
    writer.add(sample)
    counts.samples += 1
    counts.tokens += len(sample.input_ids)
    counts.trained_tokens += trained
    if not counts.rendered:
        counts.rendered = _runs(sample, encoder)


def _runs(sample: Sample, encoder: Encoder) -> list[tuple[str, float]]:
    edges = [0, *(np.flatnonzero(np.diff(sample.loss_weights)) + 1).tolist(), len(sample.loss_weights)]
    decode = encoder.tokenizer.decode
    return [
        (str(decode(sample.input_ids[a:b].tolist(), clean_up_tokenization_spaces=False)), float(sample.loss_weights[a]))
        for a, b in itertools.pairwise(edges)
    ]
