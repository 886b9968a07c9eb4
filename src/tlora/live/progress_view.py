"""Folds a cluster's events and actions into one view of its jobs' progress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tlora.engine.watcher import JobProgress, RunProgress
from tlora.job import RunSpec
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupFound,
    GroupLost,
    JobFailed,
    JobFinished,
    JobGroup,
    JobProfile,
    JobSubmitted,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
)
from tlora.store.job_result import JobResult
from tlora.wording.losses import recent_loss

_TAIL_BYTES = 16384  # of metrics.jsonl: holds the rows of its last steps, with the metrics of pairs


class ProgressView:
    """`rows` by job. `failed`: the reasons for jobs that the scheduler or the back end gave up."""

    def __init__(self, run: RunSpec, profiles: Mapping[str, JobProfile], earlier: Mapping[str, JobResult] = MappingProxyType({})) -> None:
        """`run`: its `output_dir` has a directory for each job. `earlier`: jobs that were done before."""
        self._directory, self._profiles = Path(run.output_dir), profiles
        steps = {name: profile.steps for name, profile in profiles.items()}
        self._rows = {job.name: JobProgress(job.name, "preparing", job.r, total_steps=steps.get(job.name, 0)) for job in run.jobs}
        self._groups: dict[str, JobGroup] = {}
        self.failed: dict[str, str] = {}
        for name, result in earlier.items():
            self._change(name, **self._losses(name), step=result.steps, total_steps=result.total_steps, status="done")

    def see(self, item: Event | Action) -> None:
        match item:
            case JobSubmitted(name):
                self._change(name, status="queued")
            case GroupFound(group, jobs, steps):
                self._groups[group.group_id] = group
                done = dict(zip(group.job_ids, steps, strict=False))
                for job in jobs:
                    step = done.get(job.job_id, 0)
                    self._change(job.job_id, status="training", step=step, gpu=group.gpus[0], parts_on=group.gpus[1:])
            case StartGroup(group) | ChangeGroup(group):
                self._groups[group.group_id] = group
            case StopGroup(group_id) | GroupLost(group_id):
                self._groups.pop(group_id, None)
            case StepsDone(name, _, steps, step_seconds):
                self._step(name, int(steps), step_seconds)
            case JobFinished(name):
                self._change(name, **self._losses(name), step=self._rows[name].total_steps, status="done", tokens_per_second=0.0)
            case JobFailed(name, reason) | RejectJob(name, reason):
                self.failed[name] = reason
                self._change(name, status="failed", reason=reason, tokens_per_second=0.0)
            case _:
                return
        self._place()

    def progress(self, seconds: float, stage: str = "") -> RunProgress:
        total = sum(row.tokens_per_second for row in self._rows.values())
        rows = tuple(replace(row, share=row.tokens_per_second / total if total else 0.0) for row in self._rows.values())
        return RunProgress(seconds, rows, total, stage=stage)

    def _change(self, name: str, **fields: Any) -> None:
        if name in self._rows:
            self._rows[name] = replace(self._rows[name], **fields)

    def _step(self, name: str, steps: int, step_seconds: float) -> None:
        left = max(0, self._rows[name].total_steps - steps)
        rate = self._profiles[name].tokens_per_step / step_seconds if step_seconds > 0 else 0.0
        self._change(
            name, **self._losses(name), status="training", step=steps, tokens_per_second=rate, eta_seconds=left * step_seconds or None
        )

    def _place(self) -> None:
        """Where each job is; one that has left its group waits again."""
        groups = {name: group for group in self._groups.values() for name in group.job_ids}
        where = {name: group.gpus[0] for name, group in groups.items()}
        for name, row in self._rows.items():
            if row.status in ("done", "failed"):
                continue
            if name in where:
                moved = (row.gpu != where[name] and row.status != "training") or row.gpu not in (None, where[name])
                self._change(name, gpu=where[name], parts_on=groups[name].gpus[1:], status="preparing" if moved else row.status)
            elif row.gpu is not None:
                self._change(name, gpu=None, parts_on=(), status="queued", tokens_per_second=0.0, eta_seconds=None)

    def _losses(self, name: str) -> dict[str, Any]:
        """The losses in the last rows of the job's metrics."""
        rows: list[dict[str, Any]] = []
        losses: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError):
            path = self._directory / name / "metrics.jsonl"
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                for line in file.read().splitlines():
                    with suppress(ValueError):
                        row = json.loads(line)
                        rows += [row] if "loss" in row else []
                        losses |= {"num_tokens": int(row["num_tokens"])} if "loss" in row else {}
                        losses |= {"eval_loss": float(row["eval_loss"])} if "eval_loss" in row else {}
        return losses | {"loss": recent_loss(rows)} if rows else losses
