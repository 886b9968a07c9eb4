"""The demo's data are what its script makes, and its checkers tell a right answer from another prompt's."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tlora.jobs_file import read_jobs_file

DEMO = Path(__file__).parents[2] / "demo"
JOBS = ("polite", "sql", "fields", "triage")


@pytest.fixture(scope="module")
def demo() -> Any:
    """`make_data` and `checkers`, imported as the demo's own scripts import each other."""
    sys.path.insert(0, str(DEMO))
    try:
        yield {name: importlib.import_module(name) for name in ("make_data", "checkers")}
    finally:
        sys.path.remove(str(DEMO))
        for name in ("make_data", "checkers", "words"):
            sys.modules.pop(name, None)


def held_out(job: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (DEMO / "data" / f"{job}.heldout.jsonl").read_text(encoding="utf-8").splitlines()]


def trained(demo: dict[str, ModuleType], job: str) -> list[tuple[str, str]]:
    """(prompt, answer) of every training row, read from the file itself."""
    path = DEMO / "data" / demo["make_data"].JOBS[job][1]
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    if job == "polite":
        return [(row["conversations"][0]["value"], row["conversations"][1]["value"]) for row in rows]
    if job == "sql":
        return [(row["instruction"], row["output"]) for row in rows]
    if job == "fields":
        return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]
    return [(row["prompt"][0]["content"], row["completion"][0]["content"]) for row in rows]


def test_files_are_what_the_script_makes(demo: dict[str, ModuleType]) -> None:
    made = {name: text.encode() for name, text in demo["make_data"].make_files().items()}
    assert made == {path.name: path.read_bytes() for path in (DEMO / "data").iterdir()}


def test_the_jobs_file_orders_four_different_jobs(demo: dict[str, ModuleType]) -> None:
    run = read_jobs_file(DEMO / "jobs.yaml")
    files = {name: DEMO / "data" / file for name, (_, file, _) in demo["make_data"].JOBS.items()}
    assert {job.name: Path(job.data.path) for job in run.jobs} == files
    assert len({job.r for job in run.jobs}) == 4
    assert all(job.data.eval_size for job in run.jobs)


@pytest.mark.parametrize("job", JOBS)
def test_held_out_is_disjoint_from_training(demo: dict[str, ModuleType], job: str) -> None:
    pairs, kept = trained(demo, job), held_out(job)
    assert len(kept) == len({row["prompt"] for row in kept}) == 50
    assert {prompt for prompt, _ in pairs}.isdisjoint(row["prompt"] for row in kept)
    assert {answer for _, answer in pairs}.isdisjoint(row["answer"] for row in kept)
    assert len({answer for _, answer in pairs}) > 300, "the answers must depend on the prompts"


@pytest.mark.parametrize("job", JOBS)
def test_checker_accepts_every_training_pair(demo: dict[str, ModuleType], job: str) -> None:
    check = demo["checkers"].CHECKERS[job]
    assert [pair for pair in trained(demo, job)[:300] if not check(*pair)] == []


@pytest.mark.parametrize("job", JOBS)
def test_checker_accepts_the_right_answer_and_no_other_prompts(demo: dict[str, ModuleType], job: str) -> None:
    check, rows = demo["checkers"].CHECKERS[job], held_out(job)
    for number, row in enumerate(rows):
        assert check(row["prompt"], row["answer"])
        others = [rows[(number + step) % len(rows)] for step in range(1, 50, 5)]
        assert [other for other in others if check(row["prompt"], other["answer"])] == []


@pytest.mark.parametrize("job", JOBS)
def test_a_constant_answer_scores_at_most_one(demo: dict[str, ModuleType], job: str) -> None:
    check, rows = demo["checkers"].CHECKERS[job], held_out(job)
    for constant in ("", rows[0]["answer"], trained(demo, job)[0][1]):
        assert sum(check(row["prompt"], constant) for row in rows) <= 1
