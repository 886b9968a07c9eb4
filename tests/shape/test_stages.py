"""Where layers are cut into stages, and how long these wait."""

from __future__ import annotations

import doctest
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.shape import stages, token_cost
from tlora.shape.stages import cut_layers


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


@given(
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=8),
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.integers(1, 8)), min_size=1, max_size=4),
)
def test_no_stage_gets_more_layers_than_it_has_memory_for(layers: list[float], gpus: list[tuple[float, int]]) -> None:
    """`gpus`: speeds, and how many layers each holds. Where the base fits in no cut it is cut by speeds alone."""
    speeds, rooms = zip(*gpus[: len(layers)], strict=True)
    found = cut_layers(layers, 0.0, speeds, lambda stage, first, end: end - first <= rooms[stage])
    every = [tuple(pairwise((0, *inner, len(layers)))) for inner in combinations(range(1, len(layers)), len(speeds) - 1)]
    able = [cuts for cuts in every if all(end - first <= room for (first, end), room in zip(cuts, rooms, strict=True))]
    assert found in (able or every)
    best = min(slowest(cuts, layers, 0.0, list(speeds)) for cuts in able or every)
    assert slowest(found, layers, 0.0, list(speeds)) == pytest.approx(best)


def test_examples() -> None:
    for module in (stages, token_cost):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed
