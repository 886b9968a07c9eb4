"""A user's own case, simulated: a sweep of 64 equal jobs on 8 GPUs, batches of 4 short samples. How long until all are done?

    python -m bench.sweep_of_jobs [--steps 10000] [--gpu h200-from-128] [--commit NAME] [--json FILE]

One after another, a GPU each, with PEFT's speed at its best and as TRL runs it, packed; the same with our kernels; and together under
`residual_capacity`, with a bound of 1.5, 2, 4 and without one, and under mLoRA's rule (`memory`). All are submitted at once. Starts and
joins take what `tlora simulate` charges: each job of PEFT or TRL is a process of its own, and our workers stand on from job to job. The
same arguments give the same numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import machine
from tlora.errors import ConfigError
from tlora.protocol import JobProfile, JobSubmitted
from tlora.scheduler.policies import POLICIES
from tlora.shape.cost import CostModel
from tlora.shape.hardware import cost_model
from tlora.shape.moves import MoveCosts
from tlora.sim.conditions import Conditions
from tlora.sim.machines import ClusterShape
from tlora.sim.mapping import MappedJob, adapter_parameters
from tlora.sim.metrics import metrics
from tlora.sim.scenario import NO_BOUND
from tlora.sim.simulate import simulate

JOBS, GPUS, SAMPLES, RANK = 64, 8, 4, 16
MEAN_TOKENS = (64, 128, 256, 512)
WAYS = (
    ("one after another, PEFT", "fifo", "peft", NO_BOUND),
    ("one after another, TRL", "fifo", "trl", NO_BOUND),
    ("one after another, ours", "fifo", "tlora", NO_BOUND),
    ("together, bound 1.5", "residual_capacity", "tlora", 1.5),
    ("together, bound 2", "residual_capacity", "tlora", 2.0),
    ("together, bound 4", "residual_capacity", "tlora", 4.0),
    ("together, no bound", "residual_capacity", "tlora", NO_BOUND),
    ("memory-only grouping", "memory", "tlora", NO_BOUND),
)


def made_jobs(base: str, mean_tokens: int, steps: int, max_slowdown: float, cost: CostModel) -> list[MappedJob]:
    """All alike: one GPU each, samples up to four times the mean."""
    tokens = float(SAMPLES * mean_tokens)
    histogram = (0,) * (mean_tokens.bit_length() - 1) + (128,)
    profile = JobProfile(tokens, steps, 4 * mean_tokens, adapter_parameters(RANK, "all-linear"), histogram)
    step_seconds = cost.alone_step_seconds(base, tokens, 1)
    return [
        MappedJob(
            0.0,
            steps * step_seconds,
            step_seconds,
            JobSubmitted(f"j{index}", base, 1, profile, max_slowdown=max_slowdown),
            samples_per_step=SAMPLES,
        )
        for index in range(JOBS)
    ]


def compared(gpu: str, base: str, mean_tokens: int, steps: int) -> dict[str, Any]:
    """Makespan and mean JCT of each way, and how many times as fast as the first it is."""
    row: dict[str, Any] = {"base": base, "mean_tokens": mean_tokens, "ways": {}}
    for name, policy, kernels, bound in WAYS:
        jobs = made_jobs(base, mean_tokens, steps, bound, cost_model(gpu, kernels))
        moves = MoveCosts() if kernels == "tlora" else MoveCosts().of_processes_of_one_job
        shape = ClusterShape(1, GPUS)
        found = metrics(simulate(jobs, shape, POLICIES[policy](), cost_model(gpu, kernels), Conditions(moves=moves)))
        assert found["jobs_done"] == JOBS, f"{name}: {found['jobs_done']:g} jobs have ended"
        row["ways"][name] = {
            "makespan_seconds": found["makespan_seconds"],
            "mean_jct_seconds": found["mean_jct_seconds"],
            "late_jobs_share": found["late_jobs_share"],
            "shared_gpu_share": found["shared_gpu_share"],
        }
    first = row["ways"][WAYS[0][0]]["makespan_seconds"]
    for way in row["ways"].values():
        way["times_as_fast"] = first / way["makespan_seconds"]
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="optimizer steps of each job")
    parser.add_argument("--gpu", default="h200-from-128", help="whose constants")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"{args.steps} steps are no job. Give 1 or more")
    try:
        bases = sorted(set.intersection(*(set(cost_model(args.gpu, kernels).constants) for _, _, kernels, _ in WAYS)))
    except ConfigError as error:
        parser.error(str(error))
    rows: list[dict[str, Any]] = []
    settings = {"gpu": args.gpu, "jobs": JOBS, "gpus": GPUS, "samples_per_step": SAMPLES, "rank": RANK, "steps": args.steps}
    report: dict[str, Any] = {"benchmark": "sweep_of_jobs", **machine.facts(torch.device("cpu"), args.commit), **settings, "rows": rows}
    for base in bases:
        for mean_tokens in MEAN_TOKENS:
            rows.append(compared(args.gpu, base, mean_tokens, args.steps))
            print(f"{base}, {SAMPLES} samples of {mean_tokens} tokens:")
            for name, way in rows[-1]["ways"].items():
                print(f"  {name:<24} {way['makespan_seconds'] / 60:>7.1f} min  {way['times_as_fast']:.2f} times as fast")
            machine.write(args.json, report)


if __name__ == "__main__":
    main()
