"""Turns blocks of rows into samples and counts, on one core or on all. Blocks are independent, so that results do not depend on the
number of processes.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from tlora.data.columns import format_of, unused_columns
from tlora.data.dataset import PackedSamples, Sample, join, pack
from tlora.data.encode import Encoded, Encoder, encode, encode_labelled, encode_pairs
from tlora.data.formats import Chat, Example, Format, Labelled, Pair, Text, read_examples, read_labelled, read_pair
from tlora.data.report import DataReport
from tlora.data.rows import BLOCK_BYTES, BLOCK_ROWS, Block, Row, rows_of
from tlora.errors import DataError
from tlora.job import Rows
from tlora.processes import LostProcessError, num_cores, open_pool

BYTES_A_PROCESS = 1 << 18  # of data; a third of a second's work
BLOCKS_A_PROCESS = 2  # that are read and not written yet
_Read = Sequence[Example | Pair | Labelled]


@dataclass(frozen=True)
class Recipe:
    """How each row is encoded."""

    display_name: str
    encoder: Encoder
    max_length: int
    rows: Rows


@dataclass(frozen=True)
class Task:
    """A block, and the format of the rows before it."""

    block: Block
    data_format: Format | Literal["auto"]


@dataclass(frozen=True)
class EncodedBlock:
    """`report` counts this block alone; `only_numbers`: each of its rows is a text that is a number; `only_empty`: each of its samples has
    nothing but empty answers, or is a pair of which one is empty.
    """

    report: DataReport
    samples: PackedSamples
    bad: list[DataError]
    only_numbers: bool
    only_empty: bool
    share: float


def num_processes(data_bytes: int) -> int:
    """The number of processes for this much data, at most that of cores. A process that has used threads can be forked on Linux only."""
    return max(1, min(num_cores(), data_bytes // BYTES_A_PROCESS)) if sys.platform == "linux" else 1


def encode_blocks(recipe: Recipe, tasks: Iterator[Task], processes: int) -> Generator[EncodedBlock]:
    """The results in the order of `tasks`. Raises LostProcessError if a process was killed, and the errors of `encode_block`."""
    if processes == 1:
        yield from (encode_block(recipe, task) for task in tasks)
        return
    try:
        with open_pool(processes, "fork", _begin, recipe) as pool:
            yield from pool.map_in_order(_encode_here, tasks, BLOCKS_A_PROCESS * processes)
    except LostProcessError as error:
        raise LostProcessError(
            f"{recipe.display_name}: one of {processes} processes that tokenize {error}, most likely for want of memory; let it have "
            "fewer cores (taskset -c 0 tlora ...), or look for a row, or a chat template, that takes too much memory"
        ) from None


_recipe: list[Recipe] = []  # in a process of the pool: its only one


def _begin(recipe: Recipe) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads that the parent has had do not live here
    _recipe.append(recipe)


def _encode_here(task: Task) -> EncodedBlock:
    [recipe] = _recipe
    try:
        return encode_block(recipe, task)
    except (DataError, MemoryError, SystemExit):
        raise
    except BaseException as error:  # a panic of the Rust tokenizer, which cannot be sent
        raise DataError(f"{recipe.display_name}: {type(error).__name__}: {error}") from None


def encode_block(recipe: Recipe, task: Task) -> EncodedBlock:
    """Encode one block. Raises DataError if no row after some row can be read; bad rows alone do not raise."""
    report, bad, samples, only_numbers = DataReport(), list[DataError](), list[Sample](), True
    only_empty = True
    for examples, places in _batches(recipe, task, report, bad):
        only_numbers = only_numbers and all(isinstance(example, Text) and _is_number(example.completion) for example in examples)
        report.has_chats = report.has_chats or any(isinstance(_answer(example), Chat) for example in examples)
        for unit in _encode_good(recipe, examples, places, bad):
            sample = _cut(unit, recipe, report)
            if sample is not None:
                samples.append(sample)
                only_empty = only_empty and any(encoded.empty_answers and all(encoded.empty_answers) for encoded in unit)
                if recipe.rows == "labelled":
                    report.count_label(bool(unit[0].sample.loss_weights.min() >= 0))
    return EncodedBlock(report, pack(samples), bad, only_numbers, only_empty, task.block.share)


def _batches(recipe: Recipe, task: Task, report: DataReport, bad: list[DataError]) -> Iterator[tuple[_Read, list[str]]]:
    """Batches of rows as examples, limited in number and in size, so that long rows do not pile up. Bad rows are added to `bad`."""
    examples: list[Example | Pair | Labelled] = []
    places: list[str] = []
    data_format, size = task.data_format, 0
    for row in rows_of(task.block):
        try:
            if isinstance(row, DataError):
                raise row
            data_format = report.format = format_of(row, data_format, recipe.rows)
            read = _read(row, data_format, recipe.rows)
        except DataError as error:
            report.count_row([])
            bad.append(error)
            continue
        report.count_columns(unused_columns(row, data_format, recipe.rows))
        report.count_row(read)
        examples += read
        places += [row.place] * len(read)
        size += sum(len(value) if isinstance(value, str | list) else 0 for value in row.value.values())
        if len(examples) >= BLOCK_ROWS or size >= BLOCK_BYTES:
            yield examples, places
            examples, places, size = [], [], 0
    if examples:
        yield examples, places


def _read(row: Row, data_format: Format, rows: Rows) -> _Read:
    if rows == "pairs":
        return [read_pair(row)]
    return [read_labelled(row, data_format)] if rows == "labelled" else read_examples(row, data_format)


def _answer(example: Example | Pair | Labelled) -> Example:
    return example.chosen if isinstance(example, Pair) else example.example if isinstance(example, Labelled) else example


def _encode(recipe: Recipe, examples: _Read, places: Sequence[str]) -> Sequence[Sequence[Encoded]]:
    """The sequences of each unit."""
    if recipe.rows == "pairs":
        return encode_pairs(recipe.encoder, cast("list[Pair]", examples), places)
    if recipe.rows == "labelled":
        return [(encoded,) for encoded in encode_labelled(recipe.encoder, cast("list[Labelled]", examples), places)]
    return [(encoded,) for encoded in encode(recipe.encoder, cast("list[Example]", examples), places)]


def _encode_good(recipe: Recipe, examples: _Read, places: Sequence[str], bad: list[DataError]) -> Sequence[Sequence[Encoded]]:
    """As `_encode`, of those that can be encoded; the others are added to `bad`."""
    try:
        return _encode(recipe, examples, places)
    except DataError as error:
        if len(examples) == 1:
            bad.append(error)
            return []
    middle = len(examples) // 2
    halves = (slice(None, middle), slice(middle, None))
    return [unit for half in halves for unit in _encode_good(recipe, examples[half], places[half], bad)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _cut(unit: Sequence[Encoded], recipe: Recipe, report: DataReport) -> Sample | None:
    """Cut one row's sequences, each by itself; the row is left out if one of them has no trained token."""
    samples, max_length = [encoded.sample for encoded in unit], recipe.max_length
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
        return None
    if len(samples) == 2 and _are_equal(samples[0], samples[1]):
        report.equal_pairs += 1
        report.equal_when_cut += not _are_equal(unit[0].sample, unit[1].sample)
    report.samples += 1
    report.empty += any(itertools.chain.from_iterable(encoded.empty_answers for encoded in unit))
    report.tokens += sum(len(sample.input_ids) for sample in samples)
    report.trained_tokens += sum(trained)
    report.rendered = report.rendered or _show(samples, recipe.encoder)
    return samples[0] if len(samples) == 1 else join(samples)


def _are_equal(first: Sample, second: Sample) -> bool:
    return np.array_equal(first.input_ids, second.input_ids) and np.array_equal(first.loss_weights, second.loss_weights)


def _show(samples: Sequence[Sample], encoder: Encoder) -> list[tuple[str, float]]:
    heads = ("",) if len(samples) == 1 else ("chosen:\n", "\n\nrejected:\n")
    runs = [[(head, 0.0), *_runs(sample, encoder)] for head, sample in zip(heads, samples, strict=True)]
    return [run for each in runs for run in each if run[0]]


def _runs(sample: Sample, encoder: Encoder) -> list[tuple[str, float]]:
    edges = [0, *(np.flatnonzero(np.diff(sample.loss_weights)) + 1).tolist(), len(sample.loss_weights)]
    decode = encoder.tokenizer.decode
    return [
        (str(decode(sample.input_ids[a:b].tolist(), clean_up_tokenization_spaces=False)), float(sample.loss_weights[a]))
        for a, b in itertools.pairwise(edges)
    ]
