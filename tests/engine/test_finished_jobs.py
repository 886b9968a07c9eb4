"""A job that is done stays done at a resume, whatever became of its data, its checkpoints or its order's length; and what is said of the
others.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cases import in_every_run
from tests.engine.tiny_runs import light_job as job
from tests.engine.tiny_runs import rows, same_bytes, sha256, train, write_rows
from tlora.data.prepare import prepare
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.planning import job_plan
from tlora.store.job_result import read_result, write_result


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data file that a test may change, and that each run looks at."""
    monkeypatch.setattr(job_plan, "prepare", prepare)
    return write_rows(tmp_path / "own.jsonl", 16)


def resume(base: Path, out: Path, jobs: list[dict[str, Any]], **settings: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    return train(base, out, jobs, resume=True, watcher=Watcher(note=lines.append), **settings), lines


def kept(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("change", "length", "deterministic"),
    [
        ("gone", {}, False),
        pytest.param("gone", {"max_steps": None, "num_train_epochs": 2}, True, marks=pytest.mark.slow),
        pytest.param("grown", {"max_steps": None, "num_train_epochs": 2}, False, marks=pytest.mark.slow),
        pytest.param("grown", {}, True, marks=pytest.mark.slow),
        ("shrunk", {"max_steps": None, "num_train_epochs": 2}, False),
    ],
)
def test_a_finished_job_stays_done_whatever_became_of_its_data(
    base: Path, data: Path, own: Path, tmp_path: Path, change: str, length: dict[str, Any], deterministic: bool
) -> None:
    out, order = tmp_path / "out", job("a", str(own), **length)
    first = train(base, out, [order], deterministic=deterministic)["a"]
    before = kept(out / "a")
    lines = own.read_text().splitlines(keepends=True)
    if change == "gone":
        own.unlink()
    else:
        own.write_text("".join(lines * 2 if change == "grown" else lines[:4]))
    results, said = resume(base, out, [order, job("b", str(data / "b.jsonl"))], deterministic=deterministic)
    assert results["a"] == first and results["b"].status == "done" and results.status == "done"
    assert kept(out / "a") == before
    assert "a: done before, and not trained again" in said
    assert "b: nothing to resume: begins at step 0 (not a job of the earlier run)" in said
    assert json.loads((out / "run.json").read_text())["status"] == "done"


def test_a_finished_run_is_done_at_once_and_its_jobs_are_shown(base: Path, data: Path, own: Path, tmp_path: Path) -> None:
    """Nothing is tokenized and no base loaded: its weights may be away by then."""
    out, jobs = tmp_path / "out", [job("a", str(own)), job("b", str(data / "b.jsonl"), adapter_path=None)]
    first = train(base, out, jobs)
    facts = json.loads((out / "run.json").read_text())
    own.unlink()
    results, said = resume(base, out, jobs)
    assert dict(results) == dict(first) and results.report is not None and "a, b: done before, and not trained again" in said
    after = json.loads((out / "run.json").read_text())
    assert after == facts | {"versions": after["versions"]}
    assert not any("token budget" in line for line in said)


def test_results_of_a_run_that_was_moved_name_where_it_is(base: Path, data: Path, tmp_path: Path) -> None:
    """Also where the directory is named from another current directory, and what a job could not begin with has no path."""
    out, moved, jobs = tmp_path / "out", tmp_path / "moved", [job("a", str(data / "a.jsonl"))]
    first = train(base, out, jobs)["a"]
    assert first.path == str(out / "a")
    out.rename(moved)
    results, _ = resume(base, moved, jobs)
    assert dict(results) == {"a": replace(first, path=str(moved / "a"))}
    assert read_result(moved / "a") == results["a"]
    write_result(moved / "a", replace(first, path=""), print)
    assert read_result(moved / "a") == replace(first, path="")


def test_more_steps_without_the_data_fail_and_keep_the_earlier_result(base: Path, data: Path, own: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = train(base, out, [job("a", str(own))])["a"]
    before = kept(out / "a")
    rows_of_it = own.read_text()
    own.unlink()
    results, _ = resume(base, out, [job("a", str(own), max_steps=9)])
    assert results["a"].status == "failed" and results.status == "failed"
    assert "own.jsonl" in results["a"].reason and "What it came to before stays: 6 steps" in results["a"].reason
    assert (results["a"].steps, results["a"].train_loss) == (first.steps, first.train_loss)
    assert kept(out / "a") == before
    own.write_text(rows_of_it)
    assert resume(base, out, [job("a", str(own), max_steps=9)])[0]["a"].steps == 9, "and goes on where the data is back"


def test_more_steps_go_on_and_fewer_epochs_or_steps_of_the_same_number_do_not(base: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(base, out, [job("a", str(data / "a.jsonl"), max_steps=None, num_train_epochs=1)])  # 24 rows, 6 steps
    assert "a: done before, and not trained again" in resume(base, out, [job("a", str(data / "a.jsonl"), max_steps=6)])[1]
    results, said = resume(base, out, [job("a", str(data / "a.jsonl"), max_steps=None, num_train_epochs=2)])
    assert results["a"].steps == 12 and not any("done before" in line for line in said)
    assert [row["step"] for row in rows(out / "a" / "metrics.jsonl")] == list(range(1, 13))


def test_a_finished_job_without_checkpoints_is_not_trained_over(base: Path, data: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "out", str(data / "a.jsonl")
    first = train(base, out, [job("a", path)])["a"]
    shutil.rmtree(out / "a" / "checkpoint-6")
    before = kept(out / "a")
    assert resume(base, out, [job("a", path)])[0]["a"] == first
    longer = resume(base, out, [job("a", path, max_steps=9)])[0]["a"]
    assert longer.status == "failed" and "a finished job without a whole checkpoint" in longer.reason
    with pytest.raises(ConfigError, match=r"a: learning_rate was 0.01 and is 0.5"):
        resume(base, out, [job("a", path, learning_rate=0.5)])
    assert kept(out / "a") == before
    shutil.move(out / "a", tmp_path / "aside")  # the remedy that the error names
    assert resume(base, out, [job("a", path, max_steps=9)])[0]["a"].steps == 9


def test_a_finished_job_that_started_from_an_adapter_stays_done(base: Path, data: Path, own: Path, tmp_path: Path) -> None:
    """Its written order has that adapter's shape, and the adapter may be gone."""
    train(base, tmp_path / "start", [job("s", str(data / "b.jsonl"), r=8, max_steps=1)])
    start = shutil.copytree(tmp_path / "start" / "s", tmp_path / "adapter")
    order = {**job("a", str(own), adapter_path=str(start)), "r": 4}
    first = train(base, tmp_path / "out", [order])["a"]
    own.unlink()
    shutil.rmtree(start)
    results, _ = resume(base, tmp_path / "out", [order, job("b", str(data / "b.jsonl"))])
    assert results["a"] == first and results.status == "done"


def test_a_misspelt_new_and_left_out_name_is_said(base: Path, data: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "out", str(data / "b.jsonl")
    train(base, out, [job("colours", path, max_steps=1), job("shapes", path, max_steps=1)])
    before = kept(out / "colours")
    _, said = resume(base, out, [job("colors", path, max_steps=1), job("shapes", path, max_steps=1)])
    begins = "colors: nothing to resume: begins at step 0 (not a job of the earlier run)"
    assert f"{begins}. The earlier run has a job 'colours', which is left out now: is this its name misspelt?" in said
    assert f"colours: in {out}, but not in the jobs file: left out, and kept as before" in said
    assert kept(out / "colours") == before


def test_a_job_whose_checkpoints_are_all_damaged_is_said_to_begin_anew(base: Path, data: Path, tmp_path: Path) -> None:
    out, order = tmp_path / "out", job("a", str(data / "a.jsonl"))
    first = train(base, out, [order], deterministic=True)["a"]
    whole = shutil.copytree(out, tmp_path / "whole")
    (out / "a" / "result.json").unlink()  # interrupted in its last save
    (out / "a" / "checkpoint-6" / "optimizer.safetensors").write_bytes(b"")
    results, said = resume(base, out, [order], deterministic=True)
    assert results["a"].steps == first.steps and "a: no whole checkpoint is left: begins at step 0" in said
    same_bytes(out, whole, ["a"])


def test_a_kill_between_order_and_result_leaves_no_result_of_the_shorter_order(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With epochs the number of steps does not stand in the order: a result of one epoch must not pass for one of two."""
    out, path = tmp_path / "out", str(data / "a.jsonl")
    train(base, out, [job("a", path, max_steps=None, num_train_epochs=1)], deterministic=True)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    longer = job("a", path, max_steps=None, num_train_epochs=2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tlora.engine.driver.Recorder", killed)
        train(base, out, [longer], deterministic=True, resume=True)
    assert resume(base, out, [longer], deterministic=True)[0]["a"].steps == 12
    whole = train(base, tmp_path / "whole", [longer], deterministic=True)
    assert whole["a"].steps == 12 and sha256(out / "a") != ""


@pytest.mark.parametrize("foreign", in_every_run([{"r": 8}, {"data": "b.jsonl"}], 1), ids=["another shape", "other data"])
def test_a_checkpoint_of_another_job_in_the_newest_place_is_set_aside(
    base: Path, data: Path, tmp_path: Path, foreign: dict[str, Any]
) -> None:
    out, path = tmp_path / "out", str(data / "a.jsonl")
    train(base, out, [job("a", path, max_steps=4)], deterministic=True)
    other = job("o", str(data / foreign.get("data", "a.jsonl")), max_steps=9, r=foreign.get("r", 4))
    train(base, tmp_path / "other", [other], deterministic=True)
    shutil.copytree(tmp_path / "other" / "o" / "checkpoint-9", out / "a" / "checkpoint-9")
    results, said = resume(base, out, [job("a", path, max_steps=10)], deterministic=True)
    assert results["a"].steps == 10 and any("checkpoint-9 is not this job's, and set aside as bad-checkpoint-9" in line for line in said)
    assert f"a: goes on from {out / 'a' / 'checkpoint-4'}" in said
    assert [row["step"] for row in rows(out / "a" / "metrics.jsonl")] == list(range(1, 11))


def test_a_resume_removes_what_a_kill_left_in_the_directory_of_a_finished_job(base: Path, data: Path, tmp_path: Path) -> None:
    """On a full disk checkpoints of finished jobs are removed: renamed first, and then emptied."""
    out, order = tmp_path / "out", job("a", str(data / "b.jsonl"))
    train(base, out, [order])
    before = kept(out)
    for name in "01":
        (out / "a" / f"tmp-{name * 32}").mkdir()
    (out / "a" / f"tmp-{'0' * 32}" / "state.safetensors").write_bytes(b"half of it")
    resume(base, out, [order])
    assert kept(out / "a").keys() == {name.removeprefix("a/") for name in before if name.startswith("a/")}
    assert not list((out / "a").glob("tmp-*"))
