"""Where layers are cut into stages, and how long these wait."""

from __future__ import annotations

import doctest
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.shape import stages, token_cost
from tlora.shape.stages import cut_layers
from tlora.shape.token_cost import TokenCost, bubble


def slowest(cuts: tuple[tuple[int, int], ...], layers: list[float], head: float, speeds: list[float]) -> float:
    seconds = [sum(layers[first:end]) for first, end in cuts]
    seconds[-1] += head
    return max(own / speed for own, speed in zip(seconds, speeds, strict=True))


@given(
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=8),
    st.integers(0, 20).map(float),
    st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=4),
)
def test_no_other_cut_has_a_faster_slowest_stage(layers: list[float], head: float, speeds: list[float]) -> None:
    speeds = speeds[: len(layers)]
    found = cut_layers(layers, head, speeds)
    assert [found[0][0], *(end for _, end in found)][-1] == len(layers) and found[0][0] == 0
    assert all(end == first for (_, end), (first, _) in pairwise(found)) and all(first < end for first, end in found)
    every = [tuple(pairwise((0, *inner, len(layers)))) for inner in combinations(range(1, len(layers)), len(speeds) - 1)]
    assert slowest(found, layers, head, speeds) == pytest.approx(min(slowest(cuts, layers, head, speeds) for cuts in every))


@given(st.integers(1, 8), st.lists(st.floats(0.01, 50), min_size=1, max_size=12))
def test_more_jobs_never_lengthen_a_bubble(count: int, micro_batches: list[float]) -> None:
    waits = [bubble(count, micro_batches[:jobs]) for jobs in range(1, len(micro_batches) + 1)]
    assert waits == sorted(waits, reverse=True) and all(0 <= wait < 1 for wait in waits)


@pytest.mark.parametrize(("count", "micro_batches"), [(2, 1), (2, 8), (4, 8), (8, 3)])
def test_a_lone_job_waits_as_long_as_a_pipeline_that_is_flushed(count: int, micro_batches: int) -> None:
    assert bubble(count, [micro_batches]) == pytest.approx((count - 1) / (micro_batches + count - 1))


def test_the_cost_of_a_token_has_the_wait_in_it() -> None:
    """Smaller micro-batches shorten it; those of more tokens than all jobs offer are not full."""
    cost = TokenCost(8192, stages=2, offered_tokens=(4096.0,))
    assert cost.at(4096, 0) == pytest.approx(2.0) == pytest.approx(cost.at(8192, 0))
    assert cost.at(1024, 0) == pytest.approx(5 / 4)
    assert TokenCost(8192, stages=2, offered_tokens=(4096.0, 4096.0)).at(4096, 0) == 1.0


def test_examples() -> None:
    for module in (stages, token_cost):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed
