"""An fp8 weight on a GPU: correctness first, then the ways to multiply by it, at the linears of Llama-3-8B and 8,192 tokens.

    python -m bench.fp8 [--tokens 8192] [--shapes qkv o gate_up down] [--tiles NAME ...] [--json FILE]

For each group of linears, forward and input gradient with eight adapters of rank 16: our GEMM on bf16; our GEMM on fp8 for each tile
with the expand inside; `torch._scaled_mm` by rows with and without fast accumulation, and the expand as a `baddbmm` behind it. The
shrink (the same for all) is not timed, quantisation and transposition are: alone, and as part of each sum. `error`: of the product
alone against fp64 on the same quantised operands (what the sum loses), in parts per million. Medians; needs 8 GiB and, for all tiles,
about 6 minutes, most of it compilation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import machine
from tlora.kernels import fp8, fused_linear, tiles
from tlora.kernels.fused_linear import LinearGroup
from tlora.kernels.lora_tables import LoraTables, Run, Slots, build_tables
from tlora.kernels.tiles import Tile

DEVICE = torch.device("cuda")
SHAPES = {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336)), "down": (14336, (4096,))}
TILES = {
    "128x256x128": Tile(128, 256, 128, 3, 8, halves=True),
    "128x128x128": Tile(128, 128, 128, 4, 8),
    "128x128x128 promoted": Tile(128, 128, 128, 4, 8, promote=True),
    "128x256x128 promoted": Tile(128, 256, 128, 3, 8, halves=True, promote=True),
}
NUM_JOBS, RANK = 8, 16


@dataclass(frozen=True)
class World:
    """One group of linears, its operands, and eight jobs."""

    x: Tensor
    dys: list[Tensor]
    weights: list[Tensor]
    quantised: list[Tensor]
    scale_N: Tensor
    group: LinearGroup
    fp8_group: LinearGroup
    tables: LoraTables
    rows: list[tuple[Tensor, Tensor]]
    shrunk: Tensor  # of x
    shrunk_dy: Tensor


def make_world(inner: int, widths: tuple[int, ...], tokens: int) -> World:
    draw = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw, device=DEVICE) * size).bfloat16()

    rows = [(normal(NUM_JOBS * RANK, inner, size=inner**-0.5), normal(NUM_JOBS * RANK, n, size=0.1)) for n in widths]
    sums = [(torch.zeros(a.shape, device=DEVICE), torch.zeros(b.shape, device=DEVICE)) for a, b in rows]
    x, dys = normal(tokens, inner), [normal(tokens, n) for n in widths]
    weights = [normal(n, inner, size=inner**-0.5) for n in widths]
    q_NK, scale_N = fp8.quantize_rows([torch.cat(weights)])
    address = [
        [(*(t[RANK * j :].data_ptr() for t in (a, b, da, db)), RANK) for j in range(NUM_JOBS)]
        for (a, b), (da, db) in zip(rows, sums, strict=True)
    ]
    starts = np.tile(np.arange(NUM_JOBS) * RANK, (len(widths), 1))
    slots = Slots(np.array(address), starts, np.ones(starts.shape), np.zeros(len(widths)), rows)
    each = tokens // NUM_JOBS
    runs = [Run(j * each, (j + 1) * each, (each,)) for j in range(NUM_JOBS)]
    tables = build_tables(runs, slots, tokens, None, DEVICE)
    group = fused_linear.make_group(0, widths, inner, DEVICE)
    shrunk, shrunk_dy = fused_linear.shrink([x], group, tables, 0), fused_linear.shrink(dys, group, tables, 1)
    fp8_group = fused_linear.make_group(0, widths, inner, DEVICE, scale_N)
    return World(x, dys, weights, list(q_NK.split(widths)), scale_N, group, fp8_group, tables, rows, shrunk, shrunk_dy)


def ours_forward(world: World, group: LinearGroup, weights: list[Tensor]) -> list[Tensor]:
    return fused_linear.multiply(world.x, weights, [], world.shrunk, group, world.tables)


def ours_backward(world: World, group: LinearGroup, weights: list[Tensor]) -> Tensor:
    return fused_linear.multiply_back(world.dys, weights, world.shrunk_dy, group, world.tables)


def _whole_weight(world: World) -> Tensor:
    """All linears' weights as one [N, K], as they lie beside each other."""
    inner = world.x.shape[1]
    return world.quantised[0].as_strided((len(world.scale_N), inner), (inner, 1), 0)


