"""`check` tells every problem that can be known, also when the base model itself is missing."""

from __future__ import annotations

from pathlib import Path

from tests.engine.tiny_runs import job, run_spec, train
from tlora.engine.check import check
from tlora.engine.progress import Watcher
from tlora.job import JobSpec, RunSpec


def test_a_missing_base_hides_no_missing_file(data: Path) -> None:
    jobs = [JobSpec(name=name, data={"path": str(data / file)}) for name, file in (("here", "a.jsonl"), ("gone", "none.jsonl"))]  # type: ignore[arg-type]
    found = check(RunSpec(base_model="/no/such/base", jobs=jobs), device="cpu")
    assert len(found.problems) == 1 and "/no/such/base" in found.problems[0]
    here, gone = found.jobs
    assert here.problems == () and len(gone.problems) == 1 and "none.jsonl" in gone.problems[0]


def test_a_budget_below_the_longest_sample_is_raised_and_said(base: Path, data: Path, tmp_path: Path) -> None:
    """Once, by `check` and by `train`, with the job whose sample it is; a budget that fits is nothing to speak of."""
    jobs = [job("short", str(data / "b.jsonl")), job("long", str(data / "c.jsonl"), max_steps=1)]
    found = check(run_spec(base, tmp_path / "out", jobs, token_budget=16), device="cpu")
    (warning,) = found.warnings
    assert found.token_budget > 16 and f"token_budget 16 is raised to {found.token_budget}: long has a sample of so many tokens" in warning
    notes: list[str] = []
    assert train(base, tmp_path / "out", jobs, token_budget=16, watcher=Watcher(note=notes.append)).status == "done"
    assert notes.count(warning) == 1
    enough = check(run_spec(base, tmp_path / "out", jobs, token_budget=found.token_budget), device="cpu")
    assert enough.warnings == () and enough.token_budget == found.token_budget


def test_the_file_of_the_evaluation_is_reported(base: Path, data: Path, tmp_path: Path) -> None:
    own = {"path": str(data / "a.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    both, split = check(
        run_spec(base, tmp_path, [job("both", own), job("split", {"path": own["path"], "eval_size": 3})]), device="cpu"
    ).jobs
    assert both.data and both.eval_data and (both.data.rows, both.eval_data.rows) == (24, 7)
    assert both.eval_data.files == [own["eval_path"]] and split.eval_data is None
