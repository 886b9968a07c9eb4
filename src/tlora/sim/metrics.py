"""The metrics of a simulation (docs/reference/simulator.md) and their ratios between policies. Pure arithmetic on `records.py`.

Lower bounds to hold them against: `bounds.py`. Files and pages: `outputs.py`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from tlora.sim.records import FinalState, GroupSpan, JobRecord, Sample, SimulationResult

_ROUNDING = 1e-9
STEADY = (0.05, 0.6)  # shares of the work between which throughput counts as steady

Ratios = dict[str, float | str]


def metrics(result: SimulationResult) -> dict[str, float]:
    """All metrics of one simulation; nan where there is nothing to measure, never an error.

    Completion times (JCT = end - submission), queueing and fairness are those of jobs that are done: cancelled, failed, rejected and
    unfinished ones are only counted. Slowdowns are those of every job that has a window of 10 steps.
    queueing_share: sum of time in no group over sum of JCT; nan without spans.
    makespan_seconds: first submission to last end, rejected jobs left out.
    slowdown_*: over jobs, of the mean over each job's windows; worst_slowdown_p99: of each job's worst window.
    windows_beyond_share: windows beyond their job's bound over all windows; windows_with_moves_beyond_share: of those with a move in them.
    missing_jobs_share: jobs with a window beyond, over jobs; missing_without_moves_share: with one that has no move in it.
    late_jobs_share: jobs whose time in groups, from their first run on, is above max_slowdown * their time alone; pauses_p95: the 95th
    percentile of standing still over time alone.
    fairness_*: JCT / (time alone on its own GPUs, same kernels). tenant_fairness: Jain's index (1 is even) over tenants of the mean of
    time alone / JCT.
    steady_tokens_per_second: tokens/s from the moment when 5 % of all tokens are done until 60 % are.
    shared_gpu_share: of the GPU time in groups, that in groups of two jobs or more; nan without spans.
    allocated_utilisation, useful_utilisation: weighted by GPU time, tokens_per_second by time, first submission to last end.
    """
    done = [job for job in result.jobs if job.state == "done"]
    jct = [_jct(job) for job in done]
    alone = [job for job in done if job.alone_seconds > 0]
    ratios = [_jct(job) / job.alone_seconds for job in alone]
    tenants: defaultdict[str, list[float]] = defaultdict(list)
    for job in alone:
        tenants[job.tenant].append(job.alone_seconds / _jct(job))
    states = Counter(job.state for job in result.jobs)
    started = sum(math.isfinite(job.started_seconds) for job in result.jobs)
    return {
        **_spread(jct),
        "queueing_share": _queueing_share(result, done),
        "makespan_seconds": _makespan(result),
        **_slowdowns(result.jobs),
        **_stretches(done),
        "fairness_mean": _mean(ratios),
        "fairness_p99": _percentile(ratios, 99),
        "tenant_fairness": _jain([_mean(rates) for rates in tenants.values()]),
        **_utilisation(result),
        "steady_tokens_per_second": _steady_tokens_per_second(result.samples),
        "shared_gpu_share": _shared_gpu_share(result.spans),
        "regroupings_per_job": _ratio(sum(job.regroupings for job in result.jobs), started),
        "decision_milliseconds": 1e3 * _ratio(result.decision_seconds, result.decisions),
        **{f"jobs_{state}": float(states[state]) for state in get_args(FinalState)},
    }


def metrics_by_base(result: SimulationResult) -> list[dict[str, float | str]]:
    """Of each base, by name: jobs that are done and their mean JCT, GPU time of its groups, that in groups of two jobs or more, and tokens
    of jobs that ran to an end over its GPU time.
    """
    found: list[dict[str, float | str]] = []
    for base in sorted({job.base_model for job in result.jobs}):
        done = [_jct(job) for job in result.jobs if job.base_model == base and job.state == "done"]
        ran = [job for job in result.jobs if job.base_model == base and math.isfinite(job.finished_seconds)]
        spans = [span for span in result.spans if span.base_model == base]
        gpu_seconds = math.fsum(len(span.gpus) * (span.end_seconds - span.start_seconds) for span in spans)
        tokens = math.fsum(job.tokens_per_step * job.steps for job in ran)
        row: dict[str, float | str] = {"base": base, "jobs_done": float(len(done)), "mean_jct_seconds": _mean(done)}
        row |= {"gpu_seconds": gpu_seconds, "shared_gpu_share": _shared_gpu_share(spans)}
        found.append(row | {"tokens_per_gpu_second": _ratio(tokens, gpu_seconds)})
    return found


def compare(results: Iterable[SimulationResult], baseline: SimulationResult) -> list[Ratios]:
    """How many times better than `baseline` each result is: above 1 is better in every column.

    Completion times over the `jobs_compared` that are done in both, so that a policy gains nothing from jobs that it loses; makespan and
    the cluster's means as each has them. All must replay the same trace at the same load, GPUs and seed.
    """
    before = _measured(baseline)
    return [_ratios(_measured(result), before) for result in results]


def compare_all(results: Iterable[SimulationResult]) -> list[list[Ratios]]:
    """`compare` with each result as the baseline, in their order."""
    measured = [_measured(result) for result in results]
    return [[_ratios(after, before) for after in measured] for before in measured]


@dataclass(frozen=True, slots=True)
class _Measured:
    """What of a result is compared: JCT by job, makespan and means of the cluster."""

    result: SimulationResult
    jct: dict[str, float]
    makespan: float
    cluster: dict[str, float]


def _measured(result: SimulationResult) -> _Measured:
    jct = {job.job_id: _jct(job) for job in result.jobs if job.state == "done"}
    return _Measured(result, jct, _makespan(result), _utilisation(result))


def _ratios(after: _Measured, before: _Measured) -> Ratios:
    mine, other = after.result, before.result
    assert _scene(mine) == _scene(other), f"{_scene(mine)} is not {_scene(other)}"
    both = [job_id for job_id in after.jct if job_id in before.jct]
    now, then = _spread([after.jct[job_id] for job_id in both]), _spread([before.jct[job_id] for job_id in both])
    row: Ratios = {"policy": mine.policy, "kernels": mine.kernels, "against": other.policy, "against_kernels": other.kernels}
    row |= {"jobs_compared": float(len(both))} | {key: _ratio(then[key], now[key]) for key in now}
    row["makespan_seconds"] = _ratio(before.makespan, after.makespan)
    return row | {key: _ratio(after.cluster[key], before.cluster[key]) for key in after.cluster}


def _scene(result: SimulationResult) -> tuple[str, int, int, float]:
    return result.trace, result.seed, result.num_gpus, result.load


def _jct(job: JobRecord) -> float:
    seconds = job.finished_seconds - job.submitted_seconds
    assert seconds > 0, f"job {job.job_id} is {job.state} {seconds} s after its submission"
    return seconds


def _spread(jct: Sequence[float]) -> dict[str, float]:
    median, p90, p99 = np.percentile(jct, (50, 90, 99)).tolist() if jct else [math.nan] * 3
    return {"mean_jct_seconds": _mean(jct), "median_jct_seconds": median, "p90_jct_seconds": p90, "p99_jct_seconds": p99}


def _queueing_share(result: SimulationResult, done: Sequence[JobRecord]) -> float:
    if not result.spans:
        return math.nan
    running: defaultdict[str, float] = defaultdict(float)
    for span in result.spans:
        for job_id in span.job_ids:
            running[job_id] += span.end_seconds - span.start_seconds
    total = sum(_jct(job) for job in done)
    return _ratio(max(0.0, total - sum(running[job.job_id] for job in done)), total)  # sums in another order may differ by their rounding


def _steady_tokens_per_second(samples: Sequence[Sample]) -> float:
    """While neither the first groups start nor the last jobs are left: from 5 to 60 % of the work."""
    seconds = np.array([sample.seconds for sample in samples])
    if len(seconds) < 2:
        return math.nan
    tokens = np.array([sample.tokens_per_second for sample in samples[:-1]]) * np.diff(seconds)
    done = np.concatenate([[0.0], np.cumsum(tokens)])
    first, last = (float(np.interp(share * float(done[-1]), done, seconds)) for share in STEADY)
    return _ratio((STEADY[1] - STEADY[0]) * float(done[-1]), last - first) if done[-1] > 0 else math.nan


def _shared_gpu_share(spans: Sequence[GroupSpan]) -> float:
    seconds = [(len(span.gpus) * (span.end_seconds - span.start_seconds), len(span.job_ids)) for span in spans]
    return _ratio(math.fsum(own for own, members in seconds if members > 1), math.fsum(own for own, _ in seconds))


def shared_gpus(spans: Sequence[GroupSpan], edges: Sequence[float]) -> list[float]:
    """The mean number of GPUs in groups of two jobs or more, from each of `edges` to the next; 0 after the last."""
    shared = [span for span in spans if len(span.job_ids) > 1]
    times = np.array([span.start_seconds for span in shared] + [span.end_seconds for span in shared])
    gpus = np.array([len(span.gpus) for span in shared], dtype=float)
    order = np.argsort(times, kind="stable")
    times, standing = times[order], np.cumsum(np.concatenate([gpus, -gpus])[order])
    if not len(times) or len(edges) < 2:
        return [0.0] * len(edges)
    until = np.concatenate([[0.0], np.cumsum(standing[:-1] * np.diff(times))])  # GPU-seconds up to each of `times`
    seconds = np.diff(edges)
    means = np.divide(np.diff(np.interp(edges, times, until)), seconds, out=np.zeros(len(seconds)), where=seconds > 0)
    return [*np.maximum(means, 0.0).tolist(), 0.0]


def _makespan(result: SimulationResult) -> float:
    first, last = _stretch(result)
    return last - first


def _stretch(result: SimulationResult) -> tuple[float, float]:
    """First submission and last end of the jobs that were not rejected; nan for what there is not."""
    admitted = [job for job in result.jobs if job.state != "rejected"]
    ends = [job.finished_seconds for job in admitted if math.isfinite(job.finished_seconds)]
    return min((job.submitted_seconds for job in admitted), default=math.nan), max(ends, default=math.nan)


def _slowdowns(jobs: Sequence[JobRecord]) -> dict[str, float]:
    seen = [job for job in jobs if job.windows]
    mean = [job.mean_slowdown for job in seen]
    return {
        "slowdown_p50": _percentile(mean, 50),
        "slowdown_p99": _percentile(mean, 99),
        "worst_slowdown_p99": _percentile([job.worst_slowdown for job in seen], 99),
        "windows_beyond_share": _ratio(sum(job.windows_beyond for job in seen), sum(job.windows for job in seen)),
        "windows_with_moves_share": _ratio(sum(job.windows_with_moves for job in seen), sum(job.windows for job in seen)),
        "windows_with_moves_beyond_share": _ratio(
            sum(job.windows_with_moves_beyond for job in seen), sum(job.windows_with_moves for job in seen)
        ),
        "missing_jobs_share": _ratio(sum(job.windows_beyond > 0 for job in seen), len(seen)),
        "missing_without_moves_share": _ratio(sum(job.windows_beyond > job.windows_with_moves_beyond for job in seen), len(seen)),
        "worst_window_over_bound": max((job.worst_slowdown / job.max_slowdown for job in seen), default=math.nan),
    }


def _stretches(done: Sequence[JobRecord]) -> dict[str, float]:
    """Of the jobs that are done, from first run to end without the time in no group."""
    seen = [job for job in done if job.alone_seconds > 0 and math.isfinite(job.group_seconds)]
    stretches = [job.group_seconds / job.alone_seconds / job.max_slowdown for job in seen]
    return {
        "late_jobs_share": _ratio(sum(stretch > 1 + _ROUNDING for stretch in stretches), len(seen)),
        "stretch_over_bound_p99": _percentile(stretches, 99),
        "pauses_p95": _percentile([job.paused_seconds / job.alone_seconds for job in seen], 95),
    }


def _utilisation(result: SimulationResult) -> dict[str, float]:
    """Means over the samples, each of which holds until the next, between first submission and last end."""
    first, last = _stretch(result)
    keys = ("useful_utilisation", "allocated_utilisation", "tokens_per_second")
    if not result.samples or not last > first:
        return dict.fromkeys(keys, math.nan)
    edges = np.clip(np.array([sample.seconds for sample in result.samples] + [math.inf]), first, last)
    seconds = np.diff(edges)
    assert (seconds >= 0).all(), "samples are not in the order of time"
    gpu_seconds = seconds * np.array([sample.max_gpus for sample in result.samples], dtype=float)
    useful = np.array([sample.useful_share for sample in result.samples]) @ gpu_seconds
    allocated = np.array([sample.allocated_gpus for sample in result.samples], dtype=float) @ seconds
    tokens = np.array([sample.tokens_per_second for sample in result.samples]) @ seconds
    means = (_ratio(float(useful), float(gpu_seconds.sum())), _ratio(float(allocated), float(gpu_seconds.sum())))
    return dict(zip(keys, (*means, _ratio(float(tokens), float(seconds.sum()))), strict=True))


def _jain(values: Sequence[float]) -> float:
    """(sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything (Jain, Chiu, Hawe 1984)."""
    return _ratio(sum(values) ** 2, len(values) * sum(value * value for value in values))


def _mean(values: Sequence[float]) -> float:
    return _ratio(math.fsum(values), len(values))


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if len(values) else math.nan


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan
