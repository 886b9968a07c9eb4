"""Rows of token ids: which tokens are trained, and packed rows cut into their samples.

Owns the columns that other programs write with `input_ids`. `encode.py` checks that the ids are in the model's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from tlora.data.cells import fail, integers_of, list_of
from tlora.data.examples import Tokens
from tlora.data.rows import Row
from tlora.errors import DataError

IGNORED_LABEL = -100
MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # of TRL; of transformers; of verl and Megatron
SCALES = ("loss_scale", "loss_weights")  # the first is MS-SWIFT's
OPTIONAL = ("labels", "attention_mask", "position_ids", "seq_lengths", *MASKS, *SCALES)
# Columns by which other programs cut packed rows, and which are not read here.
OTHER_BOUNDARIES = ("cu_seqlens", "cu_seq_lens", "cu_seq_lens_q", "seq_lens", "segment_ids", "sequence_ids", "document_ids", "seq_idx")


def read_tokens(row: Row) -> list[Tokens]:
    """The samples in `row`: one, or those of a packed row. A token is trained if no column says that it is not; weights multiply."""
    ids = integers_of(row, "input_ids")
    if not ids:
        fail(row, "column 'input_ids'", ids, "at least one token id")
    for column in OTHER_BOUNDARIES:
        if row.value.get(column):
            expected = (
                "no such column: it marks where packed samples begin, which is read from seq_lengths or position_ids. Rename or remove it"
            )
            fail(row, f"column {column!r}", row.value[column], expected)
    for i, token in enumerate(ids):
        if token < 0:
            fail(row, f"input_ids[{i}]", token, "a token id of at least 0")
    weights = _weights(row, ids)
    kept = _kept(row, len(ids))
    starts = _starts(row, len(ids), kept)
    parts = [[i for i in range(begin, end) if kept[i]] for begin, end in pairwise([*starts, len(ids)])]
    return [Tokens([ids[i] for i in part], [weights[i] for i in part]) for part in parts if part] or [Tokens([], [])]


def _weights(row: Row, ids: Sequence[int]) -> list[float]:
    weights = [1.0] * len(ids)
    if (labels := _column(row, "labels", len(ids))) is not None:
        for i, (token, label) in enumerate(zip(ids, labels, strict=True)):
            if label not in (token, IGNORED_LABEL):
                fail(row, f"labels[{i}]", label, f"{IGNORED_LABEL} (no loss) or input_ids[{i}] = {token} (labels are not shifted)")
        weights = [0.0 if label == IGNORED_LABEL else 1.0 for label in labels]
    for column in (*MASKS, *SCALES):
        if row.value.get(column) is None:
            continue
        values = _same_length(row, column, list_of(row, column), len(ids))
        for i, value in enumerate(values):
            is_number = isinstance(value, (bool, int, float)) and math.isfinite(value) and value >= 0
            if not is_number or (column in MASKS and value not in (0, 1)):
                fail(row, f"{column}[{i}]", value, "1 (trained) or 0" if column in MASKS else "a number of at least 0")
        weights = [weight * float(cast("float", value)) for weight, value in zip(weights, values, strict=True)]
    return weights


def _kept(row: Row, count: int) -> list[bool]:
    """Which tokens are no padding: samples have their own lengths here."""
    mask = _column(row, "attention_mask", count)
    return [True] * count if mask is None else [value != 0 for value in mask]


def _starts(row: Row, count: int, kept: Sequence[bool]) -> list[int]:
    """Where the samples of a packed row begin: by `seq_lengths`, by `position_ids` that begin anew, or by an `attention_mask` that numbers
    the samples. Raises DataError where these disagree.
    """
    starts_by_column: dict[str, list[int]] = {}
    if row.value.get("seq_lengths") is not None:
        lengths = integers_of(row, "seq_lengths")
        if sum(lengths) != count or not all(length > 0 for length in lengths):
            fail(row, "column 'seq_lengths'", lengths, f"lengths above 0 that add up to the {count} tokens of input_ids")
        starts_by_column["seq_lengths"] = [sum(lengths[:i]) for i in range(len(lengths))]
    if (positions := _column(row, "position_ids", count)) is not None:
        starts_by_column["position_ids"] = _restarts(row, positions, kept)
    numbers = _column(row, "attention_mask", count)
    if numbers is not None and max(numbers) > 1:
        seen = [number for number in numbers if number]
        steps = {after - before for before, after in pairwise(seen)}
        if min(numbers) < 0 or not steps <= {0, 1}:
            fail(row, "column 'attention_mask'", numbers, "0 and 1, or the numbers 1, 2, ... of packed samples, in order")
        places = [i for i, number in enumerate(numbers) if number]
        starts_by_column["attention_mask"] = places[:1] + [after for before, after in pairwise(places) if numbers[before] != numbers[after]]
    trimmed = {
        name: [next((i for i in range(start, count) if kept[i]), count) for start in starts] for name, starts in starts_by_column.items()
    }
    for first, second in pairwise(trimmed):
        if sorted({*trimmed[first]} - {count}) != sorted({*trimmed[second]} - {count}):
            raise DataError(f"{row.place}: columns {first!r} and {second!r} cut the packed row at different tokens; remove the wrong one")
    starts = next(iter(starts_by_column.values()), [0])
    return starts if starts and starts[0] == 0 else [0, *starts]


def _restarts(row: Row, positions: Sequence[int], kept: Sequence[bool]) -> list[int]:
    starts: list[int] = []
    before: int | None = None
    for i, position in enumerate(positions):
        if not kept[i]:
            continue
        if position == 0 or before is None:
            starts.append(i)
        elif position != before + 1:
            fail(row, f"position_ids[{i}]", position, f"{before + 1}, or 0 where the next packed sample begins")
        before = position
    return starts


def _column(row: Row, column: str, count: int) -> list[int] | None:
    if row.value.get(column) is None:
        return None
    return cast("list[int]", _same_length(row, column, cast("list[object]", integers_of(row, column)), count))


def _same_length(row: Row, column: str, values: list[object], count: int) -> list[object]:
    if len(values) != count:
        raise DataError(f"{row.place}: {column} has {len(values)} values where input_ids has {count}; expected one a token")
    return values
