"""What a decoder layer of Llama-3-8B's shape takes, by the jobs that share a micro-batch and by its tokens, as `tlora calibrate` times it.

    python -m bench.layer_costs [--ranks 16 8,16,32,64 8,8,16,16,32,32,64,64] [--samples 8,16,32,64] [--commit NAME] [--json FILE]
    python -m bench.layer_costs --tiny --device cpu --ranks 8 8,16 --samples 2,4

`tlora calibrate` times one job in two sizes and draws a line through them: what a layer takes however few its tokens are, and what a token
takes. Here stand more sizes, and groups of jobs, whose adapters' kernels take what products do not: `fixed_us` is where a line through
each two sizes in turn begins. Each sample has 127 tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import machine
from tlora.engine.calibrate import half_precision
from tlora.engine.layer_speed import MadeUpBase, measure_layers

TINY = MadeUpBase(hidden_size=64, intermediate_size=96, heads=4, key_value_heads=2, vocab_size=512, depths=(1, 5))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = [(16,), (8, 16, 32, 64), (8, 8, 16, 16, 32, 32, 64, 64)]
    parser.add_argument("--ranks", type=numbers, nargs="+", default=groups, help="of the jobs of a group, with commas; several groups")
    parser.add_argument("--samples", type=numbers, default=(8, 16, 32, 64), help="of a micro-batch, with commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="layers for a CPU")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def lines_through(seconds: Mapping[int, float]) -> list[dict[str, float]]:
    """Of each two neighbouring sizes: what a line through them has for a token, and for none."""
    found: list[dict[str, float]] = []
    for (few, few_seconds), (many, many_seconds) in pairwise(sorted(seconds.items())):
        slope = (many_seconds - few_seconds) / (many - few)
        found.append({"from": few, "to": many, "token_us": 1e6 * slope, "fixed_us": 1e6 * (few_seconds - slope * few)})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    device = torch.device(options.device)
    dtype = half_precision(device) if device.type == "cuda" else torch.float32
    result: dict[str, Any] = {"benchmark": "layer_costs", **machine.facts(device, options.commit), "groups": []}
    for ranks in options.ranks:
        base = replace(TINY if options.tiny else MadeUpBase(), samples=options.samples, ranks=ranks)
        found = measure_layers(device, dtype, base)
        lines = lines_through(found.seconds)
        result["groups"].append({"ranks": ranks, "layer_seconds_by_tokens": found.seconds, "lines": lines})
        machine.write(options.json, result)
        each = ", ".join(f"{tokens:,} tokens {1e3 * seconds:.3f} ms" for tokens, seconds in sorted(found.seconds.items()))
        fixed = ", ".join(f"{line['fixed_us']:,.0f}" for line in lines)
        print(f"{len(ranks)} jobs of ranks {ranks}: a layer: {each}; us besides tokens: {fixed}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
