"""What is shown of a cluster's jobs follows from its events and actions."""

from __future__ import annotations

import json
from pathlib import Path

from tlora.job import JobSpec, RunSpec
from tlora.live.progress_view import ProgressView
from tlora.protocol import (
    DEFAULT_MAX_SLOWDOWN,
    ChangeGroup,
    GroupFound,
    GroupLost,
    JobFailed,
    JobFinished,
    JobGroup,
    JobProfile,
    JobSubmitted,
    ParallelPlan,
    RejectJob,
    StartGroup,
    StepsDone,
)

PROFILE = JobProfile(tokens_per_step=100.0, steps=50, longest_sample_tokens=30, adapter_parameters=10)


def group(*jobs: str, gpu: int = 1) -> JobGroup:
    return JobGroup(f"g{gpu}", "base", (gpu,), ParallelPlan(1, 128), jobs, tuple(1.0 for _ in jobs))


def test_a_job_waits_trains_moves_and_ends(tmp_path: Path) -> None:
    run = RunSpec(base_model="b", output_dir=str(tmp_path), jobs=[JobSpec.model_validate({"name": name, "data": "d"}) for name in "abc"])
    progress_view = ProgressView(run, dict.fromkeys("abc", PROFILE))

    def shown() -> dict[str, tuple[str, int | None, int]]:
        return {row.name: (row.status, row.gpu, row.step) for row in progress_view.progress(1.0).jobs}

    for name in "ab":
        progress_view.see(JobSubmitted(name, "base", 1, PROFILE))
    assert shown() == {"a": ("queued", None, 0), "b": ("queued", None, 0), "c": ("preparing", None, 0)}
    progress_view.see(StartGroup(group("a", "b")))
    assert shown()["a"] == ("preparing", 1, 0)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": 3.0 + step / 8, "num_tokens": 100 * step}) + "\n" for step in range(1, 13)) + '{"torn'
    )
    progress_view.see(StepsDone("a", "g1", 10, 0.5))
    row = progress_view.progress(1.0).jobs[0]
    assert (row.status, row.step, row.total_steps, row.loss, row.tokens_per_second, row.eta_seconds) == (
        "training",
        10,
        50,
        3.9375,  # the mean of the last ten rows
        200.0,
        20.0,
    )
    assert (row.share, progress_view.progress(1.0).tokens_per_second) == (1.0, 200.0)
    progress_view.see(ChangeGroup(group("a")))
    assert shown() == {"a": ("training", 1, 10), "b": ("queued", None, 0), "c": ("preparing", None, 0)}
    progress_view.see(GroupLost("g1", "the worker died"))
    assert shown()["a"] == ("queued", None, 10) and progress_view.progress(1.0).tokens_per_second == 0
    progress_view.see(StartGroup(group("a", gpu=0)))
    progress_view.see(JobFinished("a"))
    progress_view.see(JobFailed("b", "a bad sample"))
    progress_view.see(RejectJob("c", "never fits"))
    assert shown() == {"a": ("done", 0, 50), "b": ("failed", None, 0), "c": ("failed", None, 0)}
    assert progress_view.failed == {"b": "a bad sample", "c": "never fits"}


def test_a_group_that_was_found_trains(tmp_path: Path) -> None:
    run = RunSpec(base_model="b", output_dir=str(tmp_path), jobs=[JobSpec.model_validate({"name": "a", "data": "d"})])
    progress_view = ProgressView(run, {"a": PROFILE})
    progress_view.see(GroupFound(group("a"), (JobSubmitted("a", "base", 1, PROFILE, submitted_at=-5.0),), (7,)))
    (row,) = progress_view.progress(1.0).jobs
    assert (row.status, row.gpu, row.step) == ("training", 1, 7)


def test_the_default_bound_is_the_schedulers() -> None:
    assert JobSpec.model_validate({"name": "a", "data": "d"}).max_slowdown == DEFAULT_MAX_SLOWDOWN
