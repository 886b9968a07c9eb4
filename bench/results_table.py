"""README's tables out of the results: `python -m bench.results_table [FILE ...]`, by default all of bench/results.

One table of speeds and one of kernels for each device and commit; below each, the files and the commands that made them. Figures that
were not measured are a dash.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NONE = "—"
_HEADS = {
    "throughput": ("base, jobs", "together", "one by one", "best PEFT", "x PEFT", "TFLOP/s", "activations GiB"),
    "kernels": ("adapters", "tokens", "whole block", "q/k/v", "o", "gate/up", "down"),
}
_MEANING = {
    "throughput": "Useful tokens/s",
    "kernels": "Forward + backward of a block's linears, over the bare base linears",
}


def read_results(files: Iterable[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """Results of the kinds that have a table here; others (bench/cpu.py's) are left out."""
    found = [(file, json.loads(file.read_text())) for file in files]
    return [(file, result) for file, result in found if result.get("benchmark") in _HEADS]


def format_tables(results: Sequence[tuple[Path, dict[str, Any]]]) -> str:
    """Markdown."""

    def key(item: tuple[Path, dict[str, Any]]) -> tuple[str, ...]:
        r = item[1]
        return r["benchmark"], r["device"], r["commit"], str(r["versions"]["torch"]), str(r["versions"]["triton"])

    tables: list[str] = []
    for (kind, device, commit, torch, triton), group in groupby(sorted(results, key=key), key):
        members = list(group)
        rows = [row for _, r in members for row in (_speed_rows(r) if kind == "throughput" else _kernel_rows(r))]
        head = _HEADS[kind]
        lines = [f"{_MEANING[kind]}; {device}, commit {commit}, torch {torch}, triton {triton}:", ""]
        lines += [_line(head), _line(["---", *["---:"] * (len(head) - 1)]), *map(_line, rows), ""]
        lines += [f"- [{file.name}](bench/results/{file.name}): `{r['command']}`" for file, r in members]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _speed_rows(result: dict[str, Any]) -> list[list[str]]:
    rows = {row["system"]: row for row in result["rows"] if row["system"] != "peft"}
    best = next((row for row in result["rows"] if row.get("best")), None)
    ours = rows.get("together")
    return [
        [
            _workload(result["setup"]),
            _speed(ours),
            _speed(rows.get("one-by-one")),
            f"{_speed(best)} ({best['setting']})" if best else NONE,
            f"{ours['tokens_per_second'] / best['tokens_per_second']:.2f}" if ours and best else NONE,
            f"{ours['useful_tflops']:.0f}" if ours else NONE,
            f"{ours['activations_gib']:.1f}" if ours and ours["activations_gib"] is not None else NONE,
        ]
    ]


def _speed(row: dict[str, Any] | None) -> str:
    return f"{row['tokens_per_second']:,.0f}" if row else NONE


def _workload(setup: dict[str, Any]) -> str:
    """Such as "llama-3-8b, 8 jobs (r 8-64), 4 samples of 2,048 tokens a step"."""
    ranks = sorted({job["rank"] for job in setup["jobs"]})
    span = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
    lengths = "real lengths" if setup["lengths"] == "real" else f"{setup['lengths']:,} tokens"
    mode = ", deterministic" if setup["deterministic"] else ""
    mode += ", fp32" if setup.get("dtype") == "torch.float32" else ""
    mode += f", {setup['base_precision']} base" if setup.get("base_precision") else ""
    mode += f", {setup['recompute']} layers recomputed" if setup.get("recompute") else ""
    budget = f", micro-batches of {setup['token_budget']:,}"
    return f"{setup['shape']}, {len(setup['jobs'])} jobs (r {span}), {setup['batch_size']} samples of {lengths} a step{budget}{mode}"


def _kernel_rows(result: dict[str, Any]) -> list[list[str]]:
    return [
        [row["adapters"], f"{row['tokens']:,}", f"{row['ratio']:.3f}", *(f"{group['ratio']:.3f}" for group in row["groups"].values())]
        for row in result["rows"]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    files = parser.parse_args().files or sorted(RESULTS.glob("*.json"))
    print(format_tables(read_results(files)))


if __name__ == "__main__":
    main()
