"""Evaluation samples that are training samples are counted, by tokens, against a comparison of all with all."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora.data.dataset import Dataset, Sample, Writer, count_shared, join

# few tokens and short rows, so that many have equal lengths, and equal tokens in some places
ROWS = st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=6), min_size=1, max_size=12)


def make(directory: Path, rows: list[list[int]], pairs: bool = False) -> Dataset:
    writer = Writer(directory)
    for row in rows:
        sample = Sample(np.array(row, dtype=np.int32), np.ones(len(row), dtype=np.float32))
        writer.add(join([sample, sample]) if pairs else sample)
    writer.finish({})
    return Dataset(directory)


@settings(deadline=None)
@given(trained=ROWS, evaluated=ROWS, pairs=st.booleans())
def test_as_compared_one_by_one(trained: list[list[int]], evaluated: list[list[int]], pairs: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = make(Path(place) / "a", trained, pairs), make(Path(place) / "b", evaluated, pairs)
        assert count_shared(ours, theirs) == sum(row in trained for row in evaluated)


@pytest.mark.parametrize("held_out", [[0], [1, 3]])
def test_a_part_of_a_set(held_out: list[int], tmp_path: Path) -> None:
    """Rows 0, 2 and 3 are equal; of a split, those on both sides count."""
    make(tmp_path / "set", [[7, 8, 9], [1, 2, 3], [7, 8, 9], [7, 8, 9], [4, 5, 6]])
    rest = [i for i in range(5) if i not in held_out]
    train, evaluation = (Dataset(tmp_path / "set", np.array(part)) for part in (rest, held_out))
    assert count_shared(train, evaluation) == 1


def test_pairs_that_are_cut_elsewhere_differ(tmp_path: Path) -> None:
    def pair(*rows: list[int]) -> Sample:
        return join([Sample(np.array(row, dtype=np.int32), np.ones(len(row), dtype=np.float32)) for row in rows])

    for name, sample in (("a", pair([1, 2], [3, 4, 5])), ("b", pair([1, 2, 3], [4, 5]))):
        writer = Writer(tmp_path / name)
        writer.add(sample)
        writer.finish({})
    assert count_shared(Dataset(tmp_path / "a"), Dataset(tmp_path / "b")) == 0
