"""Every sample exactly once an epoch, whatever the sizes; the order depends on its arguments only."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.data.order import epoch_order, epoch_size, global_batch, mix, mixed_order, split
from tlora.errors import DataError

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 300))
def test_epoch_is_a_permutation_that_depends_on_seed_and_epoch(seed: int, epoch: int, num_samples: int) -> None:
    order = epoch_order(seed, epoch, num_samples)
    assert sorted(order.tolist()) == list(range(num_samples))
    assert order.dtype == np.int64
    assert np.array_equal(order, epoch_order(seed, epoch, num_samples))
    if num_samples >= 30:
        assert not np.array_equal(order, epoch_order(seed, epoch + 1, num_samples))
        assert not np.array_equal(order, epoch_order((seed + 1) % 2**32, epoch, num_samples))


@given(SEEDS, st.integers(1, 60), st.integers(1, 70), st.integers(1, 4))
def test_batches_hold_each_sample_once_an_epoch(seed: int, num_samples: int, batch_size: int, epochs: int) -> None:
    per_epoch = -(-num_samples // batch_size)
    for epoch in range(epochs):
        batches = [global_batch(epoch * per_epoch + i, num_samples, batch_size, seed) for i in range(per_epoch)]
        assert sorted(index for batch in batches for index in batch) == list(range(num_samples))
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert [index for batch in batches for index in batch] == epoch_order(seed, epoch, num_samples).tolist()


def test_batches_asked_in_any_order_are_the_same() -> None:
    steps = list(range(40))
    forward = {step: global_batch(step, 17, 4, 3) for step in steps}
    assert {step: global_batch(step, 17, 4, 3) for step in reversed(steps)} == forward


def test_a_callers_change_of_a_batch_does_not_reach_the_next_caller() -> None:
    global_batch(0, 8, 4, 1).clear()
    assert len(global_batch(0, 8, 4, 1)) == 4


def test_order_is_mixed_evenly() -> None:
    """Each sample comes first about equally often: 20 samples over 4,000 epochs, 200 each, standard deviation 14."""
    firsts = np.bincount([int(epoch_order(7, epoch, 20)[0]) for epoch in range(4000)], minlength=20)
    assert firsts.min() > 130 and firsts.max() < 270


@given(SEEDS, st.integers(2, 200), st.floats(0.001, 0.5))
def test_split_is_disjoint_and_whole(seed: int, num_samples: int, share: float) -> None:
    train, held_out = split(num_samples, share, seed)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(num_samples))
    assert len(held_out) == max(1, round(num_samples * share))
    assert np.all(np.diff(train) > 0) and np.all(np.diff(held_out) > 0)
    again = split(num_samples, share, seed)
    assert np.array_equal(again[0], train) and np.array_equal(again[1], held_out)


def test_split_by_count_and_by_seed() -> None:
    assert len(split(50, 7, 1)[1]) == 7
    assert not np.array_equal(split(50, 7, 1)[1], split(50, 7, 2)[1])
    assert len(split(50, 0, 1)[1]) == 0


@pytest.mark.parametrize(("num_samples", "eval_size"), [(5, 5), (5, 9), (1, 0.1)])
def test_split_that_leaves_nothing_to_train_is_refused(num_samples: int, eval_size: float) -> None:
    with pytest.raises(DataError, match=f"of {num_samples} samples"):
        split(num_samples, eval_size, 0)


SIZES = st.lists(st.integers(1, 60), min_size=2, max_size=5)


@given(SIZES, st.data())
def test_a_mixture_is_by_weight_and_takes_all_of_one_source(sizes: list[int], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=len(sizes), max_size=len(sizes)))
    mixture = mix(sizes, weights)
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    assert any(take == size for take, size in zip(mixture.takes, sizes, strict=True))
    for take, size, weight in zip(mixture.takes, sizes, weights, strict=True):
        assert 1 <= take <= size and (take == 1 or abs(take - weight * scale) <= 0.5 + 1e-9)


def test_the_mixture_of_the_documentation() -> None:
    assert mix([300, 5000], [3, 1]).takes == (300, 100)


@given(SEEDS, SIZES, st.data())
def test_a_mixtures_epochs_go_through_each_source_evenly(seed: int, sizes: list[int], data: st.DataObject) -> None:
    """Of each source, no sample comes a second time before all others came once, over epochs."""
    mixture = mix(sizes, data.draw(st.lists(st.floats(0.1, 10), min_size=len(sizes), max_size=len(sizes))))
    starts = np.cumsum([0, *sizes])
    counts = np.zeros(starts[-1], int)
    for epoch in range(6):
        order = mixed_order(seed, epoch, mixture)
        taken = [int(((order >= a) & (order < b)).sum()) for a, b in itertools.pairwise(starts)]
        assert taken == list(mixture.takes) and len(order) == epoch_size(mixture)
        np.add.at(counts, order, 1)
        for a, b in itertools.pairwise(starts):
            assert counts[a:b].max() - counts[a:b].min() <= 1


def test_a_mixtures_sources_are_shuffled_together_and_anew_each_epoch() -> None:
    mixture = mix([200, 200], [1, 1])
    first, second = mixed_order(5, 0, mixture), mixed_order(5, 1, mixture)
    assert sorted(first) == sorted(second) == list(range(400)) and not np.array_equal(first, second)
    assert 60 < (first[:200] < 200).sum() < 140, "both sources in the first half"
    assert not np.array_equal(np.argsort(first[first < 200]), np.argsort(first[first >= 200] - 200)), "each has an order of its own"
    steps = [global_batch(step, mixture, 7, 5) for step in range(2 * 58)]
    assert [index for batch in steps for index in batch] == [*first, *second]
