"""Each program of bench/ starts: what a refactoring leaves behind in one that no other test runs would be found on a GPU that waits."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import bench.cpu
from bench.fidelity_work import TOKEN_IDS
from bench.shapes import SHAPES

STARTED_BY_OTHERS = {"results_table", "scale_controller", "scale_workers", "service_server", "train_with_peaks"}
"""They have no options: what starts them gives them what they need."""


def test_each_program_imports_and_answers_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """In one process, as the libraries that they import take seconds."""
    failed: dict[str, str] = {}
    answered: set[str] = set()
    for file in sorted(Path(bench.cpu.__file__).parent.glob("*.py")):
        module = importlib.import_module(f"bench.{file.stem}")
        if 'if __name__ == "__main__"' not in file.read_text(encoding="utf-8") or file.stem in STARTED_BY_OTHERS:
            continue
        monkeypatch.setattr(sys, "argv", [str(file), "--help"])
        try:
            module.main()
        except SystemExit as end:
            printed = capsys.readouterr().out
            if end.code == 0 and printed.startswith(f"usage: {file.name}") and "--help" in printed:
                answered.add(file.stem)
            else:
                failed[file.stem] = f"exit code {end.code}: {printed[:200]}"
        except Exception as error:
            failed[file.stem] = repr(error)
    assert not failed and len(answered) > 30, failed


def test_drawn_tokens_are_in_the_vocabulary_of_every_shape():
    """`growth`, `two_hosts` and `fidelity` train such jobs over any of them."""
    assert TOKEN_IDS[1] <= min(config.vocab_size for config in SHAPES.values())
