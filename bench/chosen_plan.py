"""The layout that `layout: auto` chooses beside every other that is feasible, each measured through the command that users run.

    python -m bench.chosen_plan --gpus 2 --points llama-3-8b:8,qwen3-1.7b:2 --base-dir DIRECTORY --json FILE
    python -m bench.chosen_plan --gpus 2 --points tiny:3 --device cpu --steps 6 --set dtype=float32

A point is SHAPE:JOBS, so many of the first jobs of bench/real_jobs.yaml. Each is launched with `layout: auto`, then with each other layout
pinned (`whole`, `shared`, `stages` on all GPUs, `streamed` on one), as `bench.real_jobs` launches. A layout that is refused is no
candidate, and its reason is kept. Caches of compiled kernels and tokenized data that lie in --caches already are taken, and no launch is
cold. `chosen_over_best` is the steady tokens a second of auto over those of the fastest of all; the aim is 0.95 or more.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import machine, real_jobs
from bench.shapes import SHAPES

TOGETHER, ALONE = ("whole", "shared", "stages"), "streamed"  # on all GPUs, and on one
# What a run on several GPUs says of its layout.
_SAID = {
    "whole": r"each (?:GPU|CPU process) holds the whole base",
    "shared": r" of the base's .* on each of \d+ (?:GPUs|CPU processes)",
    "stages": r"(?:GPU|CPU process) 0: layers \d+ to \d+, ",
}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default="llama-3-8b:8,qwen3-1.7b:2", help="SHAPE:JOBS, with commas")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each job")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="as of `tlora train`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--base-dir", type=Path, help="where bases are kept; default: a temporary directory")
    parser.add_argument("--caches", type=Path, help="are kept, so that a later point begins warm; default: temporary ones")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    options.points = [_point(text, parser) for text in options.points.split(",")]
    return options


def _point(text: str, parser: argparse.ArgumentParser) -> tuple[str, int]:
    shape, _, jobs = text.partition(":")
    if shape not in SHAPES or not jobs.isdecimal() or jobs == "0":
        parser.error(f"--points: {text!r} is not SHAPE:JOBS with a shape of {', '.join(sorted(SHAPES))} and a number of jobs")
    return shape, int(jobs)


def measure(shape: str, jobs: int, options: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """What is known of a point after each launch, and at last how the chosen layout compares with all."""
    base_dir, caches = options.base_dir or directory / "bases", options.caches or directory / "caches"
    order = ["--shape", shape, "--jobs", str(jobs), "--steps", str(options.steps), "--device", options.device]
    order += ["--base-dir", str(base_dir), "--caches", str(caches), "--commit", options.commit or "unknown"]
    order += [part for setting in options.settings for part in ("--set", setting)]

    def launch(case: str, *more: str) -> dict[str, Any]:
        of_caches = "warm" if caches.is_dir() else "cold"
        found = real_jobs.run_benchmark(real_jobs.read_options([*order, "--launches", f"{case}:{of_caches}", *more]))
        row: dict[str, Any] = found["launches"][0]
        return row

    on_all = "--gpus", str(options.gpus)
    rows = [launch("plain", *on_all)]
    taken = taken_layout(rows[0])
    for form in (*(form for form in TOGETHER if form != taken), ALONE):
        yield {"shape": shape, "jobs": jobs, "taken": taken, **compare(rows)}
        rows.append(launch(form, *(() if form == ALONE else on_all)))
    yield {"shape": shape, "jobs": jobs, "taken": taken, **compare(rows)}


def taken_layout(row: dict[str, Any]) -> str | None:
    """The layout of a launch with `layout: auto` on several GPUs, by what it said; it need not be launched once more."""
    said = [line for _, line in row.get("notes", ())]
    return next((form for form, pattern in _SAID.items() if any(re.search(pattern, line) for line in said)), None)


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of launches: tokens a second by layout, why others are no candidates, and the chosen one's over the fastest's."""
    rates = {row["case"]: row["steady_tokens_per_second"] for row in rows if not row["errors"] and row.get("steady_tokens_per_second")}
    refused = {row["case"]: row["errors"][0] if row["errors"] else "too few steps to measure" for row in rows if row["case"] not in rates}
    found: dict[str, Any] = {"tokens_per_second": rates, "refused": refused}
    if (chosen := rates.get("plain")) is None:
        return found | {"chosen_over_best": None}
    best = max(rates, key=rates.__getitem__)
    return found | {"best": best, "chosen_over_best": chosen / rates[best]}


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    found: dict[str, Any] = {"benchmark": "chosen_plan", **machine.facts(torch.device("cpu"), options.commit), "gpus": options.gpus}
    found |= {"trained_on": options.device, "steps": options.steps, "settings": options.settings, "points": []}
    for shape, jobs in options.points:
        with tempfile.TemporaryDirectory(prefix="chosen-plan-") as name:
            point: dict[str, Any] = {}
            for point in measure(shape, jobs, options, Path(name)):
                machine.write(options.json, found | {"points": [*found["points"], point]})
        found["points"].append(point)
        shown = ", ".join(f"{'auto' if case == 'plain' else case} {rate:,.0f}" for case, rate in point["tokens_per_second"].items())
        ratio = point["chosen_over_best"]
        chosen = "not measured" if ratio is None else f"{ratio:.3f}"
        print(f"{shape}, {jobs} jobs: auto takes {point['taken']}; {shown} tokens/s; chosen over best: {chosen}", flush=True)
    return 0 if all(point["chosen_over_best"] is not None for point in found["points"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
