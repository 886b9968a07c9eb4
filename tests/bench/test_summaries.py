"""Jobs in LoRAFusion's setting have the lengths that they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from bench import real_jobs, summaries


@pytest.mark.parametrize("work", summaries.WORKS)
def test_a_work_has_a_sample_for_each_step(work: str, tmp_path: Path) -> None:
    path, facts = summaries.write_jobs(work, 3, 500, tmp_path)
    content = yaml.safe_load(path.read_text())
    assert len(content["jobs"]) == 4 and content["defaults"]["lora_dropout"] == 0.1
    for job in content["jobs"]:
        rows = [json.loads(line)["input_ids"] for line in Path(job["data"]).read_text().splitlines()]
        assert len(rows) >= 24 and facts[job["name"]]["mean_tokens"] == pytest.approx(np.mean([len(row) for row in rows]))
        assert all(3 <= token < 500 for row in rows for token in row) and max(map(len, rows)) <= 4096


@pytest.mark.parametrize(("name", "tokens"), [("xsum", 500), ("cnn-dailymail", 921), ("wikisum", 1579)])
def test_lengths_have_the_published_means(name: str, tokens: int) -> None:
    drawn = summaries.SETS[name].draw(20_000, np.random.default_rng(1))
    assert np.mean(drawn) == pytest.approx(tokens, rel=0.03)  # cut at 4,096


def test_such_jobs_are_not_chosen_from() -> None:
    with pytest.raises(SystemExit):
        real_jobs.read_options(["--work", "xsum", "--jobs", "alpaca"])
