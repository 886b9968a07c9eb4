"""A global batch cut among replicas: whole units, balanced by tokens, by the batch alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.batching.replicas import cut

LENGTHS = st.lists(st.integers(1, 4096), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 9))
def test_every_unit_goes_to_one_replica_and_no_replica_lags_by_more_than_a_unit(lengths: list[int], replicas: int) -> None:
    shares = cut(lengths, replicas)
    assert len(shares) == replicas and sorted(position for share in shares for position in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares), "the batch's order"
    loads = [sum(lengths[position] for position in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)
    assert sum(1 for share in shares if not share) == max(0, replicas - len(lengths))


def test_the_cut_is_by_tokens_and_of_equals_the_first_goes_first() -> None:
    assert cut([10, 1, 1, 8], 2) == [[0], [1, 2, 3]]
    assert cut([5, 5, 5, 5, 5], 2) == [[0, 2, 4], [1, 3]]
    assert cut([3, 4], 4) == [[1], [0], [], []]


@pytest.mark.parametrize("seed", range(20))
def test_unequal_replicas_have_tokens_by_their_weights(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 200) for _ in range(rng.randint(8, 64))]
    weights = [rng.choice([0.1, 0.3, 1.0]) for _ in range(rng.randint(2, 5))]
    found = cut(lengths, len(weights), weights)
    assert sorted(position for share in found for position in share) == list(range(len(lengths)))
    ends = [sum(lengths[position] for position in share) / weight for share, weight in zip(found, weights, strict=True)]
    assert max(ends) <= sum(lengths) / sum(weights) + max(lengths) / min(weights)
    assert cut(lengths, 3, (2.0, 2.0, 2.0)) == cut(lengths, 3)
