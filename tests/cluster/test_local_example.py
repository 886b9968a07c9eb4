"""The example of a cluster on one machine, but for the process that it is."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.engine.conftest import save_base
from tests.engine.tiny_runs import write_rows
from tlora.cli.commands import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "local_cluster.py"


def test_jobs_of_a_file_are_trained_and_their_log_is_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = save_base(tmp_path / "base", num_hidden_layers=1)
    for number, name in enumerate("abc"):
        write_rows(tmp_path / f"{name}.jsonl", 12, number)
    jobs = [{"name": name, "data": f"{name}.jsonl", "r": 4, "batch_size": 4, "max_steps": 4} for name in "abc"]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"base_model": str(base), "output_dir": "out", "jobs": jobs}))
    runpy.run_path(str(EXAMPLE))["main"](str(tmp_path / "jobs.yaml"), "cpu", "0", "1", apart_seconds=0.5)
    said = capsys.readouterr().out
    for name in "abc":
        assert (tmp_path / "out" / "jobs" / name / "adapter_model.safetensors").exists(), said
        assert f"JobFinished(job_id='{name}')" in said
    options = ["simulate", "--trace", str(tmp_path / "out" / "events.jsonl"), "--gpus", "2", "--policy", "residual_capacity"]
    replayed = CliRunner().invoke(app, options)
    assert replayed.exit_code == 0 and "residual_capacity" in replayed.output, replayed.output
