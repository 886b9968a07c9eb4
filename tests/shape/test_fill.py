"""What the cost model says of a shared micro-batch against samples that are really packed: tokens of it, and steps of each member."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tlora.batching.flow import Flow, Item
from tlora.batching.pack import pack
from tlora.protocol import JobProfile
from tlora.shape.sharing import Member, even_sample_tokens, fill
from tlora.sim.mapping import sample_lengths

MICRO_BATCHES = 200
FILL_SHARE = 0.95  # the cost model's


@dataclass(frozen=True)
class Samples:
    """A job: the lengths that its samples are drawn from, how many a batch has, and its weight."""

    lengths: tuple[int, ...]
    batch_size: int
    weight: float

    @property
    def member(self) -> Member:
        even = self.lengths[0] if len(set(self.lengths)) == 1 else 0
        return Member(statistics.mean(self.lengths) * self.batch_size, self.weight, even)


def packed(jobs: Sequence[Samples], budget: int) -> tuple[float, list[float]]:
    """Mean tokens of a micro-batch, and the optimizer steps of each job for one of them."""
    rng, flows = random.Random(0), [Flow(str(number), job.weight) for number, job in enumerate(jobs)]
    tokens, steps = 0, [0] * len(jobs)
    for _ in range(MICRO_BATCHES):
        for flow, job in zip(flows, jobs, strict=True):
            if not flow.runnable:
                flow.offer([Item(number, rng.choice(job.lengths)) for number in range(job.batch_size)])
        found = pack(flows, budget, in_order=False)
        assert found is not None
        tokens += found.tokens
        steps = [count + flow.complete for count, flow in zip(steps, flows, strict=True)]
    return tokens / MICRO_BATCHES, [count / MICRO_BATCHES for count in steps]


def even(tokens: int, batch_size: int, weight: float) -> Samples:
    return Samples((tokens,), batch_size, weight)


@pytest.mark.parametrize(
    ("jobs", "budget"),
    [
        ([even(128, 1, 3090), even(1024, 4, 23380)], 1024),  # in turns
        ([even(128, 1, 2543), even(1024, 4, 18000), even(128, 1, 2543)], 1024),
        ([even(512, 1, 9000), even(1024, 8, 20000)], 1024),
        ([even(128, 1, 3090), even(1024, 4, 23380)], 2048),  # one sample beside
        ([even(128, 1, 3090), even(1024, 4, 23380)], 4096),  # three and one
        ([even(300, 1, 5000), even(1000, 8, 20000)], 8192),  # seven and one
        ([even(128, 1, 3090), even(1024, 4, 23380)], 8192),  # whole batches
        ([*[even(128, 1, 1)] * 4, even(1024, 16, 4)], 8192),
    ],
)
def test_samples_of_one_length_leave_what_none_of_them_fits_into(jobs: list[Samples], budget: int) -> None:
    tokens, steps = packed(jobs, budget)
    filled, shares = fill(1.0, budget, 1, [job.member for job in jobs])
    assert filled == pytest.approx(tokens, rel=0.04)
    assert [share / job.member.tokens_per_step for share, job in zip(shares, jobs, strict=True)] == pytest.approx(steps, rel=0.06, abs=0.01)


@pytest.mark.slow
def test_the_batches_of_one_that_has_most_tokens_end_in_micro_batches_that_nobody_fills() -> None:
    rng, errors, shared_errors = random.Random(2), list[float](), list[float]()
    while len(errors) < 60:
        jobs = [
            Samples(sample_lengths(rng.choice([150, 300, 600, 1000])), rng.choice([4, 8, 16, 32, 64]), 0.0)
            for _ in range(rng.randint(2, 4))
        ]
        means = [job.member.tokens_per_step for job in jobs]
        jobs = [Samples(job.lengths, job.batch_size, mean / (mean + 3000)) for job, mean in zip(jobs, means, strict=True)]
        budget = rng.choice([4096, 8192, 16384])
        filled, shares = fill(FILL_SHARE, budget, 1, [job.member for job in jobs])
        short = [share for share, mean in zip(shares, means, strict=True) if share < min(mean, budget)]
        if len(short) == 1:
            tokens, _ = packed(jobs, budget)
            errors.append(filled / tokens - 1)
            shared_errors.append(min(FILL_SHARE * budget, sum(means)) / tokens - 1)
    assert abs(statistics.mean(errors)) < 0.04
    assert max(map(abs, errors)) < 0.25
    assert statistics.mean(shared_errors) > 0.1  # if all shared as a fluid does


def test_whole_samples_fill_no_more_than_others_do() -> None:
    """What a micro-batch holds at most bounds what a cluster can train (`sim/bounds.py`)."""
    filled, _ = fill(FILL_SHARE, 2048, 1, [Member(24, 1.0), Member(8096, 8.0, 1012)])
    assert filled <= FILL_SHARE * 2048


def test_several_gpus_have_whole_samples_each() -> None:
    one, shares = fill(1.0, 2048, 1, [Member(128, 1.0, 128), Member(4096, 8.0, 1024)])
    four, shares_on_four = fill(1.0, 4 * 2048, 4, [Member(4 * 128, 1.0, 128), Member(4 * 4096, 8.0, 1024)])
    assert (four, shares_on_four) == (4 * one, [4 * share for share in shares])


def test_samples_are_of_one_length_as_far_as_the_histogram_tells() -> None:
    profile = JobProfile(4096.0, 10, 1000, 1)
    assert even_sample_tokens(profile) == 0
    assert even_sample_tokens(JobProfile(4096.0, 10, 1000, 1, (0, 0, 0, 0, 0, 0, 0, 0, 0, 64))) == 1000
    assert even_sample_tokens(JobProfile(4096.0, 10, 1000, 1, (0, 0, 0, 0, 0, 0, 0, 0, 1, 64))) == 0
