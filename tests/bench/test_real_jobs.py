"""What the logs of a launch are made to say, and real launches of the command on a tiny base."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import launch, real_jobs
from bench.launch import Step


def row_of_run(seconds: float, **counts: int) -> dict[str, Any]:
    names = [f"{prefix}{name}" for prefix in ("", "tail_") for name in ("tokens", "computed", "micro_batches")]
    return {"seconds": seconds} | dict.fromkeys(names, 0) | counts


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


def test_a_process_that_fails_is_seen_to_fail(tmp_path: Path):
    ended = launch.run_process([sys.executable, "-c", "print('no base'); raise SystemExit(2)"], os.environ, tmp_path, None)
    assert ended.code == 2 and [line for _, line in ended.lines] == ["no base"] and ended.host_peak_bytes > 0
    (error, none) = real_jobs._errors(real_jobs.Order("plain", "cold"), ended, tmp_path, 60)
    assert "exit code 2" in error and "no base" in error and none == "no job has a result"


def test_a_process_is_told_to_stop_when_its_seconds_are_over(tmp_path: Path):
    ended = launch.run_process([sys.executable, "-c", "import time; time.sleep(60)"], os.environ, tmp_path, None, 0.2)
    assert ended.code == -signal.SIGTERM and ended.signalled is not None and ended.host_peak_bytes > 0
    assert ended.start + 0.2 <= ended.signalled <= ended.end
    errors = real_jobs._errors(real_jobs.Order("plain", "cold"), ended, tmp_path, 60)
    assert errors[0].startswith("exit code -15, not 143")


def test_caches_are_the_launchs_own_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A check or a run in this process sets some of these variables, and a user may."""
    for variable in ("TLORA_CACHE", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH"):
        monkeypatch.setenv(variable, "elsewhere")
    monkeypatch.setenv("KEPT", "1")
    found = launch.with_caches(tmp_path / "caches")
    assert "elsewhere" not in found.values() and found["KEPT"] == "1"
    assert found["XDG_CACHE_HOME"] == str(tmp_path / "caches" / "xdg") and (tmp_path / "caches" / "cuda").is_dir()


def tiny(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    places = ["--base-dir", str(tmp_path / "bases"), "--caches", str(tmp_path / "caches"), "--out", str(tmp_path / "out.json")]
    short = ["--set", "dtype=float32", "--set", "defaults.max_length=48"]
    common = ["--shape", "tiny", "--device", "cpu", "--commit", "a copy", *places, *short]
    return real_jobs.run_benchmark(real_jobs.read_options([*common, *arguments]))


@pytest.mark.soak
@pytest.mark.usefixtures("forked_children")
def test_a_launch_of_the_command_on_a_tiny_base(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "elsewhere"))  # as a test before this one in the same process may leave it
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
