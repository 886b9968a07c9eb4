"""The sizes of a GEMM's tile over few tokens: microseconds of each, and whether the smaller ones have the bits of the largest.

    python -m bench.small_tiles [--shapes llama-3-8b,qwen3-1.7b,qwen3-0.6b] [--tokens 128,256,512,1024,2048] [--json FILE]

`tiles._SECONDS` rests on it. The GEMMs of one decoder layer, forward and input gradient, one job of rank 16, in bf16. Each launch of a
CUDA graph reads another copy of the weights, 300 MB of them or more, so that they come from memory as those of a whole model do. `chosen`
is what `tiles.for_tokens` takes. GPU only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.shapes import SHAPES
from tlora.kernels.fused_linear import programs_of
from tlora.kernels.tile_trials import Jobs, Launch, Problem, make_problem, prepare, results
from tlora.kernels.tiles import Key, Tile, for_tokens, sizes_of, tile_by_rule

RANK = 16
_WEIGHT_BYTES = 3e8  # of all copies: several times what a GPU's L2 holds
_ROUNDS, _REPEATS = 2, 5  # through the copies in a graph, and of the graph


def gemms(shape: str) -> Iterator[tuple[Key, tuple[int, ...]]]:
    """Of a decoder layer of this shape, each once, with the widths of its linears."""
    config = SHAPES[shape]
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * size, config.num_key_value_heads * size
    found: list[tuple[Key, tuple[int, ...]]] = []
    for in_features, widths in ((hidden, (q, kv, kv)), (q, (hidden,)), (hidden, (inner, inner)), (inner, (hidden,))):
        found += [(Key("forward", torch.bfloat16, width, in_features, 1), (width,)) for width in widths]
        found.append((Key("input_gradient", torch.bfloat16, in_features, sum(widths), len(widths)), widths))
    yield from dict.fromkeys(found)


def seconds(launches: Sequence[Launch]) -> float:
    """Of one of them."""
    launches[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in list(launches) * _ROUNDS:
            launch()
    times: list[float] = []
    for _ in range(1 + _REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:]) / (_ROUNDS * len(launches))


def measure(problem: Problem, processors: int) -> list[dict[str, Any]]:
    """A row for each size of the tile that the rule gives."""
    key, tile = problem.key, tile_by_rule(problem.key)
    assert isinstance(tile, Tile)
    tokens = len(problem.x_TK)
    bytes_of_one = sum(weight.numel() * weight.element_size() for weight in problem.weights)
    copies = [[weight.clone() for weight in problem.weights] for _ in range(max(2, int(_WEIGHT_BYTES / bytes_of_one)))]
    chosen, wanted, rows = for_tokens(tile, key.dtype, tokens, key.columns, processors), results(problem, tile), list[dict[str, Any]]()
    for size in sizes_of(tile, key.dtype):
        same = all(map(torch.equal, results(problem, size), wanted))
        launch = prepare(problem, size)
        taken = seconds([replace(launch, problem=replace(problem, weights=copy)) for copy in copies])
        row = {"kernel": key.kernel, "columns": key.columns, "inner": key.inner, "together": key.together, "tokens": tokens}
        rows.append({**row, "tile": [size.rows, size.columns], "microseconds": 1e6 * taken, "same_bits": same, "chosen": size == chosen})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["llama-3-8b", "qwen3-1.7b", "qwen3-0.6b"])
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    found: dict[str, Any] = {"benchmark": "small_tiles", **machine.facts(device, options.commit), "rows": []}
    for shape in options.shapes:
        for key, widths in gemms(shape):
            for tokens in options.tokens:
                rows = measure(make_problem(key, widths, Jobs(((tokens,),), RANK), device), programs_of(device))
                found["rows"] += [{"shape": shape, **row} for row in rows]
                told = "  ".join(f"{'*' if row['chosen'] else ''}{row['tile']} {row['microseconds']:.0f}" for row in rows)
                print(f"{shape:12} {key.kernel:14} {key.inner:5} -> {key.columns:5} {tokens:5}: {told}", flush=True)
        machine.write(options.json, found)
    return 0 if all(row["same_bits"] for row in found["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
