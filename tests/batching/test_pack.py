"""Packing: exactly once, never over budget, fair, full, deterministic, in bounded work."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlora.batching import pack as packing
from tlora.batching.flow import Flow, Item, Kind, enter_line
from tlora.batching.pack import MicroBatch, Row, auto_token_budget, pack, prepared_budget

LONGEST = 1024
BOTH_ORDERS = pytest.mark.parametrize("in_order", [True, False])


@dataclass
class Job:
    """A flow that offers its next global batch as soon as the last one has left."""

    flow: Flow
    batches: Iterator[list[int]]
    offered: list[list[Item]] = field(default_factory=list)
    next_sample: int = 0

    def offer(self) -> bool:
        lengths = next(self.batches, None)
        if lengths is None:
            return False
        items = [Item(self.next_sample + k, tokens) for k, tokens in enumerate(lengths)]
        self.next_sample += len(items)
        self.flow.offer(items)
        self.offered.append(items)
        return True


def endless(seed: int, batch_size: int, median_tokens: float) -> Iterator[list[int]]:
    """Log-normal lengths, as instruction data has them."""
    rng = random.Random(seed)
    while True:
        yield [max(8, min(LONGEST, int(rng.lognormvariate(0, 0.7) * median_tokens))) for _ in range(batch_size)]


def job(name: str, batches: Iterator[list[int]], weight: float = 1.0, kind: Kind = "train") -> Job:
    made = Job(Flow(name, weight, kind), batches)
    made.offer()
    return made


def run(jobs: list[Job], budget: int, count: int, *, in_order: bool, stages: int = 1) -> list[MicroBatch]:
    made: list[MicroBatch] = []
    while len(made) < count:
        batch = pack([job.flow for job in jobs], budget, in_order=in_order, stages=stages)
        if batch is None:
            break
        made.append(batch)
        for each in jobs:
            if each.flow.complete:
                each.offer()
    return made


def tokens_by_job(batches: list[MicroBatch]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for batch in batches:
        for row in batch.rows:
            tokens[row.job_id] += row.tokens
    return tokens


# --- what must always hold ------------------------------------------------------------------------------------------

lengths_of_a_job = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=12), min_size=1, max_size=4)
jobs_of_a_run = st.lists(
    st.tuples(lengths_of_a_job, st.sampled_from([0.1, 1.0, 3.0, 100.0]), st.sampled_from(["train", "train", "eval"]), st.integers(0, 12)),
    min_size=1,
    max_size=7,
)


def play(
    drawn: list[tuple[list[list[int]], float, Kind, int]], budget: int, leave_at: dict[int, int], in_order: bool
) -> tuple[list[MicroBatch], list[Job]]:
    """Jobs join before micro-batch `start`, leave before `leave_at`; returns all micro-batches and the jobs."""
    jobs = [(Job(Flow(f"j{n}", w, k), iter(b)), start) for n, (b, w, k, start) in enumerate(drawn)]
    made: list[MicroBatch | None] = []
    here: list[Job] = []
    gone: set[str] = set()
    for turn in range(10_000):
        for number, (each, start) in enumerate(jobs):
            if start == turn:
                each.offer()
                here.append(each)
            if leave_at.get(number) == turn and each in here:
                here.remove(each)
                gone.add(each.flow.job_id)
        before = {each.flow.job_id: len(each.offered) for each in here}
        batch = pack([each.flow for each in here], budget, in_order=in_order)
        made.append(batch)
        for each in here:
            if batch and each.flow.complete:
                each.offer()
        assert all(len(each.offered) <= before[each.flow.job_id] + 1 for each in here)
        if batch is None and turn > 12:
            break
    return [b for b in made if b], [each for each, _ in jobs if each.flow.job_id not in gone]


@settings(max_examples=100, deadline=None)
@given(jobs_of_a_run, st.integers(20, 900), st.dictionaries(st.integers(0, 6), st.integers(1, 20), max_size=2), st.booleans())
def test_exactly_once_within_budget_in_batches_and_deterministic(drawn, budget, leave_at, in_order) -> None:
    batches, stayed = play(drawn, budget, leave_at, in_order)
    assert play(drawn, budget, leave_at, in_order)[0] == batches  # same flows, same micro-batches

    kinds = {f"j{n}": kind for n, (_, _, kind, _) in enumerate(drawn)}
    for batch in batches:
        assert 0 < batch.tokens == sum(row.tokens for row in batch.rows) <= batch.budget
        assert batch.budget == budget or (len(batch.rows) == 1 and batch.tokens == batch.budget > budget)  # a long sample is by itself
        assert {kinds[row.job_id] for row in batch.rows} == {batch.kind}
        owners = [row.job_id for row in batch.rows]
        assert len({*owners}) == 1 + sum(a != b for a, b in pairwise(owners))  # adjacent
        for name in {*owners}:
            samples = [row.sample for row in batch.rows if row.job_id == name]
            assert samples == sorted(samples)

    taken: dict[str, list[Row]] = defaultdict(list)
    for batch in batches:
        for row in batch.rows:
            taken[row.job_id].append(row)
    for each in stayed:
        rows = taken[each.flow.job_id]
        wanted = [Row(each.flow.job_id, item.sample, item.tokens) for items in each.offered for item in items]
        assert len(each.offered) == len(drawn[int(each.flow.job_id[1:])][0])  # every global batch had its turn
        assert sorted(rows, key=lambda row: row.sample) == wanted  # each sample once
        if in_order:
            assert rows == wanted
    turn_of = {(row.job_id, row.sample): turn for turn, batch in enumerate(batches) for row in batch.rows}
    for each in stayed:  # dependency: a global batch starts only after the last micro-batch of the one before has left
        turns = [[turn_of[each.flow.job_id, item.sample] for item in items] for items in each.offered]
        assert all(max(earlier) < min(later) for earlier, later in pairwise(turns))


def test_nothing_pending_is_no_micro_batch() -> None:
    assert pack([], 100, in_order=True) is None
    assert pack([Flow("a")], 100, in_order=True) is None


@BOTH_ORDERS
def test_a_sample_beyond_the_budget_is_a_micro_batch_by_itself_and_counts_in_full(in_order: bool) -> None:
    """One job has long samples in each batch, the other has none: both compute about as many tokens."""
    long, short = job("long", repeat([20, 400, 30] * 4)), job("short", repeat([25] * 60))
    batches = run([long, short], 100, 400, in_order=in_order)
    sizes = Counter(len(batch.rows) for batch in batches if batch.tokens > 100)
    assert set(sizes) == {1} and {batch.budget for batch in batches} == {100, 400}
    tokens = tokens_by_job(batches)
    assert 0.8 < tokens["long"] / tokens["short"] < 1.25, tokens


def test_equal_flows_are_served_in_the_order_in_which_they_joined() -> None:
    jobs = [job(name, iter([[10, 10]])) for name in ("z", "a", "m")]
    batch = pack([each.flow for each in jobs], 40, in_order=True)
    assert batch == MicroBatch("train", (Row("z", 0, 10), Row("z", 1, 10), Row("a", 0, 10), Row("a", 1, 10)), 40, 40)


# --- fair -----------------------------------------------------------------------------------------------------------


@BOTH_ORDERS
@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8), (0.5, 3, 1, 1, 10)])
def test_backlogged_flows_share_by_weight_within_a_sample_of_each(weights: tuple[float, ...], in_order: bool) -> None:
    jobs = [job(f"j{n}", endless(n, 4000, 60 * (n + 1)), weight) for n, weight in enumerate(weights)]
    budget = 8192
    tokens: Counter[str] = Counter()
    for _ in range(100):
        batch = pack([each.flow for each in jobs], budget, in_order=in_order)
        assert batch is not None
        tokens.update(tokens_by_job([batch]))
    assert all(each.flow.runnable and len(each.offered) == 1 for each in jobs)  # backlogged to the end
    served = [tokens[f"j{n}"] / weight for n, weight in enumerate(weights)]
    lightest = min(weights)
    assert max(served) - min(served) <= 2 * LONGEST / lightest  # start-time fair queueing: a sample of either flow
    assert sum(tokens.values()) >= 0.99 * 100 * budget


@BOTH_ORDERS
def test_ends_of_batches_cost_a_job_little_of_its_share(in_order: bool) -> None:
    jobs = [job(f"j{n}", endless(n, size, 150)) for n, size in enumerate((16, 32, 64, 256, 16, 32, 64, 256))]
    tokens = tokens_by_job(run(jobs, 8192, 400, in_order=in_order))
    fair = sum(tokens.values()) / len(jobs)
    shares = {name: count / fair for name, count in tokens.items()}
    assert all(0.85 < share < 1.15 for share in shares.values()), shares


@BOTH_ORDERS
@pytest.mark.parametrize("big_jobs", [1, 7, 40])
def test_a_tiny_batch_is_never_held_up_by_big_ones(big_jobs: int, in_order: bool) -> None:
    jobs = [job(f"big{n}", endless(n, 64, 200)) for n in range(big_jobs)]
    jobs.append(job("tiny", iter([[20, 30, 10, 25]] * 1000)))
    run(jobs, 8192, 3, in_order=in_order)
    batches = run(jobs, 8192, 100, in_order=in_order)
    waits = [n for n, batch in enumerate(batches) if any(row.job_id == "tiny" for row in batch.rows)]
    longest_wait = max(b - a for a, b in zip([-1, *waits], [*waits, len(batches)], strict=True))
    fair_tokens = 8192 * 100 / (big_jobs + 1)
    assert longest_wait == 1 if big_jobs < 40 else longest_wait <= 2, waits
    assert tokens_by_job(batches)["tiny"] >= min(0.9 * fair_tokens, 0.95 * 85 * 100)  # all it offers, or its share


@BOTH_ORDERS
def test_a_job_that_joins_late_is_served_at_once_and_shuts_nobody_out(in_order: bool) -> None:
    jobs = [job(f"old{n}", endless(n, 64, 200)) for n in range(5)]
    run(jobs, 8192, 200, in_order=in_order)
    jobs.append(job("new", endless(9, 64, 200)))
    batches = run(jobs, 8192, 60, in_order=in_order)
    assert any(row.job_id == "new" for row in batches[0].rows)
    tokens = tokens_by_job(batches)
    fair = sum(tokens.values()) / 6
    assert all(abs(count / fair - 1) < 0.15 for count in tokens.values()), tokens


@BOTH_ORDERS
def test_evaluation_stalls_nobody_and_is_not_stalled(in_order: bool) -> None:
    jobs = [job(f"train{n}", endless(n, 64, 200)) for n in range(7)]
    evaluation = job("train0", iter([next(endless(99, 400, 200))]), kind="eval")
    batches = run([*jobs, evaluation], 8192, 120, in_order=in_order)
    turns = [n for n, batch in enumerate(batches) if batch.kind == "eval"]
    assert evaluation.flow.complete
    assert all(b - a >= 5 for a, b in pairwise(turns)), turns  # its share is one eighth
    assert turns[0] <= 8


def test_what_only_filled_gaps_is_forgiven() -> None:
    """Two jobs of long samples of which one fits at a time; the third fills up, far beyond its share, which costs nobody."""
    rng = random.Random(0)
    long = [[4200] * 40 + [100] * 400, [4200] * 40 + [100] * 400]
    jobs = [job("a", iter(long[:1])), job("b", iter(long[1:])), job("filler", iter([[rng.randint(50, 150) for _ in range(20_000)]]))]
    batches = run(jobs, 8192, 80, in_order=True)
    assert min(batch.tokens for batch in batches) > 0.98 * 8192
    assert jobs[0].flow.pending[0].tokens == 100 == jobs[1].flow.pending[0].tokens
    later = run(jobs, 8192, 10, in_order=True)
    first = next(n for n, batch in enumerate(later) if any(row.job_id == "filler" for row in batch.rows))
    assert first <= 4


# --- full -----------------------------------------------------------------------------------------------------------


def mixed_jobs(count: int, seed: int) -> tuple[list[Job], int]:
    rng = random.Random(seed)
    shapes = [(rng.choice([4, 8, 16, 32]), rng.choice([60, 150, 300])) for _ in range(count)]
    jobs = [job(f"j{n}", endless(1000 * seed + n, *shape)) for n, shape in enumerate(shapes)]
    means = [size * statistics.mean(next(endless(n, 2000, median))) for n, (size, median) in enumerate(shapes)]
    return jobs, auto_token_budget(LONGEST, means, 8192)


@BOTH_ORDERS
@pytest.mark.parametrize("count", [4, 12])
def test_padding_is_at_most_2_percent_at_the_default_budget(count: int, in_order: bool) -> None:
    """Ends of batches included: all micro-batches, each in its prepared size."""
    for seed in range(3):
        jobs, budget = mixed_jobs(count, seed)
        batches = run(jobs, budget, 150, in_order=in_order)
        computed = [prepared_budget(batch.tokens, budget) for batch in batches]
        full = [batch.tokens for batch, size in zip(batches, computed, strict=True) if size == budget]
        assert 1 - sum(full) / (budget * len(full)) <= 0.02
        assert 1 - sum(batch.tokens for batch in batches) / sum(computed) <= 0.02
        assert sum(size > 0.75 * budget for size in computed) >= 0.85 * len(batches)


@BOTH_ORDERS
def test_equal_jobs_do_not_run_dry_together(in_order: bool) -> None:
    jobs = [job(f"j{n}", iter([[100] * 10] * 300)) for n in range(4)]  # in step, the third micro-batch would hold 200 tokens
    batches = run(jobs, 1900, 200, in_order=in_order)
    assert min(batch.tokens for batch in batches) == 1900


def test_out_of_order_filling_takes_a_later_sample_and_in_order_does_not() -> None:
    lengths = [[60, 50, 50, 41, 40]]
    free = pack([job("j", iter(lengths)).flow], 100, in_order=False)
    assert free is not None and free.rows == (Row("j", 0, 60), Row("j", 4, 40))
    strict = pack([job("j", iter(lengths)).flow], 100, in_order=True)
    assert strict is not None and strict.rows == (Row("j", 0, 60),)


@BOTH_ORDERS
@pytest.mark.parametrize("ahead", [{"b": 20.0, "c": 10.0}, {"b": 10.0, "c": 20.0}])
def test_a_gap_goes_to_the_flow_that_is_further_behind(ahead: dict[str, float], in_order: bool) -> None:
    jobs = [job("a", iter([[60, 60]])), job("b", iter([[40, 70]])), job("c", iter([[40, 70]])), job("long", iter([[50, 70]]))]
    enter_line([each.flow for each in jobs], 1000)
    for each in jobs:
        each.flow.virtual_time = {"a": 0.0, "long": 1.0, **ahead}[each.flow.job_id]
    batch = pack([each.flow for each in jobs], 100, in_order=in_order)  # a's 60 first; long's 50 does not fit
    assert batch is not None and {row.job_id for row in batch.rows} == {"a", min(ahead, key=ahead.__getitem__)}


def test_fair_picks_are_taken_back_when_that_fills_the_budget() -> None:
    """In order and one by one: 40 + 30 leaves 30 that nothing fits; without the second pick 40 + 60 is full."""
    jobs = [job("a", iter([[40, 90, 90]])), job("b", iter([[30, 35, 90]])), job("c", iter([[60, 90]]))]
    batch = pack([each.flow for each in jobs], 100, in_order=True)
    assert batch is not None and batch.rows == (Row("a", 0, 40), Row("c", 0, 60))


# --- bounded work ---------------------------------------------------------------------------------------------------


@BOTH_ORDERS
@pytest.mark.parametrize("lengths", ["short", "long", "equal"])
def test_the_search_for_a_full_micro_batch_is_bounded(lengths: str, in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal lengths that do not divide the budget are the worst case: every attempt to fill it fails."""
    looked_at: list[int] = []  # for each attempt: how many samples, or runs of samples, it tried
    add_best_fit, alternatives = packing._add_best_fit, packing._alternatives

    def counted_attempt(*args: Any) -> None:
        looked_at.append(0)
        add_best_fit(*args)

    def counted_alternatives(*args: Any) -> Any:
        found = alternatives(*args)
        looked_at[-1] += sum(map(len, found))
        return found

    monkeypatch.setattr(packing, "_add_best_fit", counted_attempt)
    monkeypatch.setattr(packing, "_alternatives", counted_alternatives)
    median = {"short": 50, "long": 300, "equal": 500}[lengths]
    jobs = [job(f"j{n}", repeat([500] * 256) if lengths == "equal" else endless(n, 256, median)) for n in range(64)]
    flows = [each.flow for each in jobs]
    for _ in range(60):
        looked_at.clear()
        batch = pack(flows, 8192, in_order=in_order)
        assert batch is not None
        assert len(looked_at) <= 2 + math.log2(len(batch.rows)), looked_at  # 1, 2, 4, ... picks are taken back
        assert max(looked_at) < packing._MOST_CHOICES + packing._CHOICES_PER_FLOW


