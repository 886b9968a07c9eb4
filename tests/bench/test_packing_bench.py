"""The solver, its bounds and the model of a pipeline, against what is known by hand or by trying all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import packing
from bench.exact_packing import fewest_bins, first_fit_decreasing, most_tokens, pack_exactly
from bench.length_mixes import LengthJob, drawn_job, offered, real_jobs
from bench.pipeline_model import Groups, head_tail_groups
from tlora.batching.pipeline_model import Entry, EntryOrder, Pipeline, Stream


def _fewest(lengths: Sequence[int], budget: int) -> int:
    """By trying each place of each sample."""
    best = len(lengths)
    for places in itertools.product(range(len(lengths)), repeat=len(lengths)):
        sums = [sum(n for n, at in zip(lengths, places, strict=True) if at == bin) for bin in range(len(lengths))]
        if all(total <= budget for total in sums):
            best = min(best, len(set(places)))
    return best


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_the_solver_finds_the_fewest_and_no_bound_is_above_them(lengths: list[int]) -> None:
    fewest = _fewest(lengths, 30)
    bins, least = pack_exactly(lengths, 30, 5.0)
    assert len(bins) == least == fewest and fewest_bins(lengths, 30) <= fewest <= len(first_fit_decreasing(lengths, 30))
    assert sorted(itertools.chain(*bins)) == list(range(len(lengths)))
    assert all(sum(lengths[at] for at in bin) <= 30 for bin in bins)


def test_a_longer_sample_is_a_bin_by_itself() -> None:
    assert fewest_bins([50, 10, 20], 30) == 2
    bins, least = pack_exactly([50, 10, 20], 30, 5.0)
    assert sorted(sorted(bin) for bin in bins) == [[0], [1, 2]] and least == 2


def test_the_next_batch_waits_for_the_one_before() -> None:
    one_job = [[[10], [10], [10]]]
    found = most_tokens(one_job, 30, 2, 5.0)
    assert found.value == pytest.approx(20) and found.bound == pytest.approx(20)  # without the rule all 30 would share one
    two_jobs = [[[10], [10]], [[20], [20]]]
    assert most_tokens(two_jobs, 30, 2, 5.0).value == pytest.approx(60)


def _equal(count: int, batch_size: int) -> list[LengthJob]:
    return [LengthJob(f"job{n}", np.full(64, 100, np.int64), batch_size) for n in range(count)]


@pytest.mark.parametrize("order", ["stream", "groups"])
def test_enough_jobs_leave_none(order: str) -> None:
    jobs = _equal(6, 4)
    made: EntryOrder = Stream(offered(jobs), 100, 2) if order == "stream" else Groups(jobs, 100, flush=False)
    through = Pipeline(made, lambda _: 1.0, 2).run(400, 20)
    assert through.waited_seconds == 0 and through.stalls == 0 and through.seconds == pytest.approx(380 / 2)


def test_a_flush_waits_at_each_step() -> None:
    jobs = _equal(4, 2)
    through = Pipeline(Groups(jobs, 100, flush=True), lambda _: 1.0, 4).run(400, 16)
    assert through.waited_seconds / through.seconds == pytest.approx(3 / (8 + 3), abs=0.01)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("flush", [None, False, True])
def test_no_order_breaks_the_rule(stages: int, flush: bool | None) -> None:
    jobs = [drawn_job(f"job{n}", 60 + 90 * n, 0.8, 900, 3 + n) for n in range(5)]
    order: EntryOrder = Stream(offered(jobs), 512, stages) if flush is None else Groups(jobs, 512, flush=flush)
    flight: list[Entry] = []

    class Watched:
        def next(self) -> Entry | None:
            entry = order.next()
            if entry is not None:
                assert all(own.batches.get(name, batch) == batch for own in flight for name, batch in entry.batches.items())
                flight.append(entry)
            return entry

        def retire(self, entry: Entry) -> None:
            flight.remove(entry)
            order.retire(entry)

    assert Pipeline(Watched(), lambda entry: 0.1 + entry.tokens, stages).run(200, 5).micro_batches == 195


def test_groups_pair_the_shortest_with_the_longest() -> None:
    jobs = [drawn_job(f"job{mean}", mean, 0.1, 4096, 2) for mean in (800, 100, 400, 200, 1600)]
    assert [[job.name for job in group] for group in head_tail_groups(jobs)] == [["job100", "job1600"], ["job200", "job800"], ["job400"]]


def test_the_program_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [drawn_job("short", 80, 0.6, 512, 4), drawn_job("long", 300, 0.8, 1024, 4)]
    monkeypatch.setattr(packing, "mixes", lambda: {"drawn": jobs})
    file = tmp_path / "packing.json"
    packing.main(["--budgets", "512", "--micro-batches", "30", "--windows", "1", "--rounds", "2", "--commit", "abc", "--json", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["stream"]["fewest_possible"] <= row["stream"]["micro_batches"] == 30
    assert row["stream"]["most_gain"] >= 0 and row["windows"]["solver_gain"] <= row["windows"]["most_gain"] + 1e-9
    assert set(row["stages"]["4"]) == {"stream", "fair", "groups", "flush"}
    assert "at most" in capsys.readouterr().out


def test_real_jobs_are_those_of_the_jobs_file() -> None:
    found = real_jobs()
    assert len(found) == 8 and all(job.lengths.min() > 0 and job.lengths.max() <= 2048 for job in found)
