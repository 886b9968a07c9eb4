"""A global batch cut among replicas: whole units, balanced by tokens, by the batch alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.batching.replicas import Held, cut, span_over
from tlora.errors import CapacityError

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


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_gets_no_unit_that_is_too_long_for_it_and_ends_as_predicted(seed: int) -> None:
    """Shares of the whole job are those of large batches; ranks that hold all have what is left, so that all end at once where they can."""
    rng = random.Random(seed)
    lengths = [min(4096, max(16, int(rng.lognormvariate(6, 1.2)))) for _ in range(600)]
    longest, speeds = [0, *(rng.choice([0, 64, 256, 1024]) for _ in range(3))], [rng.choice([0.3, 1.0]) for _ in range(4)]
    held = {
        rank: Held(most, sum(tokens for tokens in lengths if tokens <= most) / sum(lengths)) for rank, most in enumerate(longest) if most
    }
    span = span_over(4, range(4), speeds, held)
    assert span.longest_of_each == (tuple(longest) if held else ()) and sum(map(span.part, range(4))) == pytest.approx(1)
    found = cut(lengths, 4, span.weights, span.longest_of_each)
    assert sorted(position for share in found for position in share) == list(range(len(lengths)))
    for rank, share in enumerate(found):
        assert not longest[rank] or max(lengths[position] for position in share) <= longest[rank]
        assert sum(lengths[position] for position in share) / sum(lengths) == pytest.approx(span.part(rank), abs=0.01)


def test_a_unit_that_no_replica_holds_is_refused() -> None:
    with pytest.raises(CapacityError, match="item 1 fits on none of 2 ranks"):
        cut([3, 9], 2, (), (8, 4))
