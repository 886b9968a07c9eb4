"""Output where the stream's encoding lacks characters that we print; options that are given twice."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tlora.cli.commands import app
from tlora.cli.result_view import exit_code, print_end
from tlora.cli.terminal import open_console
from tlora.engine.results import Results
from tlora.store.job_result import JobResult


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_without_unicode_gets_the_results_spelled_out(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which some runners of tests set
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))
    results = Results({"\u4e2d\u6587": JobResult("\u4e2d\u6587", "done", train_loss_first=2.0, train_loss=1.0, path="out")})
    print_end(open_console(), results, [])
    sys.stdout.flush()
    told = raw.getvalue().decode(encoding)
    assert "2.0000 -> 1.0000" in told and "??" in told and exit_code(results.values(), None) == 0


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--adapter", "a", "--adapter", "b", "--prompt", "x"],
        ["generate", "--adapter", "a", "--prompt", "x", "--prompt=y"],
        ["simulate", "--policy", "fifo", "--policy", "sjf"],
        ["train", "jobs.yaml", "--device", "cpu", "--device", "cpu"],
        ["keys", "create", "ci", "--tenant", "a", "--tenant", "b"],
        ["worker", "--connect", "a", "--connect", "b"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_an_option_of_one_value_that_is_given_twice_is_refused_and_not_dropped(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    answer = CliRunner().invoke(app, command)
    option = next(part for part in command if part.startswith("--") and sum(other.split("=")[0] == part for other in command) == 2)
    assert (answer.exit_code, f"{option} is given 2 times and takes one value" in answer.stderr) == (2, True), answer.stderr


def test_options_that_are_repeatable_and_flags_may_be_given_twice(tmp_path: Path) -> None:
    command = ["train", str(tmp_path / "none.yaml"), "--set", "defaults.r=8", "--set", "defaults.r=4", "--resume", "--resume"]
    assert "no such file" in CliRunner().invoke(app, command).stderr
