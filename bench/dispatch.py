"""How long `dispatch` takes for the samples of one step, and how far it is from what no dispatch can beat.

    python -m bench.dispatch [--repeats 20] [--commit NAME] [--json FILE]

Samples of 100 to 16,384 tokens, log-normal around 700 as several tasks together have them; their seconds are those of an 8B's products and
of attention, which grows with the square of the length. Ranks of one kind that hold all, and of two kinds: half of them compute 0.45 times
as fast and hold up to 4,096 tokens. Medians of the repeats, each of other samples, on one core.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import machine
from tlora.batching.dispatch import Rank, dispatch

SIZES = tuple((items, ranks) for items in (100, 300, 900) for ranks in (2, 8, 16))
TOKENS_PER_SECOND, QUADRATIC_TOKENS = 17_000.0, 60_000.0  # attention takes as long as all products of a sample of so many tokens
SLOW, SLOW_HOLDS = 0.45, 4096


def draw_lengths(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [round(min(16384.0, max(100.0, chance.lognormvariate(6.5, 1.0)))) for _ in range(count)]


def make_ranks(count: int, lengths: Sequence[int], two_kinds: bool) -> list[Rank]:
    short = frozenset(item for item, tokens in enumerate(lengths) if tokens <= SLOW_HOLDS)
    return [Rank(SLOW, short) if two_kinds and number % 2 else Rank() for number in range(count)]


def measure(items: int, ranks: int, two_kinds: bool, repeats: int) -> dict[str, Any]:
    milliseconds: list[float] = []
    excess: list[float] = []
    for seed in range(repeats):
        lengths = draw_lengths(items, seed)
        seconds = [tokens / TOKENS_PER_SECOND * (1 + tokens / QUADRATIC_TOKENS) for tokens in lengths]
        made = make_ranks(ranks, lengths, two_kinds)
        begun = time.perf_counter()
        found = dispatch(seconds, made)
        milliseconds.append(1e3 * (time.perf_counter() - begun))
        excess.append(found.excess)
    return {
        "items": items,
        "ranks": ranks,
        "kinds": 1 + two_kinds,
        "milliseconds_median": statistics.median(milliseconds),
        "milliseconds_worst": max(milliseconds),
        "excess_median": statistics.median(excess),
        "excess_worst": max(excess),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.repeats < 1:
        parser.error(f"{args.repeats} repeats measure nothing. Give 1 or more")
    rows: list[dict[str, Any]] = []
    for items, ranks in SIZES:
        for two_kinds in (False, True):
            rows.append(row := measure(items, ranks, two_kinds, args.repeats))
            kinds = "two kinds" if two_kinds else "one kind"
            print(f"{items:>4} items, {ranks:>2} ranks of {kinds:<9}: {row['milliseconds_median']:6.2f} ms ", end="")
            print(f"(worst {row['milliseconds_worst']:.2f}), {row['excess_median']:.2%} above the bound (worst {row['excess_worst']:.2%})")
    machine.write(args.json, {"benchmark": "dispatch", **machine.facts(torch.device("cpu"), args.commit), "rows": rows})


if __name__ == "__main__":
    main()
