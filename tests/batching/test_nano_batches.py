"""Slices of global batches: every sample once, equal work, within the budget, and in the order of the cursor where that is asked."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.batching.flow import Flow, Item
from tlora.batching.nano_batches import Slicing, cut, pack_slices
from tlora.batching.pack import MicroBatch

lengths = st.lists(st.integers(1, 400), min_size=1, max_size=24)


def work(tokens: int) -> float:
    return tokens * (1000.0 + tokens)


def items(lengths: list[int]) -> list[Item]:
    return [Item(100 + number, tokens) for number, tokens in enumerate(lengths)]


def largest(lengths: list[int], slices: list[list[int]]) -> float:
    return max(sum(work(lengths[position]) for position in own) for own in slices)


def best_stretches(lengths: list[int], count: int) -> float:
    """The least work that the largest of so many stretches can have, by trying all."""
    if count == 1 or len(lengths) == 1:
        return sum(map(work, lengths))
    return min(
        max(sum(map(work, lengths[:end])), best_stretches(lengths[end:], count - 1) if lengths[end:] else 0.0)
        for end in range(1, len(lengths) + 1)
    )


@given(lengths, st.integers(1, 30), st.integers(1, 1000), st.booleans())
def test_each_sample_is_in_one_slice_and_slices_keep_the_budget(lengths: list[int], count: int, budget: int, in_order: bool) -> None:
    slices = cut(items(lengths), count, budget, work, in_order=in_order)
    assert sorted(position for own in slices for position in own) == list(range(len(lengths)))
    assert all(own == sorted(own) and own for own in slices)
    assert all(len(own) == 1 or sum(lengths[position] for position in own) <= budget for own in slices)
    if in_order:
        assert [position for own in slices for position in own] == list(range(len(lengths)))


@given(st.lists(st.integers(1, 400), min_size=1, max_size=7), st.integers(1, 8))
def test_stretches_have_the_least_largest_work(lengths: list[int], count: int) -> None:
    slices = cut(items(lengths), count, 10_000, work, in_order=True)
    assert len(slices) <= count and largest(lengths, slices) == pytest.approx(best_stretches(lengths, count), rel=1e-5)


@given(lengths, st.integers(1, 8))
def test_out_of_order_slices_have_nearly_equal_work(lengths: list[int], count: int) -> None:
    slices = cut(items(lengths), count, 10_000, work, in_order=False)
    assert len(slices) == min(count, len(lengths))
    bound = max(sum(map(work, lengths)) / count, work(max(lengths)))
    assert largest(lengths, slices) <= 4 / 3 * bound * 1.0001 + work(max(lengths)) * (count > len(lengths))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_lone_batch_is_taken_in_as_many_slices(count: int, in_order: bool) -> None:
    """The rest is cut anew for each slice, and comes out as if it had been cut at once."""
    flow = Flow("a")
    flow.offer(items([40] * 8))
    flow.slices = count
    taken = list[MicroBatch]()
    while (
        packed := pack_slices([flow], 1000, Slicing(lambda _, tokens: work(tokens), 8 * work(40) / count), in_order=in_order)
    ) is not None:
        taken.append(packed)
    assert len(taken) == count and flow.complete
    assert sorted(row.sample for packed in taken for row in packed.rows) == list(range(100, 108))
    assert max(packed.tokens for packed in taken) == -(-8 // count) * 40
    assert all(packed.budget == packed.tokens for packed in taken)


def test_small_jobs_share_a_slice_up_to_the_target() -> None:
    flows = [Flow(f"j{number}") for number in range(6)]
    for flow in flows:
        flow.offer(items([50, 50]))
        flow.slices = 1
    slicing = Slicing(lambda _, tokens: float(tokens), 300.0)
    taken = [pack_slices(flows, 1000, slicing, in_order=True) for _ in range(3)]
    assert [packed.tokens if packed else 0 for packed in taken] == [300, 300, 0]
    assert [row.job_id for row in (taken[0].rows if taken[0] else ())] == ["j0", "j0", "j1", "j1", "j2", "j2"]


def test_ranks_count() -> None:
    """A job of twice the work a token fills a slice with half the tokens."""
    flows = [Flow("narrow"), Flow("wide")]
    for flow in flows:
        flow.offer(items([50, 50]))
        flow.slices = 1
    slicing = Slicing(lambda job, tokens: tokens * (2.0 if job == "wide" else 1.0), 200.0)
    taken = [pack_slices(flows, 1000, slicing, in_order=True) for _ in range(2)]
    assert [{row.job_id for row in packed.rows} for packed in taken if packed] == [{"narrow"}, {"wide"}]


def test_an_evaluation_whose_turn_it_is_is_not_cut() -> None:
    flow = Flow("a", kind="eval")
    flow.offer(items([10, 10]))
    assert pack_slices([flow], 100, Slicing(lambda _, tokens: float(tokens), 10.0), in_order=True) is None
    assert len(flow.pending) == 2


@pytest.mark.parametrize("seed", range(10))
def test_batches_of_random_jobs_are_taken_whole_and_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    flows = [Flow(f"j{number}", rng.choice([1.0, 3.0])) for number in range(rng.randint(1, 5))]
    for flow in flows:
        flow.offer(items([rng.randint(1, 90) for _ in range(rng.randint(1, 12))]))
        flow.slices = rng.randint(1, 6)
    offered = {(flow.job_id, item.sample) for flow in flows for item in flow.pending}
    seen = list[tuple[str, int]]()
    while (packed := pack_slices(flows, 120, Slicing(lambda _, tokens: work(tokens), 1e5), in_order=bool(seed % 2))) is not None:
        assert packed.tokens <= 120
        seen += [(row.job_id, row.sample) for row in packed.rows]
    assert len(seen) == len(offered) and set(seen) == offered
