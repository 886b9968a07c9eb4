"""The rule of a stream: random legal streams keep it, and each planted violation is seen."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from tlora.batching.pack import MicroBatch, Row
from tlora.batching.stream_rule import StreamRule


def micro_batch(*rows: tuple[str, int], kind: str = "train") -> MicroBatch:
    return MicroBatch(kind, tuple(Row(job, sample, 4) for job, sample in rows), 4 * len(rows), 64)  # type: ignore[arg-type]


def stream() -> tuple[StreamRule, list[MicroBatch]]:
    """Of two jobs, with two micro-batches in flight: batch 0 of "a" in two parts, "b" in the second."""
    rule = StreamRule(3)
    rule.enter("a")
    rule.enter("b")
    flight = [micro_batch(("a", 0), ("a", 1)), micro_batch(("a", 2), ("b", 7))]
    for packed in flight:
        rule.announce(packed, {"a": 0, "b": 0})
    return rule, flight


def computed() -> tuple[StreamRule, list[MicroBatch]]:
    rule, flight = stream()
    for packed in flight:
        rule.compute(packed)
    return rule, flight


def the_next_batch_too_early() -> None:
    rule, _ = stream()
    rule.announce(micro_batch(("a", 3)), {"a": 1})


def the_next_batch_before_the_step() -> None:
    rule, _ = computed()
    rule.announce(micro_batch(("a", 3)), {"a": 1})


def a_step_with_parts_in_flight() -> None:
    rule, flight = stream()
    rule.compute(flight[0])
    rule.leaves("a", 0, 3)


def a_step_twice() -> None:
    rule, _ = computed()
    rule.leaves("a", 0, 3)
    rule.leaves("a", 0, 3)


def a_step_of_another_batch() -> None:
    rule, _ = computed()
    rule.leaves("a", 1, 3)


def a_slice_dropped() -> None:
    rule, _ = computed()
    rule.leaves("a", 0, 4)


def a_sample_twice() -> None:
    rule, _ = stream()
    rule.announce(micro_batch(("a", 1)), {"a": 0})


def out_of_turn() -> None:
    rule, flight = stream()
    rule.compute(flight[1])


def too_many_in_flight() -> None:
    rule, _ = stream()
    rule.announce(micro_batch(("a", 3)), {"a": 0})
    rule.announce(micro_batch(("a", 4)), {"a": 0})


def a_job_that_is_not_here() -> None:
    rule, _ = computed()
    rule.leave("b")
    rule.announce(micro_batch(("b", 8)), {"b": 1})


def a_job_taken_out_of_the_flight() -> None:
    rule, _ = stream()
    rule.leave("b")


def a_job_that_enters_a_stream_in_flight() -> None:
    rule, _ = stream()
    rule.enter("c")


def a_batch_again_after_its_step() -> None:
    rule, _ = computed()
    rule.leaves("a", 0, 3)
    rule.announce(micro_batch(("a", 0)), {"a": 0})


VIOLATIONS = [
    the_next_batch_too_early,
    the_next_batch_before_the_step,
    a_step_with_parts_in_flight,
    a_step_twice,
    a_step_of_another_batch,
    a_slice_dropped,
    a_sample_twice,
    out_of_turn,
    too_many_in_flight,
    a_job_that_is_not_here,
    a_job_taken_out_of_the_flight,
    a_job_that_enters_a_stream_in_flight,
    a_batch_again_after_its_step,
]


@pytest.mark.parametrize("violate", VIOLATIONS)
def test_a_planted_violation_is_seen(violate: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        violate()


@pytest.mark.parametrize("seed", range(20))
def test_legal_streams_keep_the_rule(seed: int) -> None:
    """Jobs of random batches, some of which begin anew on the way."""
    rng, depth = random.Random(seed), 1 + seed % 4
    rule = StreamRule(depth)
    steps = dict.fromkeys("abc", 0)
    sizes = {name: rng.randint(1, 6) for name in steps}
    left = {name: list(range(size)) for name, size in sizes.items()}
    for name in steps:
        rule.enter(name)
    flight: list[MicroBatch] = []
    for _ in range(200):
        offering = [name for name in steps if left[name]]
        if offering and len(flight) < depth and rng.random() < 0.6:
            rows: list[tuple[str, int]] = []
            for name in sorted(rng.sample(offering, rng.randint(1, len(offering)))):
                count = rng.randint(1, len(left[name]))
                rows += [(name, left[name].pop(0)) for _ in range(count)]
            flight.append(micro_batch(*rows))
            rule.announce(flight[-1], steps)
        elif flight:
            rule.compute(flight.pop(0))
            waiting = {row.job_id for packed in flight for row in packed.rows}
            for name in [name for name in steps if not left[name] and name not in waiting]:
                rule.leaves(name, steps[name], sizes[name])
                steps[name] += 1
                sizes[name] = rng.randint(1, 6)
                left[name] = list(range(sizes[name]))
        if rng.random() < 0.05:
            rule.begin_anew(list(steps))
            flight.clear()
            left = {name: list(range(size)) for name, size in sizes.items()}
    assert sum(steps.values()) > 20