# --- budgets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "expected"), [(8192, [*range(128, 8193, 128)]), (1000, [*range(64, 1000, 64), 1000])])
def test_the_prepared_sizes_are_few_and_the_smallest_that_holds(budget: int, expected: list[int]) -> None:
    sizes = sorted({prepared_budget(tokens, budget) for tokens in range(1, budget + 1)})
    assert sizes == expected
    assert all(prepared_budget(size, budget) == size for size in sizes)
    assert all(prepared_budget(size + 1, budget) == larger for size, larger in pairwise(sizes))


@given(st.integers(1, 100_000), st.data())
def test_a_prepared_size_holds_and_stays_within_the_budget(budget: int, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, budget))
    size = prepared_budget(tokens, budget)
    assert tokens <= size <= budget
    assert size % 16 == 0 or size == budget


def test_a_sample_longer_than_the_budget_has_a_size_of_its_own() -> None:
    assert [prepared_budget(tokens, 100) for tokens in (101, 128, 129, 16_300)] == [128, 128, 256, 16_384]
    with pytest.raises(AssertionError, match="a micro-batch of 0 tokens"):
        prepared_budget(0, 100)


def test_the_default_budget_can_be_filled_by_the_others() -> None:
    assert auto_token_budget(300, [3000.0] * 4, 8192) == 6000 // 128 * 128
    assert auto_token_budget(300, [3000.0] * 8, 8192) == 8192  # the cap
    assert auto_token_budget(300, [3000.0] * 8, 8000) == 8000 // 128 * 128
    assert auto_token_budget(300, [100.0] * 7, 8192) == 384  # the longest sample
    assert auto_token_budget(300, [100.0, 100.0, 100.0, 24_000.0], 8192) == 2000 // 128 * 128  # a twelfth of the largest
    assert auto_token_budget(300, [2000.0], 8192) == 2048  # alone: its whole batch
    assert auto_token_budget(300, [2000.0], 8192, spreads=[400.0]) == 3200  # and nearly all that are larger
    assert auto_token_budget(300, [2000.0, 2100.0], 8192, spreads=[400.0, 100.0]) == 3200
    assert auto_token_budget(300, [], 8192) == 384


def test_a_budget_that_need_not_be_filled_holds_the_batches_of_all_jobs() -> None:
    assert auto_token_budget(300, [1000.0, 2000.0, 600.0, 700.0], 8192, filled=False) == 4352
    assert auto_token_budget(300, [1000.0, 2000.0], 8192, filled=False) == 3072
    assert auto_token_budget(300, [1000.0, 2000.0], 8192, filled=False, spreads=[300.0, 400.0]) == 4608  # 3,000 and three times 500
    assert auto_token_budget(300, [3000.0] * 4, 8192, filled=False) == 8192  # the cap
    assert auto_token_budget(300, [], 8192, filled=False) == 384  # the longest sample


@given(st.integers(1, 5000), st.lists(st.floats(1, 1e6), max_size=12), st.integers(1, 100_000), st.booleans())
def test_the_default_budget_holds_the_longest_sample(longest: int, batches: list[float], cap: int, filled: bool) -> None:
    budget = auto_token_budget(longest, batches, cap, filled=filled)
    assert budget % 128 == 0 and budget >= longest
    assert budget <= cap or budget < longest + 128


# --- over several stages ----------------------------------------------------------------------------------------------


def test_with_stages_a_batch_that_has_begun_is_finished_first():
    short, long = Flow("short"), Flow("long")
    short.offer([Item(k, 10) for k in range(4)])
    long.offer([Item(k, 10) for k in range(8)])
    made = [pack([short, long], 20, in_order=True, stages=2) for _ in range(6)]
    assert [Counter(row.job_id for row in batch.rows) for batch in made if batch] == [{"short": 2}] * 2 + [{"long": 2}] * 4


