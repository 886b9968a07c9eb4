"""Items to ranks by predicted seconds: permitted ranks alone, the same on every rank, and near what no dispatch can beat."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.batching.dispatch import Rank, dispatch
from tlora.batching.replicas import cut
from tlora.errors import CapacityError

SECONDS = st.lists(st.integers(1, 64), min_size=1, max_size=40)
ROUNDING = 1 + 1e-9


@st.composite
def problems(draw: st.DrawFn, most_items: int = 30, most_ranks: int = 5) -> tuple[list[float], list[Rank]]:
    """Unequal ranks, each of which holds some of the items; the first holds all."""
    seconds = draw(st.lists(st.integers(0, 64).map(float), min_size=1, max_size=most_items))
    ranks = [Rank(draw(st.sampled_from([0.5, 1.0, 3.0])), busy_seconds=draw(st.integers(0, 20)))]
    for _ in range(draw(st.integers(0, most_ranks - 1))):
        holds = draw(st.none() | st.sets(st.integers(0, len(seconds) - 1)))
        ranks.append(Rank(draw(st.sampled_from([0.5, 1.0, 3.0])), holds, draw(st.integers(0, 20))))
    return seconds, ranks


def least_end(seconds: list[float], ranks: list[Rank]) -> float:
    """Of all dispatches, tried one after another."""
    permitted = [[r for r, rank in enumerate(ranks) if rank.holds is None or item in rank.holds] for item in range(len(seconds))]
    least = float("inf")
    for places in itertools.product(*permitted):
        work = [0.0] * len(ranks)
        for item, place in enumerate(places):
            work[place] += seconds[item]
        least = min(least, max(rank.busy_seconds + own / rank.speed for rank, own in zip(ranks, work, strict=True)))
    return least


@given(problems())
def test_every_item_goes_to_one_rank_that_holds_it(problem: tuple[list[float], list[Rank]]) -> None:
    seconds, ranks = problem
    found = dispatch(seconds, ranks)
    assert sorted(itertools.chain(*found.items)) == list(range(len(seconds)))
    for rank, items, end in zip(ranks, found.items, found.ends, strict=True):
        assert rank.holds is None or set(items) <= set(rank.holds)
        assert list(items) == sorted(items)
        assert end == pytest.approx(rank.busy_seconds + sum(seconds[item] for item in items) / rank.speed)
    assert found.lower_bound <= found.end * ROUNDING and found.excess >= 1 / ROUNDING - 1


@given(problems(), st.randoms())
def test_it_follows_from_the_values_alone(problem: tuple[list[float], list[Rank]], chance: random.Random) -> None:
    """Whatever order a set of items is in."""
    seconds, ranks = problem
    again = [rank if rank.holds is None else replace(rank, holds=chance.sample(sorted(rank.holds), len(rank.holds))) for rank in ranks]
    assert dispatch(seconds, ranks) == dispatch(list(seconds), again)


@given(problems(most_items=6, most_ranks=3))
def test_nothing_beats_the_lower_bound(problem: tuple[list[float], list[Rank]]) -> None:
    assert dispatch(*problem).lower_bound <= least_end(*problem) * ROUNDING


@given(st.lists(st.integers(1, 64).map(float), min_size=1, max_size=7), st.integers(1, 3))
def test_equal_ranks_end_within_four_thirds_of_the_best(seconds: list[float], count: int) -> None:
    ranks = [Rank()] * count
    assert dispatch(seconds, ranks).end <= least_end(seconds, ranks) * float(Fraction(4, 3) - Fraction(1, 3 * count)) * ROUNDING


@given(SECONDS, st.integers(1, 6))
def test_the_bound_of_equal_ranks_is_an_equal_share_or_the_longest(seconds: list[int], count: int) -> None:
    assert dispatch(seconds, [Rank()] * count).lower_bound == pytest.approx(max(sum(seconds) / count, *seconds))


@given(SECONDS, st.integers(1, 9))
def test_replicas_are_cut_as_by_the_emptiest_first(lengths: list[int], replicas: int) -> None:
    """The cut that deterministic runs of several replicas were made with."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    loads = [(0, replica) for replica in range(replicas)]
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        tokens, replica = loads[0]
        shares[replica].append(position)
        heapq.heapreplace(loads, (tokens + lengths[position], replica))
    assert cut(lengths, replicas) == [sorted(share) for share in shares]


def test_unequal_ranks_share_by_speed_and_by_what_fits() -> None:
    fast, slow = Rank(3.0), Rank(1.0, holds=range(1, 9))
    found = dispatch([9.0, *[3.0] * 8], [fast, slow])
    assert 0 in found.items[0] and found.ends == (9.0, 6.0)
    assert found.lower_bound == pytest.approx(33 / 4)
    assert dispatch([9.0, 1.0], [fast, slow]).lower_bound == pytest.approx(3.0), "the long item is computed by the fast rank or not at all"
    assert dispatch([9.0, 1.0], [Rank(3.0, holds=[1]), Rank(1.0)]).lower_bound == pytest.approx(9.0), "or by the slow one"


@pytest.mark.parametrize("slow", [0.1, 0.4, 0.85])
def test_few_samples_on_unequal_ranks_end_near_the_best(slow: float) -> None:
    """Lengths as of several tasks, one of them long: it does not go to the slow rank, where it would decide the step."""
    for seed in range(20):
        chance = random.Random(seed)
        seconds = [16_000.0, *(max(16.0, chance.lognormvariate(5.8, 1.0)) for _ in range(5))]
        ranks = [Rank(), Rank(slow)]
        found = dispatch(seconds, ranks)
        assert 0 in found.items[0] and found.end <= 1.1 * least_end(seconds, ranks)


def test_hundreds_of_samples_take_less_than_five_milliseconds_and_end_near_the_bound() -> None:
    """Half of the ranks are slow, and hold no sample above 4,096 tokens. The best of ten, in processor time: others use the CPU."""
    chance = random.Random(0)
    lengths = [min(16384.0, max(100.0, chance.lognormvariate(6.5, 1.0))) for _ in range(600)]
    short = frozenset(item for item, tokens in enumerate(lengths) if tokens <= 4096)
    ranks = [Rank(0.45, short) if number % 2 else Rank() for number in range(8)]
    taken: list[float] = []
    for _ in range(10):
        begun = time.process_time()
        found = dispatch(lengths, ranks)
        taken.append(time.process_time() - begun)
        assert found.excess <= 0.01 and set().union(*found.items[1::2]) <= short
    assert min(taken) <= 5e-3, taken


def test_an_item_that_no_rank_holds_is_refused() -> None:
    with pytest.raises(CapacityError, match="item 1 fits on none of 2 ranks"):
        dispatch([1.0, 2.0], [Rank(holds=[0]), Rank(holds=[])])


def test_nothing_to_do() -> None:
    found = dispatch([], [Rank(), Rank(busy_seconds=2.0)])
    assert (found.items, found.ends, found.lower_bound, found.excess) == (((), ()), (0.0, 2.0), 2.0, 0.0)
    assert dispatch([], [Rank()]).excess == 0.0
