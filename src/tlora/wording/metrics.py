"""The metrics of a simulation in words, for the terminal and the page: keys, labels, units, which way is better, meanings.

The numbers are computed in `sim/`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tlora.wording.numbers import DASH, count_text, duration_text

Kind = Literal["duration", "share", "ratio", "rate", "count", "milliseconds"]
TIMES = "\u00d7"


@dataclass(frozen=True)
class Metric:
    """One number of a policy: its key, its name on the page and in a terminal, unit, whether less or more is better, its meaning."""

    key: str
    label: str
    short: str
    kind: Kind
    better: Literal["less", "more", ""]
    meaning: str


_COMPLETION = (
    Metric("mean_jct_seconds", "mean JCT", "mean JCT", "duration", "less", "Submission to end of the jobs that are done, mean."),
    Metric("mean_jct_bound_seconds", "its bound", "", "duration", "", "No schedule can have a lower mean JCT (speeds as believed)."),
    Metric("mean_jct_over_bound", f"{TIMES} bound", f"{TIMES}bound", "ratio", "less", "Mean JCT over its bound."),
    Metric("median_jct_seconds", "median JCT", "median", "duration", "less", "Half of the jobs are done in less."),
    Metric("p90_jct_seconds", "p90 JCT", "", "duration", "less", "Nine of ten jobs are done in less."),
    Metric("p99_jct_seconds", "p99 JCT", "p99", "duration", "less", "99 of 100 jobs are done in less."),
    Metric("queueing_share", "queueing", "queued", "share", "less", "Time in no group over JCT, summed over the jobs that are done."),
    Metric("makespan_seconds", "makespan", "makespan", "duration", "less", "First submission to the last end."),
    Metric("makespan_bound_seconds", "its bound", "", "duration", "", "No schedule can have a lower makespan (speeds as believed)."),
    Metric("makespan_over_bound", f"{TIMES} bound", "", "ratio", "less", "Makespan over its bound."),
)
_PROMISES = (
    Metric(
        "slowdown_p50", "slowdown p50", "", "ratio", "less", "Time between a job's steps over that alone, its mean; median of the jobs."
    ),
    Metric("slowdown_p99", "slowdown p99", "", "ratio", "less", "The same, 99th percentile of the jobs."),
    Metric("worst_slowdown_p99", "worst window p99", "", "ratio", "less", "Each job's slowest window of 10 steps, p99 of the jobs."),
    Metric("windows_beyond_share", "beyond bound", "beyond", "share", "less", "Windows of 10 steps slower than their job's bound allows."),
    Metric("windows_with_moves_share", "windows with a move", "", "share", "", "Windows in which the job stood still, of all windows."),
    Metric("windows_with_moves_beyond_share", "of these beyond", "", "share", "less", "Windows with a move that are beyond the bound."),
    Metric("missing_jobs_share", "jobs that miss", "miss", "share", "less", "Jobs with any window beyond their bound."),
    Metric(
        "missing_without_moves_share",
        "without a move",
        "",
        "share",
        "less",
        "Jobs with a window beyond in which they never stood still.",
    ),
    Metric("worst_window_over_bound", f"worst {TIMES} bound", "", "ratio", "less", "The slowest window of all jobs over its job's bound."),
    Metric(
        "late_jobs_share",
        "late jobs",
        "late",
        "share",
        "less",
        "Jobs with (end - first start - time in no group) / alone above the bound.",
    ),
    Metric(
        "stretch_over_bound_p99", f"p99 {TIMES} bound", "", "ratio", "less", "That quotient over the bound, 99th percentile of the jobs."
    ),
    Metric(
        "pauses_p95", "pauses p95", "pauses", "share", "less", "Standing still in a group over the time alone, 95th percentile of the jobs."
    ),
    Metric("fairness_mean", "fairness mean", "", "ratio", "less", "JCT over the time alone on the job's own GPUs with the same kernels."),
    Metric("fairness_p99", "fairness p99", "", "ratio", "less", "The same, 99th percentile."),
    Metric("tenant_fairness", "tenants (Jain)", "", "ratio", "more", "Jain's index of time alone / JCT between tenants; 1 is even."),
)
_MACHINES = (
    Metric("useful_utilisation", "useful utilisation", "useful", "share", "more", "Useful tokens over what all GPUs could do saturated."),
    Metric("allocated_utilisation", "allocated", "alloc", "share", "", "GPUs that belong to a group, busy or not."),
    Metric("shared_gpu_share", "shared", "shared", "share", "", "Of the GPU time in groups, that in groups of two jobs or more."),
    Metric("tokens_per_second", "tokens/s", "", "rate", "more", "Useful tokens of all jobs per second, first submission to last end."),
    Metric("steady_tokens_per_second", "steady tokens/s", "steady", "rate", "more", "Tokens/s from 5 to 60 % of the total work."),
    Metric("regroupings_per_job", "moves per job", "moves", "ratio", "", "How often a job was moved to another group."),
    Metric("decision_milliseconds", "per decision", "decision", "milliseconds", "less", "Wall time of one decision of the scheduler."),
)
_COUNTS = tuple(
    Metric(f"jobs_{state}", state, "", "count", "", meaning)
    for state, meaning in (
        ("done", "Jobs that ran to their end."),
        ("cancelled", "Cancelled, as in the trace."),
        ("failed", "Failed, as in the trace."),
        ("unknown", "Ended in a state that the trace does not explain; not in the completion times."),
        ("rejected", "Refused at submission: they can never run here."),
        ("unfinished", "Still waiting or running when the simulation ended."),
    )
)
GROUPS: Mapping[str, tuple[Metric, ...]] = {
    "Completion": _COMPLETION,
    "Promises and fairness": _PROMISES,
    "Machines and moves": _MACHINES,
    "Jobs by state": _COUNTS,
}


def metric_text(kind: Kind, value: float) -> str:
    """A value with its unit; a dash where there is none."""
    if not math.isfinite(value):
        return DASH
    if kind == "duration":
        return duration_text(value)
    if kind == "share":
        return f"{100 * value:.3g} %" if 0 < abs(value) < 0.01 else f"{100 * value:.1f} %"
    if kind == "rate":
        return count_text(value)
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "milliseconds":
        return f"{value:.3g} ms"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


CHAIN = (  # a policy with its kernels, and what it has that the one before it has not
    ("fifo/peft", "first in, first out"),
    ("fifo/tlora", "kernels"),
    ("backfill/tlora", "backfill"),
    ("sjf/tlora", "shortest first"),
    ("srtf/tlora", "preemption"),
    ("residual_capacity-order-only/tlora", "order"),
    ("residual_capacity-no-sharing/tlora", "growth"),
    ("residual_capacity/tlora", "sharing"),
)


def factors(gains: Mapping[str, float]) -> list[tuple[str, float]]:
    """The factor by which each addition shortens mean JCT, from `gains` over the first of the chain, so that their product is the gain of
    the last. The factor of a missing policy is merged with the next.

    Empty unless the first and the last of the chain are there, and one between them.
    """
    found: list[tuple[str, float]] = []
    added: list[str] = []
    present = [name for name, _ in CHAIN if math.isfinite(gains.get(name, math.nan))]
    if len(present) < 3 or (present[0], present[-1]) != (CHAIN[0][0], CHAIN[-1][0]):
        return []
    before = gains[present[0]]
    for name, means in CHAIN[1:]:
        added.append(means)
        if name in present:
            found.append((" and ".join(added), gains[name] / before))
            before, added = gains[name], []
    return found


def decomposition_text(gains: Mapping[str, float]) -> str:
    """The factors as one product; empty without them."""
    found = factors(gains)
    if not found:
        return ""
    total = math.prod(factor for _, factor in found)
    return f"{total:.2f} = " + f" {TIMES} ".join(f"{means} {factor:.2f}" for means, factor in found)
