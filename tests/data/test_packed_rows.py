"""Rows that several samples share: TRL's, none too long, and each sample once an epoch."""

from __future__ import annotations

import math

import datasets
import numpy as np
import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st

from tlora.data.order import PackedRows, epoch_size, global_batch, join_rows, mix, pack_rows, row_tokens
from tlora.data.profile import tokens_of_steps
from tlora.job import JobSpec

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80).map(lambda lengths: np.array(lengths, np.int64))


def members(packed: PackedRows) -> list[list[int]]:
    return [packed.samples[start:end].tolist() for start, end in zip(packed.starts[:-1], packed.starts[1:], strict=True)]


@given(LENGTHS, st.integers(0, 40))
def test_each_sample_is_in_one_row_and_no_row_is_too_long(lengths: np.ndarray, more: int) -> None:
    packed = pack_rows(lengths, 64 + more)
    rows = members(packed)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(row == sorted(row) and 0 < lengths[row].sum() <= 64 + more for row in rows)
    assert len(rows) == packed.rows == epoch_size(packed)
    assert row_tokens(lengths, packed).tolist() == [lengths[row].sum() for row in rows]


@pytest.mark.parametrize(
    ("count", "longest", "capacity", "seed"), [(1, 9, 9, 0), (500, 64, 64, 1), (2000, 500, 1024, 2), (900, 40, 2048, 3)]
)
def test_rows_are_as_full_as_trls(count: int, longest: int, capacity: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, longest + 1, count)
    data = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in lengths.tolist()]})
    theirs = trl.pack_dataset(data, capacity, "bfd", {"batch_size": count})
    ours = row_tokens(lengths, pack_rows(lengths, capacity))
    assert sorted(ours.tolist()) == sorted(sum(row) for row in theirs["seq_lengths"])


@given(LENGTHS, st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_an_epoch_takes_each_sample_once(lengths: np.ndarray, batch_size: int, seed: int) -> None:
    packed = pack_rows(lengths, 64)
    steps = math.ceil(epoch_size(packed) / batch_size)
    batches = [global_batch(step, packed, batch_size, seed) for step in range(2 * steps)]
    for epoch in batches[:steps], batches[steps:]:
        assert sorted(sample for batch in epoch for sample in batch) == list(range(len(lengths)))
    assert all(lengths[batch].sum() <= 64 * batch_size for batch in batches)
    spec = JobSpec.model_validate({"name": "a", "data": "x", "batch_size": batch_size, "seed": seed})
    assert tokens_of_steps(lengths, packed, spec, len(batches) - 1) == sum(lengths[batch].sum() for batch in batches[:-1])


@given(LENGTHS, LENGTHS, st.integers(1, 9))
def test_sources_are_packed_for_themselves_and_drawn_by_rows(first: np.ndarray, second: np.ndarray, weight: int) -> None:
    parts = [pack_rows(lengths, 64) for lengths in (first, second)]
    whole = join_rows(parts)
    assert members(whole) == members(parts[0]) + [[sample + len(first) for sample in row] for row in members(parts[1])]
    mixture = mix([epoch_size(part) for part in parts], [1, weight])
    mixed = PackedRows(mixture, whole.samples, whole.starts)
    taken = global_batch(0, mixed, epoch_size(mixed), 3)
    known = [tuple(row) for row in members(whole)]
    rows = [row for row in known if set(row) <= set(taken)]
    assert len(rows) == sum(mixture.takes) and sorted(taken) == sorted(sample for row in rows for sample in row)
    assert sum(row[0] < len(first) for row in rows) == mixture.takes[0]


def test_many_samples_and_a_length_without_end() -> None:
    lengths = np.random.default_rng(0).integers(1, 4000, 200_000)
    packed = pack_rows(lengths, 4096)
    assert epoch_size(packed) * 4096 < 1.01 * lengths.sum()
    assert epoch_size(pack_rows(lengths, 10**9)) == 1
