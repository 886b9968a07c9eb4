"""What the logs of a launch are made to say, and real launches of the command on a tiny base."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import base_files, launch, real_jobs
from bench.launch import Step
from tlora.jobs_file import read_jobs_file


def row_of_run(seconds: float, **counts: int) -> dict[str, Any]:
    names = [f"{prefix}{name}" for prefix in ("", "tail_") for name in ("tokens", "computed", "micro_batches")]
    return {"seconds": seconds} | dict.fromkeys(names, 0) | counts


def test_the_work_is_eight_jobs_over_six_files():
    run = read_jobs_file(real_jobs.JOBS_FILE)
    assert [job.r for job in run.jobs] == [16, 8, 32, 16, 8, 64, 64, 32]
    assert [job.batch_size for job in run.jobs] == [8, 4, 4, 8, 2, 4, 8, 2]
    assert {(job.data.max_length, job.max_steps, job.lora_dropout) for job in run.jobs} == {(2048, 60, 0.0)}
    assert len({job.data.path for job in run.jobs}) == 6 and len({job.seed for job in run.jobs}) == 8
    assert all(Path(job.data.path).is_file() for job in run.jobs)


@pytest.mark.parametrize(("case", "dropouts"), [("plain", 0), ("one-dropout", 1), ("all-dropout", 8)])
def test_a_case_is_the_same_work_with_dropout_in_so_many_jobs(case: str, dropouts: int):
    run = read_jobs_file(real_jobs.JOBS_FILE, real_jobs.CASES[case])
    assert sum(job.lora_dropout == 0.05 for job in run.jobs) == dropouts


def test_times_of_the_logs_begin_at_the_launch(tmp_path: Path):
    (tmp_path / "a").mkdir()
    rows = [{"step": 0, "eval_loss": 1.0, "seconds": 2.0}, {"step": 1, "loss": 1.0, "num_tokens": 10, "seconds": 3.0}]
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.jsonl").write_text(json.dumps(row_of_run(4.0)) + "\n")
    os.utime(tmp_path / "a" / "metrics.jsonl", (0, 1003.5))  # row of second 3, written 0.5 s late
    os.utime(tmp_path / "run.jsonl", (0, 1004.0))
    steps, of_run = launch.read_log(tmp_path, 990.0)
    assert steps == [Step(13.0, "a", 1, 10)] and of_run[0]["seconds"] == 14.0


def test_speeds_are_those_of_their_spans():
    long = [Step(10.0 + number, "long", number, 100 * number) for number in range(1, 21)]
    short = [Step(11.5, "short", 1, 50), Step(12.5, "short", 2, 100)]
    found = launch.speeds(sorted([*long, *short], key=lambda step: step.seconds), [row_of_run(30.0, tokens=2100, computed=2800)])
    assert found["tokens"] == 2100 and found["padding_share"] == pytest.approx(0.25)
    assert found["whole_tokens_per_second"] == pytest.approx(2000 / 19)
    assert found["all_jobs_tokens_per_second"] == pytest.approx(200 / 1.5) and found["all_jobs_seconds"] == 1.5
    # tenths are 210 and 1,890 tokens: reached first with 250 at 12 s, last kept with 1,800 at 27 s
    assert found["steady_tokens_per_second"] == pytest.approx((1800 - 250) / (27.0 - 12.0))


def test_a_silence_lies_between_two_rows_of_any_log():
    steps = [Step(10.0, "a", 1, 1), Step(31.0, "b", 1, 1), Step(32.0, "a", 2, 2)]
    found = launch.silences(steps, [row_of_run(5.0), row_of_run(11.0), row_of_run(60.0)])
    assert (found["longest_silence_seconds"], found["longest_silence_at"]) == (20.0, 11.0)
    assert found["long_silences"] == [(11.0, 20.0)]


def test_bytes_since_a_moment_count_a_file_with_two_names_once(tmp_path: Path):
    for name, size, when in (("old", 100, 10), ("new", 30, 30)):
        (tmp_path / name).write_bytes(b"x" * size)
        os.utime(tmp_path / name, (when, when))
    (tmp_path / "again").hardlink_to(tmp_path / "new")
    assert launch.bytes_since(tmp_path, 20.0) == 30
    assert launch.disk_rate(tmp_path, 1) > 0 and not (tmp_path / "disk-rate").exists()


def test_a_process_that_fails_is_seen_to_fail(tmp_path: Path):
    ended = launch.run_process([sys.executable, "-c", "print('no base'); raise SystemExit(2)"], os.environ, tmp_path, None)
    assert ended.code == 2 and [line for _, line in ended.lines] == ["no base"] and ended.host_peak_bytes > 0
    (error, none) = real_jobs._errors(real_jobs.Order("plain", "cold"), ended, tmp_path, 60)
    assert "exit code 2" in error and "no base" in error and none == "no job has a result"


@pytest.mark.parametrize(("launches", "why"), [("warm", "begins with warm caches"), ("cold,cool", "'cool'"), ("some:cold", "'some:cold'")])
def test_launches_that_cannot_be_are_refused(launches: str, why: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        real_jobs.read_options(["--launches", launches])
    assert why in capsys.readouterr().err


def tiny(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    places = ["--base-dir", str(tmp_path / "bases"), "--caches", str(tmp_path / "caches"), "--out", str(tmp_path / "out.json")]
    short = ["--set", "dtype=float32", "--set", "defaults.max_length=48"]
    common = ["--shape", "tiny", "--device", "cpu", "--commit", "a copy", *places, *short]
    return real_jobs.run_benchmark(real_jobs.read_options([*common, *arguments]))


@pytest.mark.soak
@pytest.mark.usefixtures("forked_children")
def test_a_launch_of_the_command_on_a_tiny_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "caches" / "xdg" / "tlora").mkdir(parents=True)
    for name in ("mine", "xdg/tlora/of-an-earlier-run"):
        (tmp_path / "caches" / name).touch()
    found = tiny(tmp_path, "--launches", "all-dropout:cold", "--steps", "2")
    (row,) = found["launches"]
    assert json.loads((tmp_path / "out.json").read_text())["launches"][0]["tokens"] == row["tokens"] > 0
    assert row["errors"] == [] and row["exit_code"] == 0
    assert 0 < row["first_step_seconds"] <= row["last_step_seconds"] < row["wall_seconds"]
    assert row["exit_seconds"] == pytest.approx(row["wall_seconds"] - row["last_step_seconds"], abs=0.01)
    assert any(real_jobs._PREDICTED.search(line) for _, line in row["notes"]) and row["memory"] is None
    assert row["exit_bytes"] > 0 and row["written_bytes"] >= row["exit_bytes"]
    assert (tmp_path / "caches" / "mine").is_file(), "something that is no cache was deleted"
    cache = tmp_path / "caches" / "xdg" / "tlora"
    assert list(cache.glob("*/tokens.bin")), "no data set was kept"  # what is kept of a file's identity depends on the file's age
    assert not (cache / "of-an-earlier-run").exists()
    assert "all-dropout cold" in capsys.readouterr().out


@pytest.mark.soak
def test_a_launch_that_is_told_to_end(tmp_path: Path):
    (tmp_path / "caches").mkdir()
    (row,) = tiny(tmp_path, "--launches", "sigterm", "--steps", "100000", "--signal-after", "1")["launches"]
    assert row["errors"] == [] and row["exit_code"] == 143
    assert row["exit_seconds"] == pytest.approx(row["wall_seconds"] - row["signal_seconds"], abs=0.01)


def test_the_peak_of_the_memory_stands_beside_what_was_predicted(tmp_path: Path):
    line = "token budget 512 (the longest has 48); memory limit 12.00 GiB, predicted peak 512.0 MiB: base 100.0 MiB (measured)"
    assert real_jobs._memory(tmp_path / "peaks.json", [line]) is None, "a CPU has no peaks"
    (tmp_path / "peaks.json").write_text(json.dumps({"peak_bytes": 2**29, "reserved_bytes": 2**30}))
    found = real_jobs._memory(tmp_path / "peaks.json", ["before", line, "after"])
    assert found == {"peak_gib": 0.5, "reserved_gib": 1.0, "predicted_gib": 0.5, "limit_gib": 12.0, "peak_over_predicted": 1.0}
    row = {"case": "nf4", "kind": "warm", "errors": [], "memory": found}
    assert "peak 0.50 GiB, 1.000 of the 0.50 predicted; reserved 1.00, limit 12.00" in real_jobs.format_row(row)


def test_a_base_that_is_whole_is_not_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(base_files.DATA / "identity.json", texts)
    monkeypatch.setattr(base_files, "DATA", texts)
    made = [base_files.make_base_here("tiny", tmp_path, "cpu")]
    base = Path(made[0]["base"])
    before = (base / "config.json").stat().st_mtime_ns
    base_files.make_base_here("tiny", tmp_path, "cpu")
    assert (base / "config.json").stat().st_mtime_ns == before
    (base / "config.json").unlink()
    made.append(base_files.make_base_here("tiny", tmp_path, "cpu"))
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    assert (base / "config.json").is_file() and [each["base_bytes"] for each in made] == [size, size]


def test_some_of_the_jobs_are_a_file_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = real_jobs.read_options(["--jobs", "alpaca,c4"])
    run = read_jobs_file(real_jobs._jobs_file(options, tmp_path))
    assert [job.name for job in run.jobs] == ["alpaca", "c4"] and all(Path(str(job.data.path)).is_file() for job in run.jobs)
    with pytest.raises(SystemExit):
        real_jobs.read_options(["--jobs", "alpacas"])
    assert "--jobs: 'alpacas' is none of alpaca, identity" in capsys.readouterr().err
