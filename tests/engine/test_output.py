"""What is shown never decides about jobs, and Ctrl-C is answered at once: real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import job, train
from tests.process_hooks import hold, hold_rows, let_hold, run_in_each_process
from tests.small_disks import mounted
from tlora import durable
from tlora.data.prepare import Prepared, prepare
from tlora.data.request import PrepareRequest
from tlora.engine.watcher import Watcher
from tlora.job import DataConfig
from tlora.store import checkpoint

PATIENCE_SECONDS = 600


def jobs_file(base: Path, data: Path, directory: Path, **fields: Any) -> Path:
    jobs = [job(name, str(data / f"{name}.jsonl"), **fields) for name in ("a", "b", "c")]
    file = directory / "jobs.yaml"
    file.write_text(json.dumps({"base_model": str(base), "output_dir": str(directory / "out"), "jobs": jobs}))
    return file


def start(file: Path, *arguments: str, **streams: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tlora", "train", str(file), "--device", "cpu", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TLORA_CACHE": str(file.parent / "cache")}
    return subprocess.Popen(command, text=True, start_new_session=True, env=environment, **streams)


def check_nothing_happened(process: subprocess.Popen[str], out: Path, why: str) -> None:
    """But that the output is lost, which is said once."""
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    assert errors.count("output is lost from here on, and training goes on") == 1 and "Traceback" not in errors
    run = json.loads((out / "run.json").read_text())
    assert run["status"] == "done" and why in run["output_lost"] and why in errors
    for name in ("a", "b", "c"):
        assert json.loads((out / name / "result.json").read_text())["status"] == "done"
        assert (out / name / "adapter_model.safetensors").is_file()


def test_a_full_disk_under_stdout(base: Path, data: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk, (disk / "log").open("w") as log:
        (disk / "ballast").write_bytes(bytes(60 << 10))
        (disk / "more").write_bytes(b"x")
        process = start(jobs_file(base, data, tmp_path, logging_steps=1), stdout=log, stderr=subprocess.PIPE)
        check_nothing_happened(process, tmp_path / "out", "No space left on device")


def test_a_reader_of_stdout_that_goes_away(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step: else all may have been written by then."""
    let_hold(monkeypatch, tmp_path, "")
    with hold(0):
        process = start(jobs_file(base, data, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        process.stdout = None
    check_nothing_happened(process, tmp_path / "out", "stdout was closed by its reader")


def test_ctrl_c_is_answered_and_says_how_to_resume(base: Path, data: Path, tmp_path: Path) -> None:
    file = jobs_file(base, data, tmp_path, max_steps=100_000)
    process = start(file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    for line in process.stdout:
        if "training, step" in line:
            os.killpg(process.pid, signal.SIGINT)
            break
    told, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130 and not re.sub(r".*(Loading weights|Writing).*\\s", "", errors).strip(), (told, errors)
    assert "Interrupted: saving 3 unfinished jobs; press Ctrl-C again to quit at once" in told
    assert told.rstrip().endswith(f"Resume with: tlora train {file} --device cpu --resume")
    for name in ("a", "b", "c"):
        (kept,) = (tmp_path / "out" / name).glob("checkpoint-*")
        durable.verify(kept)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_end_while_rows_are_tokenized_keeps_what_is_done(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The signal goes to all processes, as that of a terminal does."""
    rows, cache = 1500, tmp_path / "cache"
    talk = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "green"}]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * rows)
    data, go_on = {"path": str(tmp_path / "a.jsonl")}, hold_rows(monkeypatch, tmp_path)
    file = tmp_path / "jobs.yaml"
    order = {"base_model": str(base), "output_dir": str(tmp_path / "out"), "jobs": [job("a", data, max_steps=1)]}
    file.write_text(json.dumps(order))
    process = start(file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not any(cache.glob("tmp-set-*/progress.json")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, number)
    told, errors = process.communicate(timeout=PATIENCE_SECONDS)
    expected = 130 if number == signal.SIGINT else -number
    assert process.returncode == expected and "Traceback" not in told + errors, (told, errors)
    (kept,) = cache.glob("tmp-*")
    done = json.loads((kept / "progress.json").read_text().partition("\n")[2])["counts"]["report"]["report"]["rows"]
    assert 0 < done < rows
    line = f"Interrupted: {done:,} tokenized rows are kept; the next launch with the same data goes on behind them\n"
    assert errors == (line if number == signal.SIGINT else "")

    go_on()
    process = start(file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, (told, errors)
    assert all(int(found.replace(",", "")) >= done for found in re.findall(r"tokenizing a: ([\d,]{2,}) rows", told))
    vocab_size = json.loads((base / "config.json").read_text())["vocab_size"]
    request = PrepareRequest("a", DataConfig.model_validate(data), str(base), vocab_size, tmp_path / "whole", tmp_path)
    made = prepare([request])["a"]
    assert isinstance(made, Prepared)
    for path in made.train.directory.iterdir():
        assert (cache / made.train.directory.name / path.name).read_bytes() == path.read_bytes()
    assert not list(cache.glob("tmp-*"))


INTERRUPT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "torch.nn":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.usefixtures("real_start")
def test_ctrl_c_while_libraries_are_loaded(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the midst of torch, whose own are loaded by then."""
    run_in_each_process(monkeypatch, tmp_path, INTERRUPT)
    process = start(jobs_file(base, data, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    told, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130 and "Traceback" not in errors and not (tmp_path / "out").exists(), (told, errors)


@pytest.mark.parametrize("error", [ValueError("the watcher fell asleep"), OSError(28, "No space left on device")], ids=["a bug", "a disk"])
def test_a_watcher_that_raises_ends_nothing(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """Also where the writing thread tells it of a checkpoint that failed."""
    save = checkpoint.save

    def refuse(directory: Path, *args: Any) -> None:
        if directory.name == "checkpoint-2":
            raise OSError(5, "input/output error")
        save(directory, *args)

    def note(line: str) -> None:
        if "the job goes on without it" in line:
            raise error

    monkeypatch.setattr(checkpoint, "save", refuse)
    order = job("a", str(data / "a.jsonl"), save_steps=2, max_steps=5)
    assert train(base, tmp_path / "out", [order], watcher=Watcher(lambda _: None, note))["a"].status == "done"
    assert str(error) in json.loads((tmp_path / "out" / "run.json").read_text())["output_lost"]
    assert capsys.readouterr().err.count(f"training goes on: {'' if isinstance(error, OSError) else 'ValueError: '}{error}") == 1
