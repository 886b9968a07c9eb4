"""Weights of replicas by measured seconds: they follow speeds, and neither noise nor a single step; few changes, whatever is measured."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tlora.batching.replica_weights import FIRST_STEPS, ReplicaWeights
from tlora.batching.replicas import ReplicaPlacement, cut

EQUAL = ReplicaPlacement(2, (1, 0))


def take_steps(found: ReplicaWeights, count: int, speeds: dict[int, float], sigma: float = 0.0, fixed: float = 0.0) -> list[int]:
    """Steps of eight samples, cut by the weights that count; those after which others do."""
    rng, changed = random.Random(7), list[int]()
    for step in range(count):
        lengths = [rng.randint(200, 800) for _ in range(8)]
        shares = cut(lengths, found.span.replicas, found.span.weights)
        tokens = {rank: sum(lengths[i] for replica in found.span.at(rank) for i in shares[replica]) for rank in found.span.ranks}
        seconds = {rank: fixed + tokens[rank] / speeds[rank] * math.exp(rng.gauss(0, sigma)) for rank in tokens}
        if found.see(tokens, seconds):
            changed.append(step)
    return changed


def test_a_gpu_that_throttles_gets_less_and_gets_it_back() -> None:
    found = ReplicaWeights(EQUAL)
    assert take_steps(found, 100, {1: 1000.0, 0: 1000.0}, sigma=0.02) == []
    assert found.span == EQUAL, "equal ranks keep equal shares, and so their cut"
    took = take_steps(found, 100, {1: 1000.0, 0: 500.0}, sigma=0.02)
    assert len(took) == 1 and took[0] < FIRST_STEPS
    assert abs(found.span.part(0) - 1 / 3) < 0.02 and found.span.weights[1] == found.span.part(0), "rank 0 has the second replica"
    assert len(take_steps(found, 100, {1: 1000.0, 0: 1000.0}, sigma=0.02)) == 1
    assert abs(found.span.part(0) - 1 / 2) < 0.02


def test_predicted_weights_that_are_right_stay() -> None:
    span = ReplicaPlacement(3, (0, 1), (0.375, 0.375, 0.25))
    found = ReplicaWeights(span)
    assert take_steps(found, 200, {0: 3000.0, 1: 1000.0}, sigma=0.03, fixed=0.02) == [] and found.span is span


def test_one_step_that_takes_long_changes_nothing() -> None:
    found = ReplicaWeights(EQUAL)
    for step in range(4 * FIRST_STEPS):
        assert not found.see({0: 1000, 1: 1000}, {0: 30.0 if step % FIRST_STEPS < FIRST_STEPS // 2 - 1 else 1.0, 1: 1.0})


def test_a_share_no_more_than_halves_at_once() -> None:
    found = ReplicaWeights(EQUAL)
    for _ in range(FIRST_STEPS):
        found.see({0: 1000, 1: 1000}, {0: 1000.0, 1: 1.0})
    assert found.changes == 1
    assert math.isclose(found.span.part(0) / found.span.part(1), 0.25 / (1000 / 1001))


def test_a_step_in_which_a_rank_has_no_sample_does_not_count() -> None:
    found = ReplicaWeights(replace(EQUAL, weights=(0.9, 0.1)))
    assert not any(found.see({1: 1000, 0: 0}, {1: 1.0, 0: 0.5}) for _ in range(8 * FIRST_STEPS))
    assert not any(found.see({1: 1000, 0: 1000}, {1: 1.0, 0: 0.0}) for _ in range(8 * FIRST_STEPS)), "nor one that was not measured"


@given(st.integers(2, 4), st.integers(0, 2), st.integers())
def test_whatever_is_measured_changes_are_few(ranks: int, more: int, seed: int) -> None:
    rng = random.Random(seed)
    found, steps = ReplicaWeights(ReplicaPlacement(ranks + more, tuple(range(ranks)))), 40 * FIRST_STEPS
    for _ in range(steps):
        found.see({rank: rng.randint(0, 2000) for rank in range(ranks)}, {rank: 10 ** rng.uniform(-6, 6) for rank in range(ranks)})
    assert found.changes <= math.log2(steps / FIRST_STEPS + 1)
    assert math.isclose(sum(map(found.span.part, range(ranks))), 1.0, rel_tol=1e-9)
