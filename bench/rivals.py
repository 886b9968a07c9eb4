"""What other trainers make of the jobs of a run of bench.real_jobs, on the same device and over the same base, and how they compare.

Each is a process of its own, `python -m bench.trl_baseline`, so that it begins with a device that is free, and bounded in time: the setting
is chosen on two jobs, and a job is measured for a second or two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import trainers


@dataclass(frozen=True)
class Rival:
    """`settings` of bench.trl_baseline, the likeliest to win first; `packed` ones need TRL."""

    settings: tuple[str, ...]
    packed: tuple[str, ...] = ()
    warm_up: int = 2


RIVALS = {
    "qlora": Rival(("qlora",)),
    "peft": Rival(("padding-free", "padded"), warm_up=1),  # packed rows need a mask over samples, which attention with sinks is slow with
    "padded": Rival(("padded",), warm_up=1),  # of hybrids: transformers' own recurrences go on from one sample into the next of a row
    "trl": Rival(("padding-free", "padded"), ("packed-by-1", "packed-by-2"), 1),  # a packed step is many forward passes
}
_PILOT_JOBS = 2
_SECONDS = 1.5  # of a job
_CHOOSING_SHARE = 0.5  # of the time, after which no further setting is tried
_LAST_RESORT = 3  # times the time that it is to take, when it is ended


def command_of(name: str, options: argparse.Namespace, base: Path, result: Path) -> list[str]:
    """`options` as of bench.real_jobs."""
    rival = RIVALS[name]
    settings = (rival.packed if trainers.has_trl() else ()) + rival.settings
    command = [sys.executable, "-m", "bench.trl_baseline", "--shape", options.shape, "--device", options.device]
    command += ["--layers", str(options.layers)] if options.layers else []
    command += ["--settings", ",".join(settings), "--base", str(base), "--max-steps", str(options.steps), "--out", str(result)]
    command += ["--pilot", str(_PILOT_JOBS), "--seconds", str(_SECONDS), "--warm-up", str(rival.warm_up)]
    command += ["--time-limit", str(_CHOOSING_SHARE * options.rival_seconds), *(["--jobs", options.jobs] if options.jobs else [])]
    command += [*(["--max-length", length] if (length := _max_length(options.settings)) else [])]
    return [*command, *(["--commit", options.commit] if options.commit else [])]


def _max_length(settings: Sequence[str]) -> str | None:
    """The jobs' own, where the run was given one."""
    return next((text.partition("=")[2] for text in reversed(settings) if text.startswith("defaults.max_length=")), None)


def measure(name: str, options: argparse.Namespace, base: Path, directory: Path) -> dict[str, Any]:
    """The rival's rows, and under "error" why there are none."""
    result = directory / f"{name}.json"
    result.unlink(missing_ok=True)
    command, found = command_of(name, options, base, result), dict[str, Any]({"rival": name, "error": None})
    limit = _LAST_RESORT * options.rival_seconds
    try:
        ended = subprocess.run(
            command,
            env=_one_gpu(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        found["error"] = f"it was ended after {limit:.0f} s"
    else:
        if ended.returncode:
            found["error"] = f"exit code {ended.returncode}: {' | '.join(ended.stdout.splitlines()[-5:])}"
    if result.is_file():
        content = json.loads(result.read_text(encoding="utf-8"))
        found |= {key: content.get(key) for key in ("trainer", "versions", "rows", "whole_seconds")}
    return found


def _one_gpu() -> dict[str, str]:
    """This process's environment with one GPU alone in it: the trainers would spread a batch over all that they see."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return os.environ | {"CUDA_VISIBLE_DEVICES": "0" if seen is None else seen.split(",")[0]}


def compare(launches: Sequence[dict[str, Any]], rival: dict[str, Any]) -> dict[str, float]:
    """How many times the rival's tokens per second, in its best setting, each launch makes."""
    best = next((row for row in rival.get("rows") or [] if row.get("best")), None)
    if best is None:
        return {}
    found: dict[str, float] = {}
    for number, row in enumerate(launches):
        if row.get("steady_tokens_per_second"):
            found[f"{number}: {row['case']} {row['kind']}"] = row["steady_tokens_per_second"] / best["tokens_per_second"]
    return found


def format_rival(rival: dict[str, Any]) -> str:
    lines = [f"{rival['rival']}: {rival.get('trainer', '')} in {rival.get('whole_seconds') or 0:.0f} s"]
    for row in rival.get("rows") or []:
        speed, pilot = row.get("tokens_per_second"), row.get("pilot_tokens_per_second")
        figures = [f"{speed:,.0f} tokens/s" if speed else "", f"{pilot:,.0f} on the pilot jobs" if pilot else row.get("skipped", "")]
        lines.append(f"  {row['setting']:32} {', '.join(part for part in figures if part)}{'  best' if row.get('best') else ''}")
        lines += [f"    {name}: {job['error']}" for name, job in row["jobs"].items() if "error" in job]
    lines += [f"  ours, launch {launch}: {ratio:.2f} times as fast" for launch, ratio in rival.get("ours_over_best", {}).items()]
    return "\n".join([*lines, *([f"  wrong: {rival['error']}"] if rival["error"] else [])])
