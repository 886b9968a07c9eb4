"""The example of an own back end, but for the process that it is."""

from __future__ import annotations

import runpy
from pathlib import Path

from tlora.protocol import JobFinished, JobRequest, StartGroup

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_backend.py"


def test_all_jobs_finish_and_the_held_one_starts_again() -> None:
    told = runpy.run_path(str(EXAMPLE))["main"]()
    assert sorted(item.job_id for item in told if isinstance(item, JobFinished)) == ["first", "second"]
    held, released = told.index(JobRequest("second", "hold")), told.index(JobRequest("second", "release"))
    starts = [number for number, item in enumerate(told) if isinstance(item, StartGroup) and "second" in item.group.job_ids]
    assert len(starts) == 2 and starts[0] < held < released < starts[1]
