"""What an owner knows of its jobs: where each one is, or was last."""

from __future__ import annotations

from tests.engine.tiny_runs import job
from tlora.engine.ranks.books import Books
from tlora.job import RunSpec
from tlora.store.job_result import JobResult


def test_a_job_that_ends_before_its_new_gpu_has_shown_it_was_there() -> None:
    books = Books(RunSpec.model_validate({"base_model": "base", "jobs": [job("one", "rows.jsonl")]}))
    books.begin(0, "one")
    books.lose(0)
    assert books.homes == {}
    books.end(2, JobResult("one", "done", steps=3, total_steps=3))
    assert books.homes == {"one": 2}
