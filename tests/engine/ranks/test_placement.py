"""`place` and `best_move`: checked against every placement of small cases."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tlora.engine.ranks.placement import best_move, place


def best_end(seconds: dict[str, float], gpus: int) -> float:
    """The shortest end of all placements."""
    ends: list[float] = []
    for homes in product(range(gpus), repeat=len(seconds)):
        loads = [0.0] * gpus
        for home, value in zip(homes, seconds.values(), strict=True):
            loads[home] += value
        ends.append(max(loads))
    return min(ends)


@pytest.mark.parametrize("seed", range(40))
def test_a_placement_is_near_the_best_and_above_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    gpus = rng.randint(1, 3)
    seconds = {f"j{i}": rng.choice([1.0, 2.0, 3.0, 5.0, 8.0, 13.0]) for i in range(rng.randint(1, 7))}
    found, best = place(seconds, gpus), best_end(seconds, gpus)
    assert sorted(name for home in found.jobs for name in home) == sorted(seconds)
    assert found.lower_bound <= best <= found.end <= best * 1.15
    assert list(found.seconds) == [sum(seconds[name] for name in home) for home in found.jobs]
    assert found.excess == pytest.approx(found.end / found.lower_bound - 1)


def test_a_swap_mends_what_longest_first_gets_wrong() -> None:
    found = place({"a": 3.0, "b": 3.0, "c": 2.0, "d": 2.0, "e": 2.0}, 2)  # longest first: 3 + 2 + 2 beside 3 + 2
    assert found.end == 6.0
    assert found.excess == 0.0


def test_the_order_of_the_file_decides_between_equals() -> None:
    seconds = dict.fromkeys("abcdef", 1.0)
    assert place(seconds, 3) == place(dict(seconds), 3)
    assert place(seconds, 3).jobs == (("a", "d"), ("b", "e"), ("c", "f"))


def test_jobs_that_are_refused_take_no_time_and_have_a_place() -> None:
    found = place({"bad": 0.0, "worse": 0.0}, 2)
    assert sum(map(len, found.jobs)) == 2
    assert found.excess == 0.0


def test_no_jobs_and_more_gpus_than_jobs() -> None:
    assert place({}, 2).jobs == ((), ())
    assert place({"a": 2.0}, 3).seconds == (2.0, 0.0, 0.0)


def test_a_move_is_made_where_it_shortens_the_end() -> None:
    left = [{"a": 100.0, "b": 60.0, "c": 30.0}, {}, {"d": 50.0, "e": 40.0}]
    assert best_move(left, 1, move_seconds=10.0) == (0, "a")  # 90 here, 110 there; b: 130 here


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ([{"a": 100.0}, {}], "a job alone would only change its place"),
        ([{"a": 12.0, "b": 11.0}, {}], "a move takes longer than it saves"),
        ([{"a": 1000.0, "b": 40.0}, {}], "less than a twentieth"),
        ([{}, {}], "nothing is left"),
    ],
)
def test_other_moves_are_not_made(left: list[dict[str, float]], why: str) -> None:
    assert best_move(left, 1, move_seconds=10.0) is None, why
