"""`--overwrite` removes what an earlier run wrote, keeps all other files and says so, and follows no link."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.engine.tiny_runs import job, train
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.wording.card_seal import CARD_FILE


@pytest.fixture(scope="module")
def earlier(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two jobs with all that a run can leave: several checkpoints, a damaged one, a tracker's, leftovers of a kill."""
    out = tmp_path_factory.mktemp("earlier") / "out"
    jobs = [job(name, str(data / "b.jsonl"), max_steps=3, save_steps=1, save_total_limit=None) for name in ("old", "same")]
    assert train(base, out, jobs).status == "done"
    for name in ("old", "same"):  # as torch's SummaryWriter names it
        (out / name / "tensorboard").mkdir()
        (out / name / "tensorboard" / "events.out.tfevents.1700000000.host.17.0").write_text("")
    shutil.copytree(out / "old" / "checkpoint-1", out / "old" / "bad-checkpoint-1")
    shutil.copytree(out / "old" / "checkpoint-1", out / "old" / f"tmp-{'0' * 32}")
    (out / f"tmp-{'1' * 32}").write_text("the reserve of a killed run")
    return out


@pytest.fixture
def out(earlier: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(earlier, tmp_path / "out"))


def test_nothing_of_the_earlier_run_is_left(base: Path, data: Path, out: Path) -> None:
    lines: list[str] = []
    assert train(base, out, [job("new", str(data / "b.jsonl"))], overwrite=True, watcher=Watcher(note=lines.append)).status == "done"
    assert {path.name for path in out.iterdir()} == {"new", "run.json", "run.jsonl", "report.html"}
    assert not any("--overwrite" in line for line in lines)


def test_foreign_files_stay_and_are_named_in_one_line(base: Path, data: Path, out: Path) -> None:
    foreign = {
        "thesis.tex": "thesis.tex",
        "plots/loss.png": "plots/loss.png",
        "old/notes.md": "old/notes.md",
        "old/checkpoint-2/scores.csv": "old/kept-checkpoint-2/scores.csv",
        "same/tensorboard/mine.txt": "same/tensorboard/mine.txt",
        "same/checkpoint-1/eval/scores.csv": "same/kept-checkpoint-1/eval/scores.csv",
    }
    for name in foreign:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(name)
    (out / "old" / CARD_FILE).write_text((out / "old" / CARD_FILE).read_text() + "It speaks like a pirate.\n")
    lines: list[str] = []
    jobs = [job("same", str(data / "b.jsonl"), max_steps=4, save_steps=1, save_total_limit=1)]
    assert train(base, out, jobs, overwrite=True, watcher=Watcher(note=lines.append)).status == "done"
    for name, now in foreign.items():
        assert (out / now).read_text() == name
    assert {path.name for path in (out / "old").rglob("*") if path.is_file()} == {"notes.md", CARD_FILE, "scores.csv"}
    assert "pirate" in (out / "old" / CARD_FILE).read_text()
    assert [path.name for path in (out / "same").glob("checkpoint-*")] == ["checkpoint-4"]
    (said,) = [line for line in lines if "--overwrite" in line]
    assert said == (
        f"--overwrite kept what tlora did not write: old/{CARD_FILE}, old/kept-checkpoint-2/scores.csv, old/notes.md, plots, "
        "same/kept-checkpoint-1/eval/scores.csv and 2 more"
    )


def test_a_model_card_that_nobody_edited_is_written_anew(base: Path, data: Path, out: Path) -> None:
    before = (out / "same" / CARD_FILE).read_text()
    train(base, out, [job("same", str(data / "b.jsonl"), max_steps=1)], overwrite=True)
    after = (out / "same" / CARD_FILE).read_text()
    assert "| steps | 3 |" in before and "| steps | 1 |" in after


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("link", ["old", "same/checkpoint-2", "same/tensorboard", "same/metrics.jsonl", "same/checkpoint-2/state.json"])
def test_a_link_that_leads_elsewhere_is_refused_before_anything_is_removed(base: Path, data: Path, out: Path, link: str) -> None:
    elsewhere = out.parent / "elsewhere"
    (out / link).rename(elsewhere)
    (out / link).symlink_to(elsewhere)
    before = files(out.parent)
    with pytest.raises(ConfigError, match=rf"{out / link} .*symbolic link .*{elsewhere}.*Remove"):
        train(base, out, [job("new", str(data / "b.jsonl"))], overwrite=True)
    assert files(out.parent) == before and (out / link).is_symlink()


def test_a_link_with_a_foreign_name_stays(base: Path, data: Path, out: Path) -> None:
    (out.parent / "data").mkdir()
    (out.parent / "data" / "job.json").write_text("{}")
    (out / "old" / "data").symlink_to(out.parent / "data")
    assert train(base, out, [job("new", str(data / "b.jsonl"))], overwrite=True).status == "done"
    assert (out / "old" / "data" / "job.json").read_text() == "{}"
    assert [path.name for path in (out / "old").iterdir()] == ["data"]


def test_a_new_job_does_not_write_into_a_directory_of_somebody_else(base: Path, data: Path, out: Path) -> None:
    (out / "new").mkdir()
    (out / "new" / "adapter_model.safetensors").write_text("mine")
    before = files(out)
    with pytest.raises(ConfigError, match=rf"{out / 'new'} .*'new'.*[Mm]ove"):
        train(base, out, [job("new", str(data / "b.jsonl"))], overwrite=True)
    assert files(out) == before


def test_a_damaged_or_lost_run_file_does_not_stop_it(base: Path, data: Path, out: Path) -> None:
    (out / "run.json").write_text("{")
    (out / "mine").mkdir()
    (out / "mine" / "job.json").write_text(json.dumps({"name": "other"}))
    lines: list[str] = []
    train(base, out, [job("new", str(data / "b.jsonl"))], overwrite=True, watcher=Watcher(note=lines.append))
    assert {path.name for path in out.iterdir()} == {"new", "run.json", "run.jsonl", "report.html", "mine", "bad-run.json"}
    assert "--overwrite kept what tlora did not write: mine, bad-run.json" in lines
    (out / "run.json").unlink()
    assert train(base, out, [job("again", str(data / "b.jsonl"))], overwrite=True).status == "done"
    assert not (out / "new").exists() and (out / "mine" / "job.json").exists()


def test_a_damaged_run_file_alone_may_be_another_programs(base: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text('{"command": "make"}')
    with pytest.raises(ConfigError, match=r"run\.json is damaged"):
        train(base, tmp_path / "out", [job("new", str(data / "b.jsonl"))], overwrite=True)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run.json"]
