"""The number of slices on noisy curves of a pipeline: near the best fixed one, and never more trials than are allowed."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

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
    for seconds in (5.0, 1.0, 0.8, 5.0, 0.7):  # 2 twice, 4, 8, and 8 once more
        found.see(seconds)
    assert found.count == 16
    for seconds in (2.0, 2.1):
        found.see(seconds)
    assert found.count == 7  # what is next to the half, which is known
    found.see(0.9)
    found.see(0.9)
    assert found.count == 9  # below 7 nothing is as fast
    found.see(0.7)
    assert found.count == 13  # by a sixteenth of the most from here


def test_nothing_is_tried_beyond_a_count_that_was_slow_twice() -> None:
    found, tried = SliceCount(64, 8), list[int]()
    while not found.settled:
        tried.append(found.count)
        found.see({8: 1.0, 16: 1.5, 4: 1.2}.get(found.count, 1.1))
    assert tried[:5] == [8, 8, 16, 16, 7] and tried.count(16) == 2 and found.count == 8
    assert all(4 <= count <= 16 for count in tried), tried


def test_the_count_that_warms_up_is_measured_again() -> None:
    """Twice at once, and once more where it seems to be slow even so."""
    found, tried = SliceCount(32, 2), list[int]()
    while not found.settled:
        tried.append(found.count)
        found.see({1: 0.66, 2: 0.51, 3: 0.69, 4: 0.86}.get(found.count, 1.04) * (2 if len(tried) == 1 else 1))
    assert found.count == 2 and tried[:2] == [2, 2] and max(tried) == 4, tried


def measured_8b() -> dict[int, float]:
    """A lone job of 8 samples over an 8B in two stages on two H200s."""
    text = (Path(__file__).parents[2] / "bench/results/h200x2_c749aac_nano_batches_8b.json").read_text()
    return {int(count): of["median"] for count, of in json.loads(text)["step_seconds"].items()}


EIGHT_JOBS = {1: 0.404, 2: 0.401, 3: 0.498, 4: 0.598, 5: 0.703, 6: 0.939}  # bench/results/h200x2_692a61f9_stages_8b.json, more: beyond
EIGHT_AT_4608 = {1: 0.65, 2: 0.51, 3: 0.685, 4: 0.86, 8: 1.04}


def between(points: dict[int, float]) -> Curve:
    """Measured seconds; between and beyond counts that were not measured by straight lines."""

    def seconds(slices: int) -> float:
        low = max([count for count in points if count <= slices][:-1] or [min(points)], key=lambda count: (slices in points, count))
        after = min([count for count in points if count > low])
        return points.get(slices, points[low] + (points[after] - points[low]) * (slices - low) / (after - low))

    return seconds


@pytest.mark.parametrize(
    ("points", "most", "first", "together", "worse"),
    [(measured_8b(), 8, 2, False, 4), (EIGHT_JOBS, 32, 3, True, 6), (EIGHT_AT_4608, 32, 2, True, 9)],
    ids=["lone job", "eight jobs", "eight jobs at 4,608"],
)
def test_few_steps_of_a_short_run_are_slow(points: dict[int, float], most: int, first: int, together: bool, worse: int) -> None:
    """Of 40 steps, so many are longer by a twentieth than those of the best count; before slow counts were bounds they were 5 to 10, 17
    and 13. The first step, and `together` with other jobs the first with another count, is measured by nobody.
    """
    curve, rng, steps = between(points), random.Random(3), list[int]()
    best = min(curve(count) for count in range(1, most + 1))
    for _ in range(20):
        found, slow, begun = SliceCount(most, first), 0, False
        for _ in range(40):
            count = found.count
            slow += curve(count) > 1.05 * best
            if begun and not found.settled:
                found.see(curve(count) * math.exp(rng.gauss(0, 0.01)))
                begun = found.count == count or not together
            else:
                begun = True
        steps.append(slow)
        assert found.settled and curve(found.count) <= 1.03 * best
    assert max(steps) <= worse, steps


def test_of_equal_counts_the_least_is_taken() -> None:
    assert choose(lambda _: 1.0, 8, 2).count == 1


def test_where_slices_cost_more_than_they_save_a_batch_is_left_whole() -> None:
    assert choose(pipeline(2, 2.0), 8, 2).count == 1


def test_where_there_is_nothing_to_choose_nothing_is_tried() -> None:
    found = SliceCount(1, 4)
    assert found.settled and found.count == 1 and not found.tried
