"""A run directory as immutable values: what each job did and what the whole run did. Fields that a file does not (yet) have are
taken from the rows, so a running run reads like a finished one. Draws nothing."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tlora.directory_lock import is_free
from tlora.errors import ConfigError
from tlora.progress.view import logged_values
from tlora.report.rows import JsonObject, column, merge_gpus, number, read_json, read_rows

KILLED = "killed"  # no run.json says so: its process ended without a word, by kill -9, for memory or in a power cut
ENDED = ("done", "stopped", "failed", KILLED)
_GOING = ("preparing", "running")


@dataclass(frozen=True)
class JobView:
    """One job. Losses are means per trained token: None where there is none. `seconds` is what the job itself took.

    `settings` are its values of the fields that its sweep varies. `progress` is the share of its training that is done, if that is known.
    """

    name: str
    status: str
    reason: str
    rank: int | None
    steps: int
    total_steps: int | None
    train_loss_first: float | None
    train_loss: float | None
    eval_loss_first: float | None
    eval_loss: float | None
    eval_loss_best: float | None
    best_step: int | None
    num_tokens: int
    seconds: float | None
    sweep_of: str | None
    settings: Mapping[str, Any]
    train_rows: Sequence[JsonObject]
    eval_rows: Sequence[JsonObject]
    progress: float | None
    gpu: int | None = None  # where it is, or was last, of a run on several GPUs
    parts_on: tuple[int, ...] = ()  # other GPUs that compute some of its replicas
    device: str = "cuda"  # whose places these number
    order: Mapping[str, Any] = field(default_factory=dict[str, Any])  # as `job.json` has it

    @property
    def trained_eval_best(self) -> float | None:
        """The best eval loss after the first optimizer step: the one before it is the base's own."""
        losses = [number(row["eval_loss"]) for row in self.eval_rows if number(row.get("step")) > 0]
        if finite := [loss for loss in losses if math.isfinite(loss)]:
            return min(finite)
        return self.eval_loss_best if self.best_step else None

    @property
    def broken_step(self) -> float | None:
        """The first step whose train loss is not finite."""
        return next((number(row.get("step")) for row in self.train_rows if not math.isfinite(number(row["loss"]))), None)

    @property
    def left_seconds(self) -> float | None:
        """Remaining time at the speed of the second half so far; None if it cannot be estimated."""
        rows = [row for row in self.train_rows if math.isfinite(number(row.get("seconds"))) and number(row.get("step")) > 0]
        if self.status != "training" or not self.progress or len(rows) < 3:
            return None
        middle, last = rows[len(rows) // 2 - 1], rows[-1]
        done = self.progress * (1 - number(middle["step"]) / number(last["step"]))
        return (1 - self.progress) * (number(last["seconds"]) - number(middle["seconds"])) / done if done > 0 else None

    def tokens_at(self, step: float) -> float:
        """Trained tokens after `step` optimizer steps, from the last train row at or before it."""
        after = bisect_right(self.train_rows, step, key=lambda row: number(row.get("step")))
        return number(self.train_rows[after - 1].get("num_tokens")) if after else 0.0


@dataclass(frozen=True)
class RunView:
    """The run: its resolved spec, its rows of about a second each, its jobs in the order of the jobs file."""

    name: str
    spec: JsonObject
    rows: Sequence[JsonObject]
    jobs: Sequence[JobView]
    seconds: float
    num_tokens: int


def read_run(run_dir: Path) -> RunView:
    """Read a run, finished or not. Raises ConfigError if there is none in `run_dir`."""
    spec = read_json(run_dir / "run.json")
    ordered = [entry["name"] for entry in _entries(spec.get("jobs")) if isinstance(entry.get("name"), str)]
    names = dict.fromkeys([*ordered, *_job_directories(run_dir)])
    if not names and not spec:
        raise ConfigError(
            f"{run_dir} is not a run directory: one has run.json and a directory with job.json per job; "
            "give the output_dir of a `tlora train` or `tlora cluster`"
        )
    if spec.get("status") in _GOING and _is_abandoned(run_dir):
        spec = {**spec, "status": KILLED}
    specs = {str(entry.get("name")): entry for entry in _entries(spec.get("jobs"))}
    specs = {name: specs.get(name, {}) | read_json(run_dir / name / "job.json") for name in names}
    status = str(spec.get("status", ""))
    homes = spec.get("homes")
    homes = homes if isinstance(homes, dict) else {}
    jobs = [
        replace(
            _read_job(run_dir / name, name, specs, status),
            gpu=_whole(homes.get(name), None),
            parts_on=_parts_on(spec, name),
            device=str(spec.get("device", "")),
        )
        for name in names
    ]
    rows = merge_gpus(read_rows(run_dir / "run.jsonl"))
    ends = [second for job in jobs for row in (job.train_rows[-1:], job.eval_rows[-1:]) for second in column(row, "seconds")]
    seconds = max((second for second in [*column(rows[-1:], "seconds"), *ends] if math.isfinite(second)), default=math.nan)
    return RunView(
        name=run_dir.resolve().name, spec=spec, rows=rows, jobs=jobs, seconds=seconds, num_tokens=sum(job.num_tokens for job in jobs)
    )


def _is_abandoned(run_dir: Path) -> bool:
    """Whether no process holds the run, nor the directory above it as a cluster's controller does: `jobs/` in it is its run."""
    top = run_dir.absolute().parent
    return is_free(run_dir) and (is_free(top) or not (top / "workers").is_dir())


def _parts_on(spec: JsonObject, name: str) -> tuple[int, ...]:
    """GPUs other than its lead that compute replicas of a job."""
    spans = spec.get("spans")
    span = spans.get(name) if isinstance(spans, dict) else None
    gpus = span.get("gpus") if isinstance(span, dict) else None
    return tuple(gpu for gpu in gpus[1:] if isinstance(gpu, int)) if isinstance(gpus, list) else ()


def _entries(value: object) -> list[JsonObject]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _job_directories(run_dir: Path) -> list[str]:
    """Directories that look like a job's: a run without a readable run.json still gets a page."""
    marks = ("job.json", "metrics.jsonl", "result.json")
    try:
        return sorted(entry.name for entry in run_dir.iterdir() if any((entry / mark).is_file() for mark in marks))
    except OSError:  # missing, not a directory, or not readable
        return []


def _read_job(directory: Path, name: str, specs: Mapping[str, JsonObject], run_status: str) -> JobView:
    result, rows = read_json(directory / "result.json"), read_rows(directory / "metrics.jsonl")
    spec = specs[name]
    train = [row for row in rows if "loss" in row]
    evals = [row for row in rows if "eval_loss" in row]
    losses, eval_losses = column(train, "loss"), column(evals, "eval_loss")
    finite = [index for index, loss in enumerate(eval_losses) if math.isfinite(loss)]
    best = min(finite, key=eval_losses.__getitem__) if finite else None
    last, logged = train[-1] if train else {}, logged_values(rows)
    times = [second for second in column(rows, "seconds") if math.isfinite(second)]
    sweep_of = result.get("sweep_of") or spec.get("sweep_of")
    settings = result.get("settings")
    return JobView(
        name=name,
        status=_status(result, run_status, bool(rows)),
        reason=str(result.get("reason") or ""),
        rank=_whole(result.get("rank"), spec.get("r")),
        steps=_whole(result.get("steps"), last.get("step")) or 0,
        total_steps=_whole(result.get("total_steps"), None),
        train_loss_first=_first_number(result, "train_loss_first", losses[:1]),
        train_loss=_first_number(result, "train_loss", [logged["loss"]] if "loss" in logged else []),
        eval_loss_first=_first_number(result, "eval_loss_first", eval_losses[:1]),
        eval_loss=_first_number(result, "eval_loss", [logged["eval_loss"]] if "eval_loss" in logged else []),
        eval_loss_best=_first_number(result, "eval_loss_best", [] if best is None else [eval_losses[best]]),
        best_step=_whole(result.get("best_step"), None if best is None else evals[best].get("step")),
        num_tokens=_whole(result.get("num_tokens"), logged.get("num_tokens")) or 0,
        seconds=_first_number(result, "seconds", [max(times) - min(times)] if times else []),
        sweep_of=str(sweep_of) if sweep_of else None,
        settings=settings if isinstance(settings, dict) else _swept_settings(spec, specs.values()),
        train_rows=train,
        eval_rows=evals,
        progress=_progress(spec, _whole(result.get("total_steps"), None), last),
        order=spec,
    )


def _swept_settings(spec: JsonObject, specs: Iterable[JsonObject]) -> JsonObject:
    """The fields in which the jobs of one sweep differ, with this job's values: the `settings` that its result will have."""
    if not spec.get("sweep_of"):
        return {}
    mine, *family = (_flat(other) for other in (spec, *(other for other in specs if other.get("sweep_of") == spec["sweep_of"])))
    return {key: value for key, value in mine.items() if any(other.get(key) != value for other in family)}


def _flat(spec: JsonObject) -> JsonObject:
    data = spec.get("data")
    return {key: value for key, value in spec.items() if key not in ("name", "data")} | (data if isinstance(data, dict) else {})


def _progress(spec: JsonObject, total_steps: int | None, last: JsonObject) -> float | None:
    steps = total_steps or number(spec.get("max_steps"))
    done, whole = (last.get("step"), steps) if steps > 0 else (last.get("epoch"), spec.get("num_train_epochs"))
    share = number(done) / number(whole) if number(whole) > 0 else math.nan
    return min(share, 1.0) if share >= 0 else None


def _status(result: JsonObject, run_status: str, has_rows: bool) -> str:
    status = str(result.get("status") or "")
    if status == "stopped" and run_status in _GOING:
        return "queued"  # the run was resumed, and this job waits for room
    if status:
        return status
    if run_status in ENDED:
        return "unfinished"  # the run ended, this job left no result
    return "training" if has_rows else "queued"


def _first_number(result: JsonObject, key: str, otherwise: Sequence[float]) -> float | None:
    """A result's number (also a NaN), else that of the rows."""
    value = result.get(key)
    if isinstance(value, int | float):
        return number(value)
    return otherwise[0] if otherwise else None


def _whole(value: object, otherwise: object) -> int | None:
    for candidate in (number(value), number(otherwise)):
        if math.isfinite(candidate):
            return int(candidate)
    return None
