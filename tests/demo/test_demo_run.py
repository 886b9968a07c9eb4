"""The demo must fail when one of its promises does not hold."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tlora.engine.train import JobResult
from tlora.errors import ConfigError

DEMO = Path(__file__).parents[2] / "demo"
GOOD: dict[str, Any] = {"status": "done", "eval_loss_first": 4.0, "eval_loss": 2.8}


@pytest.fixture(scope="module")
def run() -> Iterator[ModuleType]:
    sys.path.insert(0, str(DEMO))
    try:
        yield importlib.import_module("run")
    finally:
        sys.path.remove(str(DEMO))
        for name in ("run", "checkers", "words"):
            sys.modules.pop(name, None)


def broken(run: ModuleType, right_before: int = 5, right_after: int = 40, **fields: Any) -> list[str]:
    texts = [""] * 50
    trial = run.Trial(texts, texts, texts, [n < right_before for n in range(50)], [n < right_after for n in range(50)])
    return run.broken_promises({"sql": JobResult("sql", **(GOOD | fields))}, {"sql": trial})


def test_promises_hold_at_their_limits(run: ModuleType) -> None:
    assert broken(run) == []


def test_an_error_that_a_user_can_mend_is_one_line(
    run: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError("output_dir demo/out is in use by another run. Wait for it, or choose another")

    monkeypatch.setattr(run, "train", refuse)
    monkeypatch.setenv("COLUMNS", "200")
    assert run.main() == 2
    assert capsys.readouterr().err == "error: output_dir demo/out is in use by another run. Wait for it, or choose another\n"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"right_before": 6}, "12% of the held-out prompts right before"),
        ({"right_after": 39}, "78% after"),
        ({"eval_loss": 2.9}, "must fall by 30%"),
        ({"eval_loss": float("nan")}, "must fall by 30%"),
        ({"eval_loss": None}, "must fall by 30%"),
        ({"status": "failed", "reason": "out of luck"}, "out of luck"),
    ],
)
def test_each_broken_promise_is_named(run: ModuleType, case: dict[str, Any], words: str) -> None:
    lines = broken(run, **case)
    assert len(lines) == 1
    assert words in lines[0]
