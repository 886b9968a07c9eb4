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


def broken(run: ModuleType, seconds: float = 90.0, right_before: int = 5, right_after: int = 40, **fields: Any) -> list[str]:
    texts = [""] * 50
    trial = run.Trial(texts, texts, texts, [n < right_before for n in range(50)], [n < right_after for n in range(50)])
    return run.broken_promises(seconds, {"sql": JobResult("sql", **(GOOD | fields))}, {"sql": trial})


def test_promises_hold_at_their_limits(run: ModuleType) -> None:
    assert broken(run) == []


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"seconds": 91.0}, "91 s"),
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
