"""Simulations for people: rows of metrics with their bounds, CSV files, and the numbers of the page in the report's own words.

How a page or a table looks is the report's; what a metric is, `metrics.py`'s.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from errno import EACCES, EISDIR, EWOULDBLOCK
from pathlib import Path

from tlora.durable import write_file
from tlora.errors import ConfigError
from tlora.report.rows import JsonObject
from tlora.report.simulation_view import PolicyView, SimulationView
from tlora.shape.cost import BaseConstants
from tlora.shape.moves import MOVE_SOURCES, MoveCosts
from tlora.sim.bounds import Bounds, ThroughputBound
from tlora.sim.metrics import compare_all, metrics, shared_gpus
from tlora.sim.records import GroupSpan, JobRecord, SimulationResult
from tlora.sim.trace import find_trace
from tlora.wording.numbers import quantity

REFERENCE = ("fifo", "peft")  # exclusive, without the kernels' gain: what the reference compares itself with

_SPAN_FIELDS = tuple(each.name for each in fields(GroupSpan))

MetricRow = dict[str, float | str]


def policy_name(policy: str, kernels: str) -> str:
    """What a policy under one set of kernels is called wherever people read it: as they would type it."""
    return f"{policy}/{kernels}"


def metric_rows(
    results: Sequence[SimulationResult], bounds: Sequence[Bounds], rates: Sequence[ThroughputBound] | None = None
) -> list[MetricRow]:
    """A row for each result: what it is, all its metrics, its bounds, and mean JCT and makespan as multiples of them.

    With `rates`, the upper bounds on tokens/s, and the steady tokens/s as a share of that for all work.
    """
    rows: list[MetricRow] = []
    unknown = ThroughputBound(math.nan, math.nan)
    for result, bound, rate in zip(results, bounds, rates or [unknown] * len(results), strict=True):
        measured = metrics(result)
        row: MetricRow = {"name": policy_name(result.policy, result.kernels), **_scene(result), **measured}
        row["mean_jct_bound_seconds"] = bound.mean_jct_seconds
        row["mean_jct_over_bound"] = measured["mean_jct_seconds"] / bound.mean_jct_seconds
        row["makespan_bound_seconds"] = bound.makespan_seconds
        row["makespan_over_bound"] = measured["makespan_seconds"] / bound.makespan_seconds
        if rates is not None:
            row["tokens_bound_per_second"] = rate.all_work
            row["cheapest_tokens_bound_per_second"] = rate.cheapest
            row["steady_over_bound"] = measured["steady_tokens_per_second"] / rate.all_work
        rows.append(row | {"decisions": float(result.decisions), "wall_seconds": result.wall_seconds})
    return rows


def write_metrics_csv(path: Path, rows: Sequence[Mapping[str, float | str]]) -> None:
    """A line per row of `metric_rows`; empty where there is no value. Decision and wall times differ from run to run, nothing else."""
    _write_csv(path, list(rows[0]) if rows else [], rows)


def write_job_csv(path: Path, results: Iterable[SimulationResult]) -> None:
    """A line per job of each result: what was simulated, then the fields of its record, then `jct_seconds` (empty unless done)."""
    scene, names = ["policy", "kernels", "trace", "seed", "num_gpus", "load"], [each.name for each in fields(JobRecord)]
    rows = [
        _scene(result) | {name: getattr(job, name) for name in names} | {"jct_seconds": _jct(job)}
        for result in results
        for job in result.jobs
    ]
    _write_csv(path, [*scene, *names, "jct_seconds"], rows)


def constant_rows(constants: Mapping[str, Mapping[str, BaseConstants]]) -> list[JsonObject]:
    """Each constant of each base under each set of kernels, with where it was measured or that it was not."""
    return [
        {"kernels": kernels, "base": base, "field": name, "value": float(getattr(of_base, name)), "source": source}
        for kernels, bases in constants.items()
        for base, of_base in bases.items()
        for name, source in of_base.source.items()
        if hasattr(of_base, name)
    ]


def move_rows(moves: MoveCosts) -> list[JsonObject]:
    """As `constant_rows`, what moves cost, whichever base and kernels."""
    return [
        {"kernels": "all", "base": "all", "field": name, "value": float(getattr(moves, name)), "source": source}
        for name, source in MOVE_SOURCES.items()
    ]


def simulation_view(
    results: Sequence[SimulationResult],
    rows: Sequence[MetricRow],
    constants: Sequence[JsonObject] = (),
    sweep: Sequence[Mapping[str, float | str]] = (),
) -> SimulationView:
    """The numbers of a page over `results` of one trace, load, seed and cluster; `rows` are their `metric_rows`.

    `sweep` has rows of policy, kernels, load, seed, mean_jct_seconds, one for each of these, or is empty.
    """
    assert results, "a page needs a simulation"
    names = [policy_name(result.policy, result.kernels) for result in results]
    assert len(set(names)) == len(names), f"two results of one policy and kernels: {names}"
    first = results[0]
    reference = policy_name(*REFERENCE) if any((result.policy, result.kernels) == REFERENCE for result in results) else names[0]
    ratios: list[JsonObject] = []
    for against, compared in sorted(zip(names, compare_all(results), strict=True), key=lambda pair: pair[0] != reference):
        ratios += [dict(row) | {"name": name, "against": against} for name, row in zip(names, compared, strict=True)]
    settings = {"trace": first.trace, "GPUs": first.num_gpus, "load": first.load, "seed": first.seed, "jobs": len(first.jobs)}
    return SimulationView(
        title=f"{quantity(len(first.jobs), 'job')} of {first.trace} on {quantity(first.num_gpus, 'GPU')}",
        num_gpus=first.num_gpus,
        settings=settings | first.settings,
        policies=[_policy_view(result, row) for result, row in zip(results, rows, strict=True)],
        ratios=ratios,
        reference=reference,
        sweep=[dict(row) | {"name": policy_name(str(row["policy"]), str(row["kernels"]))} for row in sweep],
        constants=constants,
        warnings=first.warnings,
    )


def write_document(path: Path, document: JsonObject) -> None:
    """Write what a command found as JSON."""
    write_result(path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _policy_view(result: SimulationResult, row: MetricRow) -> PolicyView:
    samples = result.samples
    columns = {
        "seconds": [sample.seconds for sample in samples],
        "waiting_jobs": [float(sample.waiting_jobs) for sample in samples],
        "allocated_share": [sample.allocated_gpus / max(1, sample.max_gpus) for sample in samples],
        "useful_share": [sample.useful_share for sample in samples],
        "allocated_gpus": [float(sample.allocated_gpus) for sample in samples],
        "shared_gpus": shared_gpus(result.spans, [sample.seconds for sample in samples]),
    }
    ends = [job.finished_seconds for job in result.jobs if math.isfinite(job.finished_seconds)]
    return PolicyView(
        name=policy_name(result.policy, result.kernels),
        policy=result.policy,
        kernels=result.kernels,
        metrics={key: value for key, value in row.items() if not isinstance(value, str)},
        jct_seconds=[_jct(job) for job in result.jobs if job.state == "done"],
        samples=columns,
        end_seconds=max([*ends, *columns["seconds"][-1:]], default=0.0),
        spans=[{name: getattr(span, name) for name in _SPAN_FIELDS} for span in result.spans],
    )


def _jct(job: JobRecord) -> float:
    return job.finished_seconds - job.submitted_seconds if job.state == "done" else math.nan


def _scene(result: SimulationResult) -> dict[str, float | str]:
    return {
        "policy": result.policy,
        "kernels": result.kernels,
        "trace": result.trace,
        "seed": result.seed,
        "num_gpus": result.num_gpus,
        "load": result.load,
    }


def _write_csv(path: Path, heads: Sequence[str], rows: Sequence[Mapping[str, object]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, heads, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: "" if isinstance(value, float) and math.isnan(value) else value for key, value in row.items()})
    write_result(path, text.getvalue())


def check_results(trace: str, results: Sequence[tuple[str, Path]]) -> None:
    """Raises ConfigError where one of `results`, an option and its file each, cannot be written, or is the trace or another result.

    Makes their directories.
    """
    owners = {_target(find_trace(trace)[1]): "--trace"}
    for option, path in results:
        if owner := owners.get(_target(path)):
            raise ConfigError(f"{option} {path} is the file of {owner} too, whose content would be lost. Give another path")
        owners[_target(path)] = option
    for _, path in results:
        _check_writable(path)


def write_result(path: Path, content: str | bytes, remedy: str = "Free space or change its mode there, or give another path") -> None:
    """Make the file, or the one that it links to, hold `content`: the old or the new content at every moment. Raises ConfigError."""
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, content)
    except OSError as error:
        first = error.__cause__ if isinstance(error.__cause__, OSError) else error  # write_file's remedies are those of a training run
        raise ConfigError(f"{path} cannot be written ({first.strerror}). {remedy}") from None


@contextmanager
def held(path: Path) -> Generator[None]:
    """Keep other sweeps from writing `path` meanwhile: each would overwrite the other's rows. Raises ConfigError.

    The lock is a file in the same directory, as the table itself is replaced all the time. A killed sweep holds no lock.
    """
    target = _target(path)
    lock = target.with_name(f".{target.name}.lock")
    handle = None
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(handle).st_nlink:  # its holder deleted it between the two calls
            raise BlockingIOError(EWOULDBLOCK, "locked")
    except OSError as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"out {path} is being written by another sweep. Wait for its end, or give another file") from None
        raise ConfigError(f"out {path} cannot be written ({lock}: {error.strerror}). Put that right, or give another path") from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def _target(path: Path) -> Path:
    """What is really written: links are followed, so that they stay links."""
    return Path(os.path.realpath(path))


def _check_writable(path: Path) -> None:
    target = _target(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(EISDIR, "it is a directory")
        if target.exists() and not target.is_file():
            raise PermissionError(EACCES, "it is no plain file, and a result replaces what is there")
        if not all(os.access(place, os.W_OK) for place in (target.parent, target) if place.exists()):
            raise PermissionError(EACCES, "this user may not write there")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Give another path") from None