def scaled_mm_forward(world: World, fast: bool) -> list[Tensor]:
    """Quantisation, one product for the whole group as its weights lie beside each other, and the expand of each linear."""
    q_TK, scale_T = fp8.quantize_rows([world.x])
    weight = _whole_weight(world)
    y = torch._scaled_mm(q_TK, weight.t(), scale_T[:, None], world.scale_N[None], out_dtype=torch.bfloat16, use_fast_accum=fast)
    ys = list(y.split(world.group.widths, 1))
    for m, y in enumerate(ys):
        _add_adapters(y, _blocks(world.shrunk, world, m), world.rows[m][1])
    return ys


def scaled_mm_backward(world: World, fast: bool) -> Tensor:
    q_TN, scale_T = fp8.quantize_rows(world.dys, world.scale_N)
    weight = _whole_weight(world)
    ones = torch.ones(1, weight.shape[1], device=DEVICE)
    dx = torch._scaled_mm(q_TN, fp8.transpose(weight).t(), scale_T[:, None], ones, out_dtype=torch.bfloat16, use_fast_accum=fast)
    for m in range(len(world.weights)):
        _add_adapters(dx, _blocks(world.shrunk_dy, world, m), world.rows[m][0])
    return dx


def _blocks(s: Tensor, world: World, linear: int) -> Tensor:
    """[jobs, tokens, rank] of one linear's columns of S."""
    start = linear * world.tables.width
    return s[:, start : start + RANK].unflatten(0, (NUM_JOBS, -1))


def _add_adapters(y_TN: Tensor, s_JTR: Tensor, rows: Tensor) -> None:
    y_TN.unflatten(0, (NUM_JOBS, -1)).baddbmm_(s_JTR, rows.unflatten(0, (NUM_JOBS, RANK)))


def use_tile(tile: Tile | None) -> None:
    """All products take `tile` (None: the one that the library chooses)."""
    tiles.gemm_tile = CHOSEN if tile is None else lambda num_columns, dtype: tile
    tiles.tile_by_rule.cache_clear()


CHOSEN = tiles.gemm_tile


def truth(world: World, backward: bool, rows: int = 512) -> Tensor:
    """The first `rows` tokens in fp64 on the quantised operands, adapters included."""
    weight = torch.cat(world.quantised).double()
    if backward:
        q_TN, scale_T = fp8.quantize_rows_in_torch([dy[:rows] for dy in world.dys], world.scale_N)
        found, s, place = q_TN.double() @ weight * scale_T.double()[:, None], world.shrunk_dy, 0
        parts = [found] * len(world.weights)
    else:
        q_TK, scale_T = fp8.quantize_rows_in_torch([world.x[:rows]])
        found, s, place = q_TK.double() @ weight.t() * scale_T.double()[:, None] * world.scale_N.double(), world.shrunk, 1
        parts = list(found.split(world.group.widths, 1))
    assert rows <= len(world.x) // NUM_JOBS, "more tokens than the first job has"
    for m, part in enumerate(parts):
        part += _blocks(s, world, m)[0, :rows].double() @ world.rows[m][place][:RANK].double()
    return found


def error_of(found: Tensor | list[Tensor], true: Tensor) -> float:
    whole = (torch.cat(found, 1) if isinstance(found, list) else found)[: len(true)].double()
    return float((whole - true).norm() / true.norm())


def milliseconds(step: Callable[[], object]) -> float:
    return machine.median_milliseconds(step, warmup=20)


