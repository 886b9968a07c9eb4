"""What an fp8 base costs in quality: the demo's four jobs, trained over its base in bf16 and in fp8 on a GPU.

    python -m bench.fp8_loss [--seeds 3] [--json FILE]

Prints each job's final train and eval loss beside each other. Seeds say how much of the difference is chance: a job's data order and
first weights change with them. About a minute per seed. Needs a GPU of compute capability 8.9 or above.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import tlora
from bench import machine
from tlora.job import RunSpec
from tlora.jobs_file import read_jobs_file

PRECISIONS = {"bf16": None, "fp8": "fp8"}


def run_of(seed: int, precision: str | None, directory: str) -> RunSpec:
    run = read_jobs_file(Path(__file__).parents[1] / "demo" / "jobs.yaml")
    jobs = [job.model_copy(update={"seed": seed}) for job in run.jobs]
    return run.model_copy(update={"dtype": "bfloat16", "base_precision": precision, "output_dir": directory, "jobs": jobs})


def losses_of(seed: int, precision: str | None) -> dict[str, tuple[float, float, float]]:
    """By job: eval loss before the first step, then train and eval loss at the end."""
    with tempfile.TemporaryDirectory() as directory:
        results = tlora.train(run_of(seed, precision, f"{directory}/out"), device="cuda")
    found: dict[str, tuple[float, float, float]] = {}
    for name, result in results.items():
        losses = (result.eval_loss_first, result.train_loss, result.eval_loss)
        assert result.status == "done" and None not in losses, f"{name}: {result.status}: {result.reason}"
        found[name] = losses  # type: ignore[assignment]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = machine.facts(torch.device("cuda"), args.commit) | {"losses": []}
    for seed in range(args.seeds):
        for precision, value in PRECISIONS.items():
            for job, (first, train, last) in losses_of(seed, value).items():
                row = {"seed": seed, "base": precision, "job": job, "eval_first": first, "train_last": train, "eval_last": last}
                found["losses"].append(row)
                print(f"seed {seed} {precision:>5} {job:>8}: eval {first:.4f} -> {last:.4f}, train {train:.4f}", flush=True)
                machine.write(args.json, found)
    print(f"\n{'':>8} {'eval before':^22} {'train at the end':^22} {'eval at the end':^22}\n{'job':>8}" + f" {'bf16':>10} {'fp8':>11}" * 3)
    for job in dict.fromkeys(row["job"] for row in found["losses"]):
        line = f"{job:>8}"
        for key in ("eval_first", "train_last", "eval_last"):
            for precision in PRECISIONS:
                values = [row[key] for row in found["losses"] if row["job"] == job and row["base"] == precision]
                spread = f"±{statistics.stdev(values):.3f}" if len(values) > 1 else ""
                line += f" {statistics.mean(values):.3f}{spread}"
        print(line)


if __name__ == "__main__":
    main()
