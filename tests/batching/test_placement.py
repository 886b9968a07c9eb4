"""`place` and `best_move`: checked against every placement of small cases."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tlora.batching.placement import best_move, describe_placement, place
from tlora.batching.replicas import Held


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


@pytest.mark.parametrize("seed", range(40))
def test_jobs_of_several_replicas_are_spread_and_the_others_fill_up(seed: int) -> None:
    rng = random.Random(seed)
    gpus = rng.randint(2, 5)
    seconds = {f"j{i}": rng.choice([1.0, 2.0, 3.0, 5.0, 8.0, 13.0]) for i in range(rng.randint(1, 9))}
    replicas = {name: rng.randint(2, 6) for name in seconds if rng.random() < 0.4}
    found = place(seconds, gpus, replicas)
    assert found == place(dict(seconds), gpus, dict(replicas)), "every rank finds the same"
    assert sorted(name for home in found.jobs for name in home) == sorted(seconds)
    assert found.spans.keys() == replicas.keys()
    loads = [0.0] * gpus
    for gpu, names in enumerate(found.jobs):
        assert [name in replicas for name in names] == sorted((name in replicas for name in names), reverse=True)
        for name in names:
            span = found.spans.get(name)
            assert span is None or span.lead_rank == gpu
            for rank in span.ranks if span is not None else (gpu,):
                loads[rank] += seconds[name] * (span.part(rank) if span is not None else 1.0)
    assert loads == pytest.approx(found.seconds)
    assert {name for gpu in range(gpus) for name in found.parts(gpu)} == replicas.keys()
    assert all(len(span.ranks) == min(span.replicas, gpus) == len(set(span.ranks)) for span in found.spans.values())
    assert found.end >= found.lower_bound - 1e-9


@pytest.mark.parametrize(
    ("gpus", "replicas", "homes"),
    [
        (2, [2, 2, 2, 2], [0, 1, 0, 1]),
        (4, [4, 4, 4, 4, 4], [0, 1, 2, 3, 0]),
        (4, [2, 2, 2, 2], [0, 2, 1, 3]),
        (2, [4, 2, 6], [0, 1, 0]),
        (2, [3, 3, 3], [0, 1, 0]),  # the home computes two of the three replicas
    ],
)
def test_homes_of_equal_jobs_alternate(gpus: int, replicas: list[int], homes: list[int]) -> None:
    found = place({f"j{i}": 8.0 for i in range(len(replicas))}, gpus, {f"j{i}": count for i, count in enumerate(replicas)})
    assert [span.lead_rank for span in found.spans.values()] == homes


def test_the_home_of_the_longest_job_is_the_home_of_no_other_while_there_are_more() -> None:
    found = place({"long": 90.0, "a": 30.0, "b": 30.0, "c": 30.0}, 2, dict.fromkeys(("long", "a", "b", "c"), 2))
    assert found.jobs == (("long",), ("a", "b", "c"))
    assert found.seconds == (90.0, 90.0)


def test_an_unequal_cut_gives_the_larger_part_to_the_gpu_with_less_to_do() -> None:
    found = place({"a": 9.0, "b": 3.0}, 2, {"a": 3, "b": 3})
    assert found.spans["b"].ranks == (1, 0)
    assert found.seconds == (7.0, 5.0)


def test_one_gpu_has_all_replicas() -> None:
    assert place({"a": 4.0}, 1, {"a": 4}).spans == {}


def test_what_a_placement_is_told_as() -> None:
    found = place({"a": 1.0, "wide": 4.0}, 2, {"wide": 2})
    assert describe_placement(found) == "GPU 0: wide, a; GPU 1: a part of wide (predicted 3.0 s, 20% above what no placement can beat)"


def test_what_cannot_move_counts_and_stays() -> None:
    assert best_move([{"a": 50.0}, {}], 1, 10.0) is None
    assert best_move([{"a": 50.0}, {}], 1, 10.0, [80.0, 0.0]) == (0, "a")
    assert best_move([{}, {}], 1, 10.0, [80.0, 0.0]) is None


@pytest.mark.parametrize("seed", range(20))
def test_gpus_of_other_speeds_have_jobs_in_proportion(seed: int) -> None:
    rng = random.Random(seed)
    speeds = [rng.choice([0.4, 1.0, 2.0]) for _ in range(rng.randint(2, 3))]
    seconds = {f"j{i}": rng.choice([1.0, 2.0, 3.0, 5.0, 8.0, 13.0]) for i in range(rng.randint(1, 7))}
    found = place(seconds, len(speeds), speeds=speeds)
    ends = [sum(seconds[name] for name in home) / speed for home, speed in zip(found.jobs, speeds, strict=True)]
    assert list(found.seconds) == pytest.approx(ends)
    best = min(
        max(
            sum(value for value, home in zip(seconds.values(), homes, strict=True) if home == gpu) / speeds[gpu]
            for gpu in range(len(speeds))
        )
        for homes in product(range(len(speeds)), repeat=len(seconds))
    )
    assert found.lower_bound <= best * (1 + 1e-9) and best <= found.end * (1 + 1e-9) and found.end <= best * 1.2


def test_a_job_over_gpus_of_other_speeds_ends_on_all_at_once() -> None:
    found = place({"a": 12.0}, 2, {"a": 2}, speeds=[1.0, 3.0])
    assert found.seconds == (3.0, 3.0) and found.excess == 0.0


def test_a_job_over_gpus_of_other_speeds_has_replicas_of_other_weights() -> None:
    span = place({"a": 12.0}, 2, {"a": 3}, speeds=[1.0, 3.0]).spans["a"]
    assert sum(span.weights) == pytest.approx(1) and span.part(1) == pytest.approx(0.75) and span.part(0) == pytest.approx(0.25)
    assert place({"a": 12.0}, 2, {"a": 3}, speeds=[3.0, 3.0]).spans["a"].weights == ()


def test_a_job_spans_gpus_of_one_kind_where_it_must() -> None:
    found = place({"a": 12.0, "b": 12.0}, 4, {"a": 2, "b": 2}, [1.0, 3.0, 1.0, 3.0], kinds=["old", "new", "old", "new"])
    for span in found.spans.values():
        assert {rank % 2 for rank in span.ranks} in ({0}, {1}) and span.weights == ()
    assert place({"a": 1.0}, 2, {"a": 2}, kinds=["old", "new"]).spans == {}, "one of each: it lies on one"


@pytest.mark.parametrize("seed", range(20))
def test_jobs_are_only_where_there_is_memory_for_them(seed: int) -> None:
    rng = random.Random(seed)
    gpus = rng.randint(2, 4)
    seconds = {f"j{i}": rng.choice([1.0, 2.0, 5.0, 13.0]) for i in range(rng.randint(1, 9))}
    holds = {name: rng.sample(range(gpus), rng.randint(1, gpus)) for name in seconds if rng.random() < 0.5}
    replicas = {name: 2 for name in seconds if rng.random() < 0.3}
    found = place(seconds, gpus, replicas, [rng.choice([0.5, 1.0]) for _ in range(gpus)], holds)
    for gpu, names in enumerate(found.jobs):
        assert all(gpu in holds.get(name, [gpu]) for name in (*names, *found.parts(gpu)))
    assert sorted(name for names in found.jobs for name in names) == sorted(seconds)


def test_a_gpu_that_holds_the_shorter_samples_has_a_part_where_that_pays() -> None:
    """GPU 0 alone holds the job. Its lead rank is there, and the other one has what it holds, or its equal share if that is less."""
    for share, ends in ((0.3, (7.0, 3.0)), (0.8, (5.0, 5.0))):
        found = place({"a": 10.0, "b": 1.0}, 2, {"a": 2}, holds={"a": [0]}, held={"a": {1: Held(512, share)}})
        span = found.spans["a"]
        assert (span.lead_rank, span.longest_of_each, span.weights) == (0, (0, 512), ()) and "a" in found.jobs[0]
        assert tuple(10 * span.part(rank) for rank in (0, 1)) == pytest.approx(ends) and found.longest_samples(1) == {"a": 512}
        assert "; GPU 1: a part of a (samples of up to 512 tokens) (predicted " in describe_placement(found).replace(
            "GPU 1: b, ", "GPU 1: "
        )
    assert place({"a": 10.0}, 2, {"a": 2}, holds={"a": [0]}, held={"a": {1: Held(512, 0.04)}}).spans == {}, "too little to be worth it"
    assert place({"a": 10.0}, 2, {}, holds={"a": [0]}, held={"a": {1: Held(512, 0.5)}}).spans == {}, "it is not cut"


def test_gpus_that_hold_parts_come_behind_those_that_hold_all() -> None:
    held = {"a": {0: Held(512, 0.5), 1: Held(256, 0.2)}}
    span = place({"a": 10.0}, 4, {"a": 4}, [1.0, 1.0, 1.0, 1.0], {"a": [2, 3]}, held=held).spans["a"]
    assert set(span.ranks[:2]) == {2, 3} and [span.longest_on(rank) for rank in range(4)] == [512, 256, 0, 0]
    assert [span.part(rank) for rank in range(4)] == pytest.approx([0.8 / 3, 0.2, 0.8 / 3, 0.8 / 3])
    narrow = place({"a": 10.0}, 3, {"a": 2}, [1.0, 1.0, 1.0], {"a": [1, 2]}, held={"a": {0: Held(512, 0.9)}}).spans["a"]
    assert set(narrow.ranks) == {1, 2} and not narrow.longest, "two GPUs hold all of it"
