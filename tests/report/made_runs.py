"""Run directories with the files that a training run leaves, made from a seed: sizes, sweeps, failures and evaluations as asked."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_rows(rng: random.Random, steps: int, start_second: float, step_seconds: float, tokens_per_step: int) -> list[Row]:
    """Falling noisy losses, a linear schedule with warm-up, and times that go on."""
    floor, fall = rng.uniform(0.6, 1.6), rng.uniform(0.8, 2.0)
    rows: list[Row] = []
    tokens = 0
    for step in range(1, steps + 1):
        tokens += int(tokens_per_step * rng.uniform(0.8, 1.2))
        done = step / steps
        rows.append(
            {
                "step": step,
                "epoch": round(2 * done, 4),
                "loss": floor + fall * math.exp(-4 * done) + rng.gauss(0, 0.08),
                "grad_norm": abs(rng.gauss(0.6, 0.2)) + 2 * math.exp(-20 * done),
                "learning_rate": 2e-4 * min(step / (0.05 * steps + 1), 1 - done),
                "num_tokens": tokens,
                "tokens_per_second": tokens_per_step / step_seconds,
                "seconds": start_second + step * step_seconds,
            }
        )
    return rows


def eval_rows(train: Sequence[Row], count: int) -> list[Row]:
    """`count` evaluations after the first step's row to the last's; the last but one is the best."""
    picks = [train[round(at * (len(train) - 1) / max(1, count - 1))] for at in range(count)]
    rows = [
        {
            "step": row["step"],
            "epoch": row["epoch"],
            "eval_loss": 3 - 1.5 * at / count,
            "eval_num_tokens": 900,
            "seconds": row["seconds"] + 0.1,
        }
        for at, row in enumerate(picks)
    ]
    rows[-1]["eval_loss"] += 0.4
    return rows


def write_job(run_dir: Path, name: str, rows: Sequence[Row], **result: Any) -> None:
    """A job's directory: job.json, metrics.jsonl with evaluations among the rows, result.json from the rows and `result`."""
    directory = run_dir / name
    directory.mkdir(parents=True)
    train = [row for row in rows if "loss" in row]
    evals = [row for row in rows if "eval_loss" in row]
    best = min(evals, key=lambda row: row["eval_loss"]) if evals else {}
    whole = {
        "name": name,
        "status": "done",
        "reason": "",
        "rank": 16,
        "steps": train[-1]["step"] if train else 0,
        "total_steps": train[-1]["step"] if train else 100,
        "train_loss_first": train[0]["loss"] if train else None,
        "train_loss": train[-1]["loss"] if train else None,
        "eval_loss_first": evals[0]["eval_loss"] if evals else None,
        "eval_loss": evals[-1]["eval_loss"] if evals else None,
        "eval_loss_best": best.get("eval_loss"),
        "best_step": best.get("step"),
        "num_tokens": train[-1]["num_tokens"] if train else 0,
        "seconds": train[-1]["seconds"] - train[0]["seconds"] if train else 0.0,
        "path": str(directory),
        "sweep_of": None,
        "settings": {},
    } | result
    (directory / "job.json").write_text(json.dumps({"name": name, "r": whole["rank"], "sweep_of": whole["sweep_of"]}))
    write_rows(directory / "metrics.jsonl", sorted(rows, key=lambda row: row["seconds"]))
    (directory / "result.json").write_text(json.dumps(whole))


def write_run(run_dir: Path, names: Sequence[str], seconds: int, **spec: Any) -> None:
    """run.json and a row a second, in which the jobs that have metrics share the tokens while they run."""
    run_dir.mkdir(parents=True, exist_ok=True)
    whole = {
        "base_model": "example/tiny-llama",
        "output_dir": "out",
        "deterministic": False,
        "status": "done",
        "started": "2026-01-02T03:04:05Z",
        "versions": {"tlora": "0.1.0", "torch": "2.13.0"},
        "device": "cpu",
        "token_budget": 2048,
        "base_parameters": 2_012_345,
        "jobs": [{"name": name, "r": 16} for name in names],
    } | spec
    (run_dir / "run.json").write_text(json.dumps(whole))
    rng = random.Random(5)
    rows: list[Row] = []
    for second in range(1, seconds + 1):
        tokens = {name: rng.randrange(200, 900) for at, name in enumerate(names) if at * seconds / (2 * len(names)) <= second <= seconds}
        row = {"seconds": second + 0.5, "tokens_per_second": sum(tokens.values()), "jobs": tokens}
        rows.append(row | packing_row(rng, sum(tokens.values()), tail=second > 0.9 * seconds))
    write_rows(run_dir / "run.jsonl", rows)


def packing_row(rng: random.Random, tokens: int, tail: bool) -> Row:
    """What was packed in a second, all of it in the tail or nothing: a tail fills about half of its budget."""
    computed, offered = int(tokens * rng.uniform(1.2, 1.4) if tail else tokens * rng.uniform(1, 1.03)), int(tokens * (2 if tail else 1.04))
    made = {"padding": 1 - tokens / computed, "fill": tokens / offered, "micro_batches": 4}
    made |= {"tokens": tokens, "computed": computed, "offered": offered}
    none = {"padding": None, "fill": None, "micro_batches": 0, "tokens": 0, "computed": 0, "offered": 0}
    full, end = (none, made) if tail else (made, none)
    return full | {f"tail_{key}": value for key, value in end.items()}


def make_run(run_dir: Path, count: int, steps: int = 300, seconds: int = 240) -> list[str]:
    """A finished run of `count` jobs: from four on, four of them a sweep of two fields; the eighth fails with HTML in its reason."""
    rng = random.Random(count)
    swept = [(rank, rate) for rank in (8, 32) for rate in (1e-4, 3e-4)] if count >= 4 else []
    names = [f"sweep-r{rank}-lr{rate:.0e}".replace("e-0", "e-") for rank, rate in swept]
    names += ["polite", "sql", "json-fields", "support-answers-de"][: count - len(names)]
    names += [f"tenant-{number:03d}-customer-support-in-plain-words" for number in range(count - len(names))]
    write_run(run_dir, names, seconds)
    for at, name in enumerate(names):
        start = at * seconds / (2 * len(names))
        length = rng.randrange(steps // 3, steps + 1)
        train = train_rows(rng, length, start, (seconds - start) * rng.uniform(0.6, 1) / length, rng.choice((300, 900, 2500)))
        more: Row = {"rank": rng.choice((4, 8, 16, 64))}
        if at < len(swept):
            more = {"rank": swept[at][0], "sweep_of": "sweep", "settings": {"r": swept[at][0], "learning_rate": swept[at][1]}}
        evals = eval_rows(train, 8) if at % 5 != 4 else []
        for row in evals:
            row["eval_loss"] += 0.1 * at / count
        if at == 7:
            reason = "DataError: row 17 of <b>support.jsonl</b> has ids ≥ 32000 <script>alert('x')</script> & is refused"
            more |= {"status": "failed", "reason": reason, "total_steps": steps}
            train[-1]["loss"] = math.nan
        write_job(run_dir, name, [*train, *evals], **more)
    return names
