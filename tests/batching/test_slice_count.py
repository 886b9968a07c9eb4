"""The number of slices on noisy curves of a pipeline: near the best fixed one, and never more trials than are allowed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.batching.nano_batches import TRIALS, SliceCount

Curve = Callable[[int], float]


def pipeline(stages: int, fixed: float) -> Curve:
    """Seconds of a step in n equal slices, each of which takes `fixed` besides its part of the one second of work: convex in n."""
    return lambda slices: (1 / slices + fixed) * (slices + stages - 1)


def choose(curve: Curve, most: int, first: int, noise: Callable[[], float] = lambda: 1.0) -> SliceCount:
    found, trials = SliceCount(most, first), 0
    while not found.settled:
        assert 1 <= found.count <= most
        found.see(curve(found.count) * noise())
        trials += 1
        assert trials <= TRIALS
    return found


def excess(curve: Curve, most: int, count: int) -> float:
    """Over the best fixed number."""
    return curve(count) / min(curve(slices) for slices in range(1, most + 1)) - 1


def draw(rng: random.Random) -> tuple[Curve, int, int]:
    stages, fixed = rng.choice([2, 3, 4, 8]), math.exp(rng.uniform(math.log(0.002), math.log(0.3)))
    return pipeline(stages, fixed), min(rng.choice([4, 8, 16, 32, 64]), 16 * stages), stages


@pytest.mark.parametrize(
    ("sigma", "disturbed", "least"),
    [(0.0, 0.0, 1.0), (0.01, 0.0, 0.99), (0.02, 0.02, 0.98), (0.03, 0.05, 0.95), (0.05, 0.05, 0.9)],
    ids=["exact", "1 %", "2 %", "3 %", "5 %"],
)
def test_most_choices_are_within_3_percent_of_the_best_fixed_number(sigma: float, disturbed: float, least: float) -> None:
    """`disturbed`: part of the steps that take 30 % longer."""
    rng, within = random.Random(11), list[bool]()
    for _ in range(400):
        curve, most, stages = draw(rng)
        found = choose(curve, most, stages, lambda: math.exp(rng.gauss(0, sigma)) * (1.3 if rng.random() < disturbed else 1.0))
        within.append(excess(curve, most, found.count) <= 0.03)
    assert sum(within) / len(within) >= least


def test_it_beats_two_slices_where_that_is_predicted() -> None:
    rng = random.Random(5)
    for _ in range(200):
        curve, most, stages = draw(rng)
        if most > 2 and curve(2) > 1.1 * min(curve(slices) for slices in range(1, most + 1)):
            found = choose(curve, most, stages, lambda: math.exp(rng.gauss(0, 0.01)))
            assert curve(2) / curve(found.count) > 1.07, (most, stages, found.count)


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_whatever_is_measured_it_ends_within_the_range(most: int, first: int, data: st.DataObject) -> None:
    seconds = st.floats(1e-6, 1e6)
    found = choose(lambda _: data.draw(seconds), most, first)
    assert 1 <= found.count <= most
    assert most == 1 or found.count in found.tried
    assert not found.tried or found.tried[found.count] == min(found.tried.values())


def test_one_slow_step_is_no_reason_for_fewer() -> None:
    found = SliceCount(64, 2)
    for seconds in (1.0, 0.8, 5.0, 0.7):  # 2, 4, 8, and 8 once more
        found.see(seconds)
    assert found.count == 16
    for seconds in (2.0, 2.1):
        found.see(seconds)
    assert found.count == 8
    found.see(0.7)
    assert found.count == 12  # by a sixteenth of the most from here


def test_of_equal_counts_the_least_is_taken() -> None:
    assert choose(lambda _: 1.0, 8, 2).count == 2


def test_where_slices_cost_more_than_they_save_a_batch_is_left_whole() -> None:
    assert choose(pipeline(2, 2.0), 8, 2).count == 1


def test_where_there_is_nothing_to_choose_nothing_is_tried() -> None:
    found = SliceCount(1, 4)
    assert found.settled and found.count == 1 and not found.tried
