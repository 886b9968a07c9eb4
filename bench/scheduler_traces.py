"""How `residual_capacity` does on synthetic traces that it was not tuned on, against the best of backfill, srtf and las.

    python -m bench.scheduler_traces [--seeds 100 299] [--jobs N] [--commit NAME] [--json FILE]

For each seed: mean JCT over that of the baseline with the least mean JCT, and p99 over the p99 of that same baseline. All policies have the
same kernels, and the cluster behaves as they believe. A trace above 1.03 is told in detail: the ratio for jobs of each width, and the ratio
with each means of the policy switched off. Seeds 0-99 are for tuning. The same seeds give the same numbers.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import machine
from bench.synthetic_traces import REPORTED, SyntheticTrace, synthetic_trace
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Policy
from tlora.scheduler.settings import Settings
from tlora.shape.cost import CostModel
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import MappedJob, mapped_jobs
from tlora.sim.records import SimulationResult
from tlora.sim.scenario import Scenario, cost_of
from tlora.sim.simulate import simulate

BASELINES = ("backfill", "srtf", "las")
LISTED = 1.03  # a trace with a greater ratio is told in detail
MEANS = {
    "sharing": Settings(sharing=False),
    "growth": Settings(elastic=False),
    "preemption": Settings(preemption=False),
    "starvation": Settings(starvation_factor=math.inf),
}


def setting_of(made: SyntheticTrace) -> tuple[list[MappedJob], ClusterShape, CostModel]:
    """Its jobs, which were as long as they are with PEFT, its cluster, and what our kernels cost."""
    scenario = Scenario()
    jobs = mapped_jobs(made.trace, cost_of(scenario, "peft"), made.seed, made.gpus_per_node)
    return jobs, ClusterShape(made.nodes, made.gpus_per_node), cost_of(scenario, "tlora")


def run(made: SyntheticTrace, policy: Policy) -> SimulationResult:
    """The trace under a policy, with our kernels. All of its jobs end."""
    jobs, shape, cost = setting_of(made)
    result = simulate(jobs, shape, policy, cost)
    unfinished = [job.job_id for job in result.jobs if job.state != "done"]
    assert not unfinished, f"seed {made.seed}: {unfinished[0]} has not ended"
    return result


def compared(made: SyntheticTrace) -> dict[str, Any]:
    """One trace: the ratios, and what they are of."""
    theirs = {name: _completion_seconds(run(made, POLICIES[name]())) for name in BASELINES}
    best = min(BASELINES, key=lambda name: float(np.mean(theirs[name])))
    result = run(made, residual_capacity())
    own = _completion_seconds(result)
    row: dict[str, Any] = {
        "seed": made.seed,
        "gpus": made.num_gpus,
        "load": round(made.load, 3),
        **made.kind,
        "jobs": len(own),
        "best": best,
        "mean_jct_hours": {name: round(float(np.mean(each)) / 3600, 4) for name, each in (*theirs.items(), ("residual_capacity", own))},
        "mean_jct": float(np.mean(own) / np.mean(theirs[best])),
        "p99_jct": float(np.percentile(own, 99) / np.percentile(theirs[best], 99)),
    }
    if row["mean_jct"] > LISTED:
        row["mean_jct_by_width"] = _by_width(made, own, theirs[best])
        row["mean_jct_without"] = {
            name: float(np.mean(_completion_seconds(run(made, residual_capacity(settings)))) / np.mean(theirs[best]))
            for name, settings in MEANS.items()
        }
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of both ratios over all traces."""
    return {
        key: {
            "geometric_mean": statistics.geometric_mean([row[key] for row in rows]),
            "p95": float(np.percentile([row[key] for row in rows], 95)),
            "worst": max(row[key] for row in rows),
        }
        for key in ("mean_jct", "p99_jct")
    } | {"share": {"mean_jct up to 1.03": _share(rows, "mean_jct", 1.03), "p99_jct up to 1.2": _share(rows, "p99_jct", 1.2)}}


def _share(rows: Sequence[dict[str, Any]], key: str, most: float) -> float:
    return sum(row[key] <= most for row in rows) / len(rows)


def _completion_seconds(result: SimulationResult) -> list[float]:
    """In the order of the trace."""
    return [job.finished_seconds - job.submitted_seconds for job in result.jobs]


def _by_width(made: SyntheticTrace, own: Sequence[float], theirs: Sequence[float]) -> dict[str, dict[str, float]]:
    """Of jobs of one GPU, within a node, up to a quarter of the cluster and above: how many, their ratio, and the hours lost by all."""
    edges = (("one GPU", 1), ("a node", made.gpus_per_node), ("a quarter", made.num_gpus // 4), ("more", made.num_gpus))
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for job, mine, other in zip(made.trace.jobs, own, theirs, strict=True):
        found[next(name for name, most in edges if job.gpus <= most)].append((mine, other))
    return {
        name: {
            "jobs": len(pairs),
            "ratio": sum(mine for mine, _ in pairs) / sum(other for _, other in pairs),
            "hours_lost": sum(mine - other for mine, other in pairs) / 3600,
        }
        for name, pairs in found.items()
    }


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    kind = f"{row['gpus']:>5} GPUs, load {row['load']:.2f}, {row['widths']}, {row['lengths']}, {row['arrivals']}"
    return f"seed {row['seed']:>3}: mean JCT {row['mean_jct']:.3f} and p99 {row['p99_jct']:.3f} of {row['best']:<8} {kind}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs=2, type=int, default=(REPORTED[0], REPORTED[-1]), metavar=("FIRST", "LAST"))
    parser.add_argument("--jobs", type=int, help="instead of as many as a trace has, 1,000 to 2,000")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    first, last = args.seeds
    if not 0 <= first <= last:
        parser.error(f"seeds {first} to {last} are none. Give a first one of at least 0 and a last one that is no smaller")
    if args.jobs is not None and args.jobs < 2:
        parser.error(f"a trace of {args.jobs} jobs has no load. Give 2 or more")
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"benchmark": "scheduler_traces", **machine.facts(torch.device("cpu"), args.commit)}
    for seed in range(first, last + 1):
        rows.append(compared(synthetic_trace(seed, args.jobs)))
        print(line(rows[-1]), flush=True)
        machine.write(args.json, report | {"summary": summary(rows), "rows": rows})
    for key, found in summary(rows).items():
        print(f"{key}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
