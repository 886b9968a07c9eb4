"""The frozen head and cross-entropy on one GPU: ours at several chunk sizes and blocks, the two bare GEMMs beside it, peak memory.

    python -m bench.cross_entropy [--repeats 7] [--commit NAME] [--json FILE]

8,192 labelled tokens, bf16, random weights: Llama-3-8B's head (4096 -> 128,256) and Qwen3-0.6B's (1024 -> 151,936). First each shape is
checked against the reference in fp64 on 64 rows; a wrong result ends the run. The ways take turns within each repeat, medians are
printed. The bare GEMMs run over chunks of 1,024 rows into one buffer, logits then gradient: what no fusion of the rest can beat by chunks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench import machine
from tlora.kernels import linear_cross_entropy as reference
from tlora.kernels import triton_cross_entropy as kernel
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.head import Head, gpu_chunk_rows

TOKENS, FLOOR_ROWS = 8192, 1024
SHAPES = {"llama-3-8b": (4096, 128_256), "qwen3-0.6b": (1024, 151_936)}
CHUNKS = (512, 768, 1024, 1536, 2048, 4096)
BLOCKS = ((4096, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32))
BOUND = 2e-2  # relative, Frobenius, as for bf16 in tests/tolerances.py
Given = tuple[Tensor, Head, Tensor, Tensor]


def make(width: int, vocab: int) -> Given:
    draw = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, width, generator=draw, device="cuda").bfloat16()
    weight = (torch.randn(vocab, width, generator=draw, device="cuda") * 0.02).bfloat16()
    labels = torch.randint(0, vocab, (TOKENS,), generator=draw, device="cuda")
    return hidden, Head(partial(FrozenLinear, PlainWeight(weight))), labels, torch.full((TOKENS,), 1 / TOKENS, device="cuda")


def check(given: Given, rows: int = 64) -> dict[str, float]:
    """Relative errors against the fp64 reference. Raises AssertionError past BOUND, or where a row's bits depend on the number of rows."""
    hidden, head, labels, weights = given
    some = torch.arange(0, TOKENS, TOKENS // rows, device="cuda")
    losses, dh = reference.linear_cross_entropy(hidden, head, labels, weights)
    few_losses, few_dh = reference.linear_cross_entropy(hidden[some], head, labels[some], weights[some])
    true_losses, true_dh = reference.linear_cross_entropy(
        hidden[some].double(), Head(partial(FrozenLinear, PlainWeight(head.weight_VH.double()))), labels[some], weights[some].double()
    )
    assert dh is not None and few_dh is not None and true_dh is not None
    assert torch.equal(few_losses, losses[some]) and torch.equal(few_dh, dh[some]), "a row's bits depend on how many rows there are"
    found = {"losses": (few_losses, true_losses), "dh": (few_dh, true_dh)}
    errors = {name: float((ours.double() - true).norm() / true.norm()) for name, (ours, true) in found.items()}
    assert max(errors.values()) <= BOUND, errors
    return errors


def bare_gemms(given: Given) -> Callable[[], None]:
    hidden, head, _, _ = given
    logits = hidden.new_empty(FLOOR_ROWS, head.weight_VH.shape[0])
    dh = torch.empty_like(hidden)

    def run() -> None:
        for t0 in range(0, TOKENS, FLOOR_ROWS):
            torch.mm(hidden[t0 : t0 + FLOOR_ROWS], head.weight_VH.t(), out=logits)
            torch.mm(logits, head.weight_VH, out=dh[t0 : t0 + FLOOR_ROWS])

    return run


def ours(given: Given, rows: int, block: int, warps: int, with_gradient: bool = True) -> Callable[[], None]:
    hidden, head, labels, weights = given

    def run() -> None:
        with patch.object(kernel, "gpu_chunk_rows", lambda _: rows), patch.multiple(kernel, _BLOCK_V=block, _WARPS=warps):
            reference.linear_cross_entropy(hidden, head, labels, weights if with_gradient else None)

    return run


def kernel_alone(given: Given, block: int, warps: int) -> Callable[[], None]:
    """The Triton kernel over TOKENS rows in chunks of the default size. It turns its own output into a gradient again: time is the same."""
    _, head, labels, weights = given
    rows = gpu_chunk_rows(head)
    logits = torch.randn(rows, head.weight_VH.shape[0], device="cuda", dtype=torch.bfloat16)
    losses = torch.empty(TOKENS, device="cuda")

    def run() -> None:
        with patch.multiple(kernel, _BLOCK_V=block, _WARPS=warps):
            for t0 in range(0, TOKENS, rows):
                t1 = min(t0 + rows, TOKENS)
                kernel._losses_and_gradient_(logits[: t1 - t0], head, labels[t0:t1], losses[t0:t1], weights[t0:t1])

    return run


def ways_of(given: Given) -> dict[str, Callable[[], None]]:
    default = gpu_chunk_rows(given[1]), kernel._BLOCK_V, kernel._WARPS
    ways = {"bare GEMMs": bare_gemms(given), "ours": ours(given, *default), "ours, losses only": ours(given, *default, with_gradient=False)}
    ways |= {f"ours, chunks of {rows}": ours(given, rows, *default[1:]) for rows in CHUNKS}
    return ways | {f"kernel alone, block {block}, {warps} warps": kernel_alone(given, block, warps) for block, warps in BLOCKS}


def measure(ways: dict[str, Callable[[], None]], repeats: int) -> list[dict[str, Any]]:
    """Median milliseconds, and MiB at the peak beside what was there before, per way. The first round warms up and is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, run in ways.items():
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
            if repeat:
                times[name].append(start.elapsed_time(end))
    return [{"way": name, "milliseconds": statistics.median(t), "peak_mib": peaks[name]} for name, t in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = machine.facts(torch.device("cuda"), args.commit)
    report: dict[str, Any] = {"benchmark": "cross_entropy", **facts, "tokens": TOKENS, "shapes": {}}
    print(f"{facts['device']}, torch {facts['versions']['torch']}, commit {facts['commit']}: {facts['command']}")
    for shape, (width, vocab) in SHAPES.items():
        given = make(width, vocab)
        errors = check(given)
        rows = measure(ways_of(given), args.repeats)
        floor = rows[0]["milliseconds"]
        report["shapes"][shape] = {"width": width, "vocab": vocab, "chunk_rows": gpu_chunk_rows(given[1]), "errors": errors, "rows": rows}
        print(f"\n{shape}: {TOKENS} x {width} -> {vocab}, chunks of {gpu_chunk_rows(given[1])} rows, errors {errors}")
        for row in rows:
            print(f"{row['way']:40} {row['milliseconds']:8.2f} ms  {row['milliseconds'] / floor:5.2f} x GEMMs  {row['peak_mib']:7.0f} MiB")
        machine.write(args.json, report)


if __name__ == "__main__":
    main()
