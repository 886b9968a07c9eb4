"""One eighth of `bench.sweep_of_jobs`, really run: a sweep of eight jobs on one GPU, through `tlora cluster`, under several policies.

    python -m bench.sweep_really --shape qwen3-1.7b [--base-dir DIR] [--steps 300] [--json FILE]
    python -m bench.sweep_really --shape tiny --device cpu --steps 6

Eight learning rates over real texts, batches of 4. `fifo` trains one job after another, in a worker that stands on; `residual_capacity`
trains them together, with the bound on each job's slowdown that stands beside it. A short run before all of them compiles what they
need. Times are from the first submission to the last end, and from the first step on: the first is what a user waits, the second has no
start of a worker in it. A job's slowdown is its time from its first step to its last over that of the same job under `fifo`, where it
trained alone: what its bound is about.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import launch, machine
from bench.base_files import DATA, make_base
from bench.shapes import SHAPES
from tlora.protocol import JobFinished, JobSubmitted
from tlora.sim.trace import read_event_log

JOBS, SAMPLES, RANK = 8, 4, 16
TEXTS = DATA / "alpaca_en_demo.json"
BOUNDS = [1.5, 4.0, 100.0]  # on each job's slowdown
_WARM_UP_STEPS = 10


def jobs_file(base: Path, steps: int, max_slowdown: float) -> str:
    """YAML is a superset of JSON."""
    defaults = {"batch_size": SAMPLES, "r": RANK, "max_length": 2048, "max_steps": steps, "logging_steps": 1, "max_slowdown": max_slowdown}
    names = [{"name": f"rate{number}", "learning_rate": 1e-4 * (number + 1)} for number in range(JOBS)]
    return json.dumps({"base_model": str(base), "defaults": {**defaults, "data": str(TEXTS)}, "jobs": names})


def run_way(options: argparse.Namespace, base: Path, place: Path, policy: str, max_slowdown: float, steps: int) -> dict[str, Any]:
    """Seconds and tokens/s of all jobs, from the event log and the jobs' own logs."""
    place.mkdir()
    file, out = place / "jobs.yaml", place / "out"
    file.write_text(jobs_file(base, steps, max_slowdown))
    command = [sys.executable, "-m", "tlora", "cluster", str(file), "--output-dir", str(out), "--policy", policy]
    command += ["--device", options.device, "--quiet"]
    ended = launch.run_process(command, os.environ, out, None)
    if ended.code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {ended.code}: {ended.lines[-5:]}")
    rows = read_event_log(out / "events.jsonl")
    begin = min(at for at, item in rows if isinstance(item, JobSubmitted))
    ends = {item.job_id: at - begin for at, item in rows if isinstance(item, JobFinished)}
    assert len(ends) == JOBS, sorted(ends)
    spans = {name: seen(out / "jobs" / name / "metrics.jsonl", ended.start) for name in ends}
    first, tokens = min(begun for begun, _, _ in spans.values()), sum(count for _, _, count in spans.values())
    trained = max(last for _, last, _ in spans.values()) - first
    return {
        "policy": policy,
        "max_slowdown": max_slowdown,
        "makespan_seconds": max(ends.values()),
        "mean_jct_seconds": sum(ends.values()) / JOBS,
        "first_step_seconds": first,
        "from_first_step_seconds": trained,
        "tokens": tokens,
        "tokens_per_second": tokens / trained,
        "seconds_of_jobs": {name: last - begun for name, (begun, last, _) in spans.items()},
    }


def seen(log: Path, start: float) -> tuple[float, float, int]:
    """Seconds since `start` of a job's first and last step, and its tokens. Its log was last changed when its last row was written."""
    rows = [row for row in launch.read_rows(log) if "loss" in row]
    last = log.stat().st_mtime - start
    return last - rows[-1]["seconds"] + rows[0]["seconds"], last, rows[-1]["num_tokens"]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sweep-really-") as name:
        place = Path(name)
        base = make_base(options.shape, options.base_dir or place / "bases", options.device)
        found: dict[str, Any] = {"benchmark": "sweep_really", **machine.facts(torch.device("cpu"), options.commit)}
        found["device"] = base["device"] or found["device"]
        found |= {"shape": options.shape, "jobs": JOBS, "samples_per_step": SAMPLES, "rank": RANK, "steps": options.steps, "rows": []}
        path = Path(base["base"]).resolve()
        run_way(options, path, place / "warm-up", "residual_capacity", 100.0, _WARM_UP_STEPS)
        for number, (policy, bound) in enumerate([("fifo", 100.0), *(("residual_capacity", bound) for bound in options.bounds)]):
            row = run_way(options, path, place / str(number), policy, bound, options.steps)
            found["rows"].append(row)
            alone = found["rows"][0]["seconds_of_jobs"]
            slowdowns = sorted(seconds / alone[name] for name, seconds in row["seconds_of_jobs"].items())
            row["median_slowdown"], row["largest_slowdown"] = statistics.median(slowdowns), slowdowns[-1]
            print(
                f"{policy}, bound {bound:g}: makespan {row['makespan_seconds']:.1f} s, mean JCT {row['mean_jct_seconds']:.1f} s, from the "
                f"first step {row['from_first_step_seconds']:.1f} s, {row['tokens_per_second']:,.0f} tok/s; slowdown of a job "
                f"{row['median_slowdown']:.2f}, {row['largest_slowdown']:.2f} at most",
                flush=True,
            )
            machine.write(options.json, found)
    return found


def bounds(text: str) -> list[float]:
    return [float(bound) for bound in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-1.7b")
    parser.add_argument("--base-dir", type=Path, help="keeps the base there, or takes it from there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=300, help="of each job")
    parser.add_argument("--bounds", type=bounds, default=BOUNDS, help="on each job's slowdown, as 1.5,4,100")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    measure(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
