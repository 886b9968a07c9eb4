"""Three policies do to the golden story exactly what is written down, and no policy breaks what `told` checks on the way."""

from __future__ import annotations

import json

import pytest

from tests.scheduler.golden_traces import FOLDER, WRITTEN_DOWN, told
from tlora.scheduler.policies import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_actions_are_those_written_down(policy: str) -> None:
    found = told(policy)
    if policy in WRITTEN_DOWN:
        expected = json.loads((FOLDER / f"{policy}.json").read_text(encoding="utf-8"))
        for line, wanted in zip(found, expected, strict=True):
            assert line == wanted, "if this is meant: python -m tests.scheduler.golden_traces"
