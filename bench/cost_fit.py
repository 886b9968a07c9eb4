"""Fits the cost model's constants to what `bench.cost_points` measured, and says how far off they are, also where they were not fitted.

    python -m bench.cost_fit bench/results/h200_*_points_*.json --gpu h200-from-128 --like h200 --out src/tlora/shape/constants/FILE

Least squares of relative errors over points of equal lengths, rank 16 and no dropout, for each base and each set of kernels:
t = sqrt((launch + member * (m - 1) + n / P)^2 + floor^2). Points that are held out are not fitted to. What was not measured is taken from
the constants called `--like`, and between two of its bases where it has no such one. PEFT trains one job at a time; where its points end at
2,048 tokens, its P is not fitted, but taken to be ours by the ratio that the two have with llama-3-8b in `--like`. TRL takes what the host
takes, up to 4,096 tokens of a small base: its P is fitted with llama-3-8b, and with other bases has the same ratio to PEFT's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from bench.shapes import SHAPES, make_model
from tlora.shape.hardware import EXTRAPOLATED, cost_model

FITTED = ("tokens_per_second", "launch_seconds", "floor_seconds", "member_seconds")
KEPT = (
    "exchange_seconds",
    "exchange_gpu_seconds",
    "exchange_between_nodes_seconds",
    "base_bytes",
    "activation_bytes_per_token",
    "gpu_bytes",
)
KERNELS = {"ours": "tlora", "peft": "peft", "trl": "trl"}  # by system
RATIO_OF = "llama-3-8b"
_STARTS = ((3e4, 0.003, 0.01, 1e-4), (1e5, 0.01, 0.03, 1e-3), (1.5e4, 0.01, 0.03, 1e-4))
_LEAST = 1e-6  # seconds: what fits below it is nothing


@dataclass(frozen=True)
class Measured:
    """A micro-batch of `tokens` of `members` jobs."""

    name: str
    tokens: float
    members: int
    seconds: float
    held_out: bool
    source: str


@dataclass(frozen=True)
class Fit:
    """`values` of FITTED, and by point what they predict over what was measured, minus 1."""

    values: tuple[float, ...]
    errors: dict[str, float]
    held_out: dict[str, float]


def predict(values: Sequence[float], tokens: float, members: int) -> float:
    """Seconds, as `CostModel.micro_batch_seconds` has them on one GPU."""
    speed, launch, floor, member = values
    return math.hypot(launch + member * (members - 1) + tokens / speed, floor)


def fit(points: Sequence[Measured], speed: float | None = None, member: float | None = None) -> Fit:
    """The constants that are nearest to the points that are not held out; `speed` and `member` are as given where they are."""
    known = {0: speed, 3: member}
    free = [i for i in range(len(FITTED)) if known.get(i) is None]
    used = [point for point in points if not point.held_out]

    def whole(logs: np.ndarray) -> list[float]:
        values = [known.get(i) or 0.0 for i in range(len(FITTED))]
        for i, log in zip(free, logs, strict=True):
            values[i] = math.exp(log)
        return values

    def errors(logs: np.ndarray) -> list[float]:
        return [predict(whole(logs), point.tokens, point.members) / point.seconds - 1 for point in used]

    found = min(
        (least_squares(errors, [math.log(start[i]) for i in free], bounds=(-30.0, 20.0)) for start in _STARTS), key=lambda each: each.cost
    )
    values = tuple(0.0 if value < _LEAST else float(f"{value:.4g}") for value in whole(found.x))
    off = {point.name: predict(values, point.tokens, point.members) / point.seconds - 1 for point in points}
    held = {point.name for point in points if point.held_out}
    return Fit(values, {n: e for n, e in off.items() if n not in held}, {n: e for n, e in off.items() if n in held})


def read_points(files: Sequence[Path]) -> dict[str, dict[str, list[Measured]]]:
    """By set of kernels and base."""
    found: dict[str, dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        content = json.loads(file.read_text())
        if content["setup"].get("base_precision"):
            continue  # two points of a base in fp8 are too few for a fit
        for row in content["rows"]:
            point = row["point"]
            if point["length"] == "real" or point["dropout"] or point["rank"] != 16 or "tokens_per_second" not in row:
                continue
            tokens = row.get("tokens_per_micro_batch", row["tokens_per_step"])
            seconds = tokens / row["tokens_per_second"]
            found[KERNELS[row["system"]]][content["setup"]["shape"]].append(
                Measured(point["name"], tokens, point["jobs"], seconds, point["held_out"], f"bench/results/{file.name}")
            )
    return found


def constants(points: dict[str, dict[str, list[Measured]]], like: str) -> dict[str, Any]:
    """What a file of constants holds for one type of GPU, and beside the fields the points and how far off they are."""
    old = {kernels: cost_model(like, kernels).constants for kernels in ("tlora", "peft")}
    ratio = old["peft"][RATIO_OF].tokens_per_second / old["tlora"][RATIO_OF].tokens_per_second
    found: dict[str, Any] = {"tlora": {}, "peft": {}}
    speeds: dict[str, float] = {}
    for base, of_base in points["tlora"].items():
        fitted = fit(of_base)
        speeds[base] = fitted.values[0] * ratio
        found["tlora"][base] = _entry(base, of_base, fitted, {}, old["tlora"], like)
    by_ratio = f"{EXTRAPOLATED}ours, by the ratio that the two have with {RATIO_OF} in the constants of {like}"
    for base, of_base in points["peft"].items():
        found["peft"][base] = _of_one_job(base, of_base, speeds[base], by_ratio, old["peft"], like)
    if RATIO_OF in points.get("trl", {}):
        fitted_one = _of_one_job(RATIO_OF, points["trl"][RATIO_OF], None, "", old["peft"], like)
        own = fitted_one["fields"]["tokens_per_second"]["value"] / speeds[RATIO_OF]
        by_ratio = f"{EXTRAPOLATED}PEFT's, by the ratio that the two have with {RATIO_OF}; steps of other bases take what the host takes"
        found["trl"] = {
            base: fitted_one if base == RATIO_OF else _of_one_job(base, of_base, speeds[base] * own, by_ratio, old["peft"], like)
            for base, of_base in points["trl"].items()
        }
    return found


def _of_one_job(base: str, points: Sequence[Measured], speed: float | None, why: str, old: dict[str, Any], like: str) -> dict[str, Any]:
    """The constants of kernels that train one adapter at a time, with `speed` as given for the reason `why`, or else fitted."""
    notes = {"member_seconds": f"{EXTRAPOLATED}PEFT's from {like}; it trains one adapter at a time"}
    notes |= {"tokens_per_second": why} if speed is not None else {}
    return _entry(base, points, fit(points, speed, _between(old, base)("member_seconds")), notes, old, like)


def _between(old: dict[str, Any], base: str) -> Any:
    """The value of a field of `base`; of one that is not there the geometric mean of all that are."""

    def value(name: str) -> float:
        known = [getattr(each, name) for each in ([old[base]] if base in old else old.values())]
        if base in old or not any(known):
            return known[0]
        return float(f"{statistics.geometric_mean(known):.4g}")  # of which none may be 0

    return value


def _entry(base: str, points: Sequence[Measured], fitted: Fit, notes: dict[str, str], old: dict[str, Any], like: str) -> dict[str, Any]:
    files = ", ".join(sorted({point.source for point in points}))
    fit_source = f"least squares of relative errors (python -m bench.cost_fit) through the points below that are not held out, {files}"
    fields: dict[str, Any] = {
        name: {"value": value, "source": notes.get(name, fit_source)} for name, value in zip(FITTED, fitted.values, strict=True)
    }
    between = _between(old, base)
    for name in KEPT:
        if base in old:
            fields[name] = {"value": between(name), "source": old[base].source[name]}
        elif name == "base_bytes":
            model = make_model(base, torch.device("meta"), torch.bfloat16)
            fields[name] = {"value": sum(2 * p.numel() for p in model.parameters()), "source": f"the parameters of {base} in bf16"}
        elif name == "gpu_bytes":
            fields[name] = {"value": next(iter(old.values())).gpu_bytes, "source": next(iter(old.values())).source[name]}
        else:
            fields[name] = {"value": between(name), "source": f"{EXTRAPOLATED}the geometric mean of {' and '.join(sorted(old))} in {like}"}
    rows = [
        {
            "tokens": point.tokens,
            "members": point.members,
            "tokens_per_second": round(point.tokens / point.seconds, 1),
            "held_out": point.held_out,
            "error": round({**fitted.errors, **fitted.held_out}[point.name], 4),
            "source": point.source,
        }
        for point in points
    ]
    return {"fields": fields, "points": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="what bench.cost_points wrote")
    parser.add_argument("--gpu", required=True, help="what to call the constants")
    parser.add_argument("--like", default="h200", help="constants that have what was not measured")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    points = read_points(options.files)
    unknown = sorted({base for of_kernels in points.values() for base in of_kernels} - set(SHAPES))
    assert not unknown, unknown
    found = constants(points, options.like)
    for kernels, bases in found.items():
        for base, entry in bases.items():
            values = "  ".join(f"{name} {entry['fields'][name]['value']:.4g}" for name in FITTED)
            print(f"{kernels:6} {base:12} {values}")
            for row in entry["points"]:
                held = "  held out" if row["held_out"] else ""
                what = f"{row['tokens']:8,.0f} tokens of {row['members']} jobs"
                print(f"       {what}: {row['tokens_per_second']:9,.0f} tok/s, {row['error']:+.1%}{held}")
    if options.out:
        text = json.dumps({options.gpu: found}, indent=1)
        options.out.write_text(re.sub(r"\s+$", "", text) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
