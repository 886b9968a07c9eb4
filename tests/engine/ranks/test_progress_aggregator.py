"""What an owner knows of its jobs: where each one is, or was last."""

from __future__ import annotations

from tests.engine.tiny_runs import job
from tlora.engine.ranks.progress_aggregator import ProgressAggregator
from tlora.job import RunSpec
from tlora.store.job_result import JobResult


def test_a_job_that_ends_before_its_new_gpu_has_shown_it_was_there() -> None:
    aggregator = ProgressAggregator(RunSpec.model_validate({"base_model": "base", "jobs": [job("one", "rows.jsonl")]}))
    aggregator.begin(0, "one")
    aggregator.lose(0)
    assert aggregator.homes == {}
    aggregator.end(2, JobResult("one", "done", steps=3, total_steps=3))
    assert aggregator.homes == {"one": 2}
