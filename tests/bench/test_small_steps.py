"""The jobs of `--work small-steps`: equal work, adapters as of the shape's real jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from bench import real_jobs, small_steps


@pytest.mark.parametrize("shape", ["tiny", "tiny-qwen3-moe"])
def test_each_job_has_the_same_tokens_a_step_and_enough_samples(shape: str, tmp_path: Path):
    defaults = yaml.safe_load(real_jobs.jobs_file_of(shape).read_text())["defaults"]
    path, facts = small_steps.write_jobs(real_jobs.jobs_file_of(shape), 3, 500, tmp_path)
    content = yaml.safe_load(path.read_text())
    assert content["defaults"] == defaults and len(content["jobs"]) == len(facts) == 8
    for job in content["jobs"]:
        rows = [json.loads(line)["input_ids"] for line in Path(job["data"]).read_text().splitlines()]
        assert len(rows) == 3 * job["batch_size"] and max(map(max, rows)) < 500
        assert {job["batch_size"] * len(row) for row in rows} == {facts[job["name"]]["tokens_a_step"]} == {1024}


def test_one_of_them_can_be_asked_for(tmp_path: Path):
    options = real_jobs.read_options(["--shape", "tiny", "--work", "small-steps", "--jobs", "1", "--steps", "2"])
    path, facts = real_jobs._jobs_file(options, tmp_path)
    (job,) = yaml.safe_load(path.read_text())["jobs"]
    assert job["name"] == "small-0" and Path(job["data"]).is_file() and facts["jobs_file"] == "small-steps.yaml"
    with pytest.raises(SystemExit):
        real_jobs.read_options(["--shape", "tiny", "--work", "small-steps", "--jobs", "small-1"])
