"""How others are started on the jobs of a run, and what is made of their figures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import real_jobs, rivals


def options(*arguments: str) -> Any:
    return real_jobs.read_options(["--shape", "tiny", "--device", "cpu", "--steps", "6", "--commit", "a copy", *arguments])


def test_launches_are_compared_with_the_best_setting():
    rows = [
        {"setting": "a", "tokens_per_second": 5.0, "pilot_tokens_per_second": 5.0, "best": True, "jobs": {}},
        {"setting": "b", "tokens_per_second": None, "pilot_tokens_per_second": 2.0, "jobs": {"c4": {"error": "no kernel"}}},
        {"setting": "c", "tokens_per_second": None, "skipped": "the time limit was reached", "jobs": {}},
    ]
    launches = [{"case": "nf4", "kind": "cold", "steady_tokens_per_second": 10.0}, {"case": "nf4", "kind": "warm"}]
    rival = {"rival": "qlora", "trainer": "a trainer", "whole_seconds": 3.0, "rows": rows, "error": None}
    rival["ours_over_best"] = rivals.compare(launches, rival)
    assert rival["ours_over_best"] == {"0: nf4 cold": 2.0}
    text = rivals.format_rival(rival)
    for part in ("5 tokens/s", "best", "c4: no kernel", "the time limit was reached", "launch 0: nf4 cold: 2.00 times"):
        assert part in text
    assert rivals.compare(launches, {"rows": rows[1:]}) == {} == rivals.compare(launches, {"error": "exit code 1"})


def test_a_rival_that_fails_is_seen_to_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(rivals, "command_of", lambda *_: ["python", "-c", "print('no library'); raise SystemExit(3)"])
    assert rivals.measure("qlora", options(), tmp_path, tmp_path)["error"] == "exit code 3: no library"

    def never_ends(*_: Any, **__: Any) -> None:
        (tmp_path / "qlora.json").write_text(json.dumps({"rows": [{"setting": "a"}]}))
        raise subprocess.TimeoutExpired("a rival", 270.0)

    monkeypatch.setattr(subprocess, "run", never_ends)
    found = rivals.measure("qlora", options(), tmp_path, tmp_path)
    assert found["error"] == "it was ended after 270 s" and found["rows"] == [{"setting": "a"}], "what it had measured is lost"