def measure(name: str, world: World, tiles: list[str], backward: bool) -> list[dict[str, Any]]:
    """A row for each way. Fails where one is further from fp64 than bf16's rounding and fp8's sums explain."""
    true = truth(world, backward)
    ours = ours_backward if backward else ours_forward
    theirs = scaled_mm_backward if backward else scaled_mm_forward
    ways: dict[str, tuple[Tile | None, Callable[[], Any]]] = {"bf16": (None, partial(ours, world, world.group, world.weights))}
    ways |= {f"fp8 {tile}": (TILES[tile], partial(ours, world, world.fp8_group, world.quantised)) for tile in tiles}
    ways |= {f"_scaled_mm fast={fast}": (None, partial(theirs, world, fast)) for fast in (True, False)}
    flop = 2 * len(world.x) * sum(w.numel() for w in world.weights)
    rows: list[dict[str, Any]] = []
    for way, (tile, step) in ways.items():
        use_tile(tile)
        row: dict[str, Any] = {"shape": name, "pass": "backward" if backward else "forward", "way": way}
        try:
            error = error_of(step(), true)
            assert error < (0.06 if way == "bf16" else 0.02), f"{name} {way}: {error:.1e} from fp64"
            took = milliseconds(step)
            row |= {"ms": took, "tflops": flop / took / 1e9, "error_ppm": 1e6 * error}
        except AssertionError:
            raise
        except Exception as problem:  # a tile that this GPU has not the room for; the others go on
            row |= {"problem": f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"}
        rows.append(row)
    use_tile(None)
    quantise = partial(fp8.quantize_rows, world.dys, world.scale_N) if backward else partial(fp8.quantize_rows, [world.x])
    parts: dict[str, Callable[[], object]] = {"quantisation alone": quantise}
    if backward:
        parts["transposition alone"] = lambda: [fp8.transpose(w) for w in world.quantised]
    rows += [
        {"shape": name, "pass": "backward" if backward else "forward", "way": part, "ms": milliseconds(f)} for part, f in parts.items()
    ]
    return rows


def check(world: World) -> None:
    """What the tests show in the interpreter, here: the rounding to e4m3, the transposed bytes, a bad row."""
    for xs, scale_K in (([world.x], None), (world.dys, world.scale_N)):
        (q, scale), (true_q, true_scale) = fp8.quantize_rows(xs, scale_K), fp8.quantize_rows_in_torch(xs, scale_K)
        assert torch.equal(scale, true_scale) and torch.equal(q.view(torch.uint8), true_q.view(torch.uint8)), "other bits than torch's"
    assert torch.equal(fp8.transpose(world.quantised[0]).view(torch.uint8), world.quantised[0].view(torch.uint8).t())
    healthy = ours_forward(world, world.fp8_group, world.quantised)[0].clone()
    before = world.x[70, 7].clone()
    world.x[70, 7] = torch.nan
    spoilt = ours_forward(world, world.fp8_group, world.quantised)[0]
    world.x[70, 7] = before
    others = torch.arange(len(healthy), device=DEVICE) != 70
    assert bool(spoilt[70].isnan().all()) and torch.equal(spoilt[others], healthy[others]), "a bad row is not alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--tiles", nargs="+", choices=list(TILES), default=list(TILES))
    parser.add_argument("--commit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = machine.facts(DEVICE, args.commit) | {"tokens": args.tokens, "rows": []}
    print(f"{found['device']}, torch {torch.__version__}, {args.tokens} tokens")
    for name in args.shapes:
        inner, widths = SHAPES[name]
        world = make_world(inner, widths, args.tokens)
        check(world)
        for backward in (False, True):
            for row in measure(name, world, args.tiles, backward):
                figures = f"{row['ms']:7.3f} ms" if "ms" in row else row["problem"]
                figures += f" {row['tflops']:6.0f} TFLOP/s  error {row['error_ppm']:7.0f} ppm" if "tflops" in row else ""
                print(f"{name:>8} {row['pass']:>8} {row['way']:>24} {figures}", flush=True)
                found["rows"].append(row)
                machine.write(args.json, found)


if __name__ == "__main__":
    main()
