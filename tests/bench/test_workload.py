"""The jobs that are measured are the ones asked for, and every system sees the same samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.workload import Job, Order, describe, make_jobs
from tlora.group.job_run import JobRun


def test_a_batch_holds_the_samples_that_the_engine_takes(tmp_path: Path):
    (job,) = make_jobs(Order(1, (4,), 3, 16), 100, None, tmp_path)
    run = JobRun(job.spec, job.data, None)
    run.progress = replace(run.progress, step=2)
    run.offer()
    offered = [job.data[item.sample].input_ids.tolist() for item in run.flow.pending]
    assert offered == [sample.input_ids.tolist() for sample in job.batch(2)]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    long = [{"instruction": f"Say the number {i} aloud", "input": "", "output": "so it is said, " * 20} for i in range(12)]
    (directory / "a.json").write_text(json.dumps(long))
    short = [{"text": f"number {i}"} for i in range(12)]
    (directory / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in short))
    (directory / "README.md").write_text("no data")
    return directory


@pytest.mark.slow
def test_real_jobs_take_the_files_in_turn_and_share_by_their_tokens(texts: Path, tmp_path: Path):
    jobs = make_jobs(Order(3, (4,), 2, "real", 64), 400, texts, tmp_path)
    assert [row["data"] for row in describe(jobs)] == ["a.json", "b.jsonl", "a.json"]
    tokens = [int(job.data.lengths.sum()) for job in jobs]
    assert tokens[0] > 2 * tokens[1], "the files do not differ enough to tell anything"
    assert [job.spec.weight for job in jobs] == pytest.approx([3 * n / sum(tokens) for n in tokens])
    assert max(int(job.data.lengths.max()) for job in jobs) <= 64
    assert all(sample.loss_weights[1:].any() for job in jobs for sample in job.batch(0))
    assert not _sample_of(jobs[0]).loss_weights[0], "a prompt is trained"


def _sample_of(job: Job):
    return job.batch(0)[0]