def test_with_stages_of_begun_batches_the_one_with_less_left_goes_first():
    nearly, far = Flow("nearly"), Flow("far")
    far.offer([Item(k, 10) for k in range(8)])
    nearly.offer([Item(k, 10) for k in range(4)])
    far.take(0), nearly.take(0)
    batch = pack([far, nearly], 30, in_order=True, stages=4)
    assert batch is not None and {row.job_id for row in batch.rows} == {"nearly"}


def tokens_over_stages(jobs: list[Job], budget: int, count: int, *, stages: int, latency: int) -> Counter[str]:
    """A batch leaves when `latency` more micro-batches have been packed."""
    made: list[MicroBatch | None] = []
    for _ in range(count):
        made.append(pack([each.flow for each in jobs], budget, in_order=False, stages=stages))
        in_flight = {row.job_id for batch in made[-latency:] if batch for row in batch.rows}
        for each in jobs:
            if each.flow.complete and each.flow.job_id not in in_flight:
                each.offer()
    return tokens_by_job([batch for batch in made if batch])


def test_with_stages_equal_jobs_still_get_equal_shares():
    tokens = tokens_over_stages([job(f"job{n}", endless(n, 8, 100)) for n in range(4)], 1024, 1500, stages=3, latency=3)
    assert max(tokens.values()) <= 1.1 * min(tokens.values())


def test_with_stages_a_small_batch_does_not_wait_for_large_ones():
    sizes = {"small": 2, "large": 32, "larger": 32, "largest": 32}
    shares: list[float] = []
    for stages in (1, 3):
        jobs = [job(name, endless(n, size, 100)) for n, (name, size) in enumerate(sizes.items())]
        tokens = tokens_over_stages(jobs, 1024, 600, stages=stages, latency=3)
        shares.append(tokens["small"] / tokens.total())
    assert shares[1] >= 0.8 * shares[0]


@BOTH_ORDERS
def test_with_stages_a_long_sample_is_a_micro_batch_by_itself(in_order: bool):
    flow, other = Flow("long"), Flow("short")
    flow.offer([Item(0, 50)])
    other.offer([Item(0, 10)])
    made = [pack([flow, other], 30, in_order=in_order, stages=2) for _ in range(2)]
    assert [(batch.tokens, batch.budget) for batch in made if batch] == [(50, 50), (10, 30)]
