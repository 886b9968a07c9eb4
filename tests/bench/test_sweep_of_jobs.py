"""The simulated sweep: times hang together, and the same arguments give the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import sweep_of_jobs
from tlora.shape.hardware import cost_model


@pytest.mark.soak
def test_one_after_another_takes_as_long_as_the_jobs_of_a_gpu_and_together_is_faster_where_steps_are_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, all_means = [tmp_path / "first.json", tmp_path / "second.json"], sweep_of_jobs.MEAN_TOKENS[1::2]
    for file, means in zip(files, (all_means, all_means[:1]), strict=True):
        monkeypatch.setattr(sweep_of_jobs, "MEAN_TOKENS", means)
        sweep_of_jobs.main(["--steps", "2000", "--commit", "abc", "--json", str(file)])
    first, again = [json.loads(file.read_text()) for file in files]
    assert len(first["rows"]) == 3 * len(all_means) and len(again["rows"]) == 3
    assert all(row in first["rows"] for row in again["rows"]), "the same numbers again"
    for row in first["rows"]:
        steps = 2000 * cost_model("h200-from-128", "peft").alone_step_seconds(row["base"], 4.0 * row["mean_tokens"], 1)
        alone, together = (row["ways"][name] for name in ("one after another, PEFT", "together, no bound"))
        starts = alone["makespan_seconds"] - sweep_of_jobs.JOBS / sweep_of_jobs.GPUS * steps
        assert 8 * 9.0 <= starts <= 8 * 36.0, "eight jobs on each GPU, each with a start"
        ours = 2000 * cost_model("h200-from-128", "tlora").alone_step_seconds(row["base"], 4.0 * row["mean_tokens"], 1)
        found = row["ways"]["one after another, ours"]["makespan_seconds"]
        assert found == pytest.approx(8 * ours + 35.4 + 7 * 2.0), "one start for all, and seven joins"
        assert alone["times_as_fast"] == 1.0 and together["times_as_fast"] > 1.0 and together["shared_gpu_share"] > 0.5
        assert row["ways"]["one after another, ours"]["shared_gpu_share"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("base", "mean_tokens"), [("llama-3-8b", 128), ("qwen3-1.7b", 256), ("qwen3-1.7b", 512), ("qwen3-0.6b", 512)])
def test_a_wider_bound_is_no_slower_though_jobs_of_full_groups_end_in_the_same_moment(base: str, mean_tokens: int) -> None:
    """Those who waited crowd where the first places came free, and part when the other GPUs do. In place they would take a tenth longer."""
    ways = sweep_of_jobs.compared("h200-from-128", base, mean_tokens, 10_000)["ways"]
    assert ways["together, bound 4"]["makespan_seconds"] < 1.02 * ways["together, bound 2"]["makespan_seconds"]
