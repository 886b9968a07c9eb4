"""A traced run calls the functions that `docs/explanation/architecture.md` lists from `tlora train` to the first optimizer step."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import tlora
from tlora.cli import main

Function = tuple[str, str]  # file below src/tlora, qualified name
ROOT = Path(tlora.__file__).parent
DESIGN = Path(__file__).parents[2] / "docs" / "explanation" / "architecture.md"
MOST_FUNCTIONS, MOST_FILES = 10, 8
WRAPPERS = {  # call what they are given, whatever it is
    ("cli/__init__.py", "main"),
    ("cli/terminal.py", "add_command.<locals>.reported"),
    ("group/isolation.py", "try_call"),
}
ENDS = ("SuperModel.forward_backward", "adamw_step")


def listed() -> list[Function]:
    text = DESIGN.read_text(encoding="utf-8").split("## From `tlora train` to the first optimizer step")[1].split("\n## ")[0]
    return [(file, name) for name, file in re.findall(r"^\d+\. `([\w.]+)` in `([\w/]+\.py)`:", text, re.MULTILINE)]


def stack_of(frame: FrameType | None) -> list[Function]:
    """The functions of this package that are being called, outermost first."""
    found: list[Function] = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT):
            found.insert(0, (path.relative_to(ROOT).as_posix(), frame.f_code.co_qualname))
        frame = frame.f_back
    return found


def test_the_listed_functions_are_those_that_are_called(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs_file = tmp_path / "jobs.yaml"
    jobs = f"jobs:\n  - {{name: a, data: {data / 'a.jsonl'}, r: 4, max_steps: 1}}\n"
    jobs_file.write_text(f"base_model: {base}\noutput_dir: {tmp_path / 'out'}\n{jobs}")
    stacks: dict[str, list[Function]] = {}

    def trace(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_qualname
        if event == "call" and name in ENDS and name not in stacks:
            stacks[name] = stack_of(frame)
            if len(stacks) == len(ENDS):
                sys.setprofile(None)

    monkeypatch.setattr(sys, "argv", ["tlora", "train", str(jobs_file), "--device", "cpu", "--quiet"])
    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.setprofile(before)
    assert ended.value.code in (0, None), capsys.readouterr().err
    forward, step = ([function for function in stacks[name] if function not in WRAPPERS] for name in ENDS)
    called = forward + [function for function in step if function not in forward]
    assert listed() == called, "docs/explanation/architecture.md: list these"
    assert len(called) <= MOST_FUNCTIONS and len({file for file, _ in called}) <= MOST_FILES
