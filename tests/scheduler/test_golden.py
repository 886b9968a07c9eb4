"""Each policy does to the golden story exactly what is written down."""

from __future__ import annotations

import json

import pytest

from tests.scheduler.golden_traces import FOLDER, told
from tlora.scheduler.policies import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_actions_are_those_written_down(policy: str) -> None:
    expected = json.loads((FOLDER / f"{policy}.json").read_text(encoding="utf-8"))
    for found, line in zip(told(policy), expected, strict=True):
        assert found == line, "if this is meant: python -m tests.scheduler.golden_traces"


def test_there_is_a_file_for_each_policy_and_no_other() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(POLICIES)
