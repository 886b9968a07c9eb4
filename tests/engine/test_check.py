"""`check` tells every problem that can be known, also when the base model itself is missing."""

from __future__ import annotations

from pathlib import Path

from tlora.engine.check import check
from tlora.job import JobSpec, RunSpec


def test_a_missing_base_hides_no_missing_file(data: Path) -> None:
    jobs = [JobSpec(name=name, data={"path": str(data / file)}) for name, file in (("here", "a.jsonl"), ("gone", "none.jsonl"))]  # type: ignore[arg-type]
    found = check(RunSpec(base_model="/no/such/base", jobs=jobs), device="cpu")
    assert len(found.problems) == 1 and "/no/such/base" in found.problems[0]
    here, gone = found.jobs
    assert here.problems == () and len(gone.problems) == 1 and "none.jsonl" in gone.problems[0]
