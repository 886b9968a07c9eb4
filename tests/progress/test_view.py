"""What is shown of jobs follows from events: of a cluster, of ranks, of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tlora.job import JobSpec
from tlora.progress.cluster import ClusterProgress
from tlora.progress.view import JobProgress, ProgressView, logged_values
from tlora.protocol import (
    DEFAULT_MAX_SLOWDOWN,
    ChangeGroup,
    GroupFound,
    GroupLost,
    JobFailed,
    JobFinished,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    ParallelPlan,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
)
from tlora.report.rows import read_rows

PROFILE = JobProfile(tokens_per_step=100.0, steps=50, longest_sample_tokens=30, adapter_parameters=10)


def group(*jobs: str, gpus: tuple[int, ...] = (1,)) -> JobGroup:
    return JobGroup(f"g{gpus[0]}", "base", gpus, ParallelPlan(1, 128), jobs, tuple(1.0 for _ in jobs))


def cluster_of(*names: str) -> ClusterProgress:
    return ClusterProgress(ProgressView(JobProgress(name, "preparing", 16, total_steps=50) for name in names))


def submitted(name: str) -> JobSubmitted:
    return JobSubmitted(name, "base", 1, PROFILE)


def test_a_job_waits_trains_moves_and_ends() -> None:
    cluster = cluster_of(*"abc")

    def shown() -> dict[str, tuple[str, int | None, int]]:
        return {row.name: (row.status, row.gpu, row.step) for row in cluster.view.progress(1.0).jobs}

    for name in "ab":
        cluster.see(submitted(name))
    assert shown() == {"a": ("queued", None, 0), "b": ("queued", None, 0), "c": ("preparing", None, 0)}
    cluster.see(StartGroup(group("a", "b")))
    assert shown()["a"] == ("preparing", 1, 0)
    cluster.see(StepsDone("a", "g1", 10, 0.5))
    row = cluster.view.progress(1.0).jobs[0]
    assert (row.status, row.step, row.total_steps, row.tokens_per_second, row.eta_seconds) == ("training", 10, 50, 200.0, 20.0)
    assert (row.share, cluster.view.progress(1.0).tokens_per_second) == (1.0, 200.0)
    cluster.see(ChangeGroup(group("a")))
    assert shown() == {"a": ("training", 1, 10), "b": ("queued", None, 0), "c": ("preparing", None, 0)}
    cluster.see(GroupLost("g1", "the worker died"))
    assert shown()["a"] == ("queued", None, 10) and cluster.view.progress(1.0).tokens_per_second == 0
    cluster.see(StartGroup(group("a", gpus=(0,))))
    cluster.see(JobFinished("a"))
    cluster.see(JobFailed("b", "a bad sample"))
    cluster.see(RejectJob("c", "never fits"))
    assert shown() == {"a": ("done", 0, 50), "b": ("failed", None, 0), "c": ("failed", None, 0)}
    assert {row.name: row.reason for row in cluster.view.rows.values()} == {"a": "", "b": "a bad sample", "c": "never fits"}
    cluster.see(StepsDone("a", "g0", 51, 0.5))
    cluster.see(StopGroup("g0"))
    assert shown()["a"] == ("done", 0, 50)


def test_a_group_that_was_found_trains_and_knows_its_other_gpus() -> None:
    cluster = cluster_of("a")
    cluster.see(GroupFound(group("a", gpus=(1, 3)), (JobSubmitted("a", "base", 1, PROFILE, submitted_at=-5.0),), (7,)))
    (row,) = cluster.view.progress(1.0).jobs
    assert (row.status, row.gpus_text, row.step) == ("training", "1,3", 7)


def test_a_job_that_moves_is_prepared_again_and_stays_in_its_new_group() -> None:
    cluster = cluster_of("a")
    for item in (submitted("a"), StartGroup(group("a")), StepsDone("a", "g1", 3, 0.5), StartGroup(group("a", gpus=(2,)))):
        cluster.see(item)
    assert (cluster.view.rows["a"].status, cluster.view.rows["a"].gpu) == ("preparing", 2)
    cluster.see(ChangeGroup(group()))  # which it had left
    assert cluster.view.rows["a"].gpu == 2


def test_a_paused_job_stays_paused_until_it_is_released() -> None:
    cluster = cluster_of("a")
    for item in (
        submitted("a"),
        StartGroup(group("a")),
        StepsDone("a", "g1", 3, 0.5),
        JobRequest("a", "hold"),
        StepsDone("a", "g1", 4, 0.5),
    ):
        cluster.see(item)
    assert (cluster.view.rows["a"].status, cluster.view.rows["a"].step) == ("paused", 4)
    cluster.see(JobRequest("a", "release"))
    assert cluster.view.rows["a"].status == "preparing"  # it has its place still
    cluster.see(JobRequest("a", "hold"))
    cluster.see(StopGroup("g1"))
    assert (cluster.view.rows["a"].status, cluster.view.rows["a"].gpu) == ("paused", None)
    cluster.see(JobRequest("a", "release"))
    assert cluster.view.rows["a"].status == "queued"


def test_the_changes_are_of_the_jobs_that_an_event_is_about() -> None:
    cluster = cluster_of(*"ab")
    for name in "ab":
        cluster.see(submitted(name))
    cluster.see(StartGroup(group("a")))
    changes = cluster.see(ChangeGroup(group("b")))
    assert [(before and before.status, after.name, after.status) for before, after in changes] == [
        ("preparing", "a", "queued"),
        ("queued", "b", "preparing"),
    ]
    assert not cluster.see(StepsDone("unknown", "g1", 1, 0.5))


def test_rates_of_several_sources_are_summed_and_shares_are_of_all() -> None:
    view = ProgressView(
        [JobProgress("a", "training", gpu=0, tokens_per_second=60.0), JobProgress("b", "training", gpu=1, tokens_per_second=20.0)]
    )
    view.measure(0, 60.0, 0.1)
    view.measure(1, 40.0, 0.2, rates={"a": 20.0})
    shown = view.progress(1.0)
    assert (shown.tokens_per_second, shown.padding) == (100.0, pytest.approx(0.14))
    assert [(row.tokens_per_second, row.share) for row in shown.jobs] == [(80.0, 0.8), (20.0, 0.2)]
    view.lose(1)
    shown = view.progress(1.0)
    assert [(row.status, row.gpu, row.tokens_per_second) for row in shown.jobs] == [("training", 0, 60.0), ("queued", None, 0.0)]
    view.measure(1, 0.0, 0.0, "loading")
    assert view.progress(1.0).stage == "GPU 1: loading" and view.progress(1.0, "tokenizing").stage == "tokenizing"
    on_cpus = ProgressView(device="cpu")
    on_cpus.measure(1, 0.0, 0.0, "loading")
    assert on_cpus.progress(1.0).stage == "CPU process 1: loading"


def test_logged_values_are_the_newest_that_are_numbers(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3.0 + step / 8, "num_tokens": 100 * step} for step in range(1, 13)]
    lines = [*map(json.dumps, rows), '{"step": 12, "eval_loss": 2.5}', '{"step": 12, "eval_loss": null}', '{"torn']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    expected = {"loss": 3.9375, "num_tokens": 1200, "eval_loss": 2.5}  # the loss is the mean of the last ten rows
    assert logged_values(read_rows(tmp_path / "metrics.jsonl")) == expected
    assert logged_values(read_rows(tmp_path / "metrics.jsonl", most_bytes=600)) == expected
    assert logged_values(read_rows(tmp_path / "none.jsonl", most_bytes=600)) == {}


def test_the_default_bound_is_the_schedulers() -> None:
    assert JobSpec.model_validate({"name": "a", "data": "d"}).max_slowdown == DEFAULT_MAX_SLOWDOWN
