"""Kernels of experts with eight jobs, at the shapes of two bases: milliseconds of each, beside the plain path and torch's grouped_mm.

    python -m bench.expert_kernels --out FILE                                # a GPU, about a minute
    TRITON_INTERPRET=1 python -m bench.expert_kernels --device cpu --tiny    # proves on a CPU that it is right; its times mean nothing

Each kernel is timed with several tiles, which are compiled first, on all cores. Before anything is timed, outputs, gradients and sums are
compared with the plain path, a job alone with the same job among eight, byte for byte, and each tile's product with the first one's.
`layer` is one layer of experts, forward and backward with its activation, as a model runs it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import operator
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import machine
from tlora.kernels import expert_kernels as kernels
from tlora.kernels import experts as plain
from tlora.kernels.cards import HOPPER, CardClass
from tlora.kernels.compile_request import ExpertRequest
from tlora.kernels.device import capability_of, class_of, launched_as
from tlora.kernels.expert_launches import META, empty_routing
from tlora.kernels.lora_tables import DA, DB, A, B
from tlora.kernels.multi_lora import LoraWeights
from tlora.kernels.reference import Segment
from tlora.kernels.tiles import SkinnyTile, Tile

MOST_ERROR = 2e-2  # relative, in norm, of bf16 against bf16
SCALE, JOBS = 2.0, 8


@dataclass(frozen=True)
class Shape:
    """A layer of experts; `rank` is an expert's, `slots` the experts of a token."""

    hidden: int
    width: int
    experts: int
    slots: int
    rank: int
    transposed: bool

    def parameter(self, up: bool) -> tuple[int, int]:
        """In and out features of gate and up, or of down."""
        return (self.hidden, 2 * self.width) if up else (self.width, self.hidden)


SHAPES = {"qwen3-30b-a3b": Shape(2048, 768, 128, 8, 4, False), "gpt-oss-20b": Shape(2880, 2880, 32, 4, 8, True)}
TINY = {"tiny": Shape(32, 48, 4, 2, 3, False), "tiny in columns": Shape(48, 32, 4, 2, 3, True)}


def gemm_tiles(card: CardClass, rows: int) -> list[Tile]:
    """Those that are tried, the default ones first."""
    tiles = [kernels.gemm_tile(rows, columns, torch.bfloat16, card) for columns in (1 << 14,)]
    if card.loads == "pointers":
        return [*tiles, Tile(rows, 64, 32, 4, 4), Tile(rows, 128, 32, 3, 4), Tile(rows, 128, 32, 4, 8), Tile(rows, 128, 64, 2, 4)]
    if rows == 64:
        sizes = ((256, 4, 4, 8), (256, 4, 8, 8), (128, 5, 4, 8), (64, 5, 4, 8), (128, 4, 4, 32))
    else:
        sizes = ((256, 3, 8, 8), (128, 4, 4, 8), (256, 4, 8, 4), (256, 4, 8, 16))
    return [*tiles, *(Tile(rows, columns, 64, stages, warps, band=band) for columns, stages, warps, band in sizes)]


def shrink_tiles(rows: int) -> list[SkinnyTile]:
    sizes = ((rows, 128, 3, 4), (64, 64, 3, 4), (64, 256, 3, 4), (32, 128, 3, 4))
    return [kernels.shrink_tile(torch.bfloat16), *(SkinnyTile(*size) for size in sizes)]


def sum_tiles() -> list[SkinnyTile]:
    sizes = ((32, 128, 1, 4), (16, 256, 1, 8), (32, 256, 1, 8), (16, 128, 1, 2), (16, 64, 1, 2))
    return [kernels.sum_tile(torch.bfloat16), *(SkinnyTile(*size) for size in sizes)]


@dataclass(frozen=True)
class Parameter:
    """One of the two parameters of a layer with its batch: x [T, K] where `gathers`, else [S, K], dy [S, N]; banks A, B, dA, dB."""

    shape: Shape
    gathers: bool
    weights: plain.ExpertWeights
    x: Tensor
    dy: Tensor
    banks: list[Tensor]
    routing: kernels.ExpertRouting
    rows: kernels.ExpertRows

    def multiply(self, s: Tensor, tile: Tile | None = None) -> Tensor:
        return kernels.multiply(self.x, self.weights, self.routing, (s, self.rows), self.gathers, tile=tile)

    def multiply_back(self, ds: Tensor, tile: Tile | None = None) -> Tensor:
        return kernels.multiply(self.dy, self.weights, self.routing, (ds, self.rows), False, back=True, tile=tile)

    def shrink(self, tile: SkinnyTile | None = None) -> Tensor:
        return kernels.shrink(self.x, self.routing, self.rows, A, self.gathers, tile)

    def shrink_back(self, tile: SkinnyTile | None = None) -> Tensor:
        return kernels.shrink(self.dy, self.routing, self.rows, B, False, tile)

    def sum_a(self, ds: Tensor, tile: SkinnyTile | None = None) -> None:
        kernels.add_sums(self.x, ds, self.routing, self.rows, DA, self.gathers, tile)

    def sum_b(self, s: Tensor, tile: SkinnyTile | None = None) -> None:
        kernels.add_sums(self.dy, s, self.routing, self.rows, DB, False, tile)


def lengths_of(tokens: int, jobs: int = JOBS) -> list[list[int]]:
    """Two samples a job, a third and two thirds of its tokens."""
    own = tokens // JOBS
    return [[own // 3, own - own // 3]] * jobs


def choose(shape: Shape, tokens: int, device: torch.device) -> Tensor:
    """Experts of each token, any alike."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.rand(tokens, shape.experts, generator=generator, device=device).topk(shape.slots, 1).indices


def parameters_of(shape: Shape, tokens: int, tile_rows: int, device: torch.device, dtype: torch.dtype) -> list[Parameter]:
    """Gate and up, and down, of one layer."""
    torch.manual_seed(0)
    chosen_TK, like, made = choose(shape, tokens, device), {"device": device, "dtype": dtype}, list[Parameter]()
    for up in (True, False):
        inner, columns = shape.parameter(up)
        matrix = (inner, columns) if shape.transposed else (columns, inner)
        weight = torch.randn(shape.experts, *matrix, **like) * inner**-0.5
        bias = torch.randn(shape.experts, columns, **like) if shape.transposed else None
        ranks = JOBS * shape.experts * shape.rank
        banks = [torch.randn(ranks, width, **like) * inner**-0.5 for width in (inner, columns)]
        banks += [torch.zeros(ranks, width, device=device) for width in (inner, columns)]
        batch = kernels.make_batch(lengths_of(tokens), tokens, {"": rows_of(shape, banks, JOBS)}, device)
        rows = batch.rows("")
        assert rows is not None
        routing = kernels.route(chosen_TK, batch, shape.experts, tile_rows)
        x = torch.randn(tokens if up else tokens * shape.slots, inner, **like)
        dy = torch.randn(tokens * shape.slots, columns, **like)
        made.append(Parameter(shape, up, plain.ExpertWeights(weight, bias, shape.transposed), x, dy, banks, routing, rows))
    return made


def rows_of(shape: Shape, banks: list[Tensor], jobs: int) -> tuple[np.ndarray, np.ndarray]:
    first = [job * shape.experts * shape.rank for job in range(jobs)]
    return np.array([[*(bank[row].data_ptr() for bank in banks), shape.rank] for row in first], np.int64), np.full(jobs, SCALE)


def plain_adapters(of: Parameter, routing: plain.Routing) -> plain.ExpertAdapters:
    rank, segments = of.shape.rank, list[Segment]()
    for run in routing.runs:
        first = (run.run * of.shape.experts + run.expert) * rank
        segments.append(Segment(run.s0, run.s1, first, first + rank, SCALE))
    a, b, da, db = of.banks
    return plain.ExpertAdapters(LoraWeights(a, b, torch.zeros_like(da), torch.zeros_like(db)), tuple(segments))


def check(of: Parameter, tokens: int) -> dict[str, float]:
    """Relative differences from the plain path of y, dx and the sums; and whether the first job alone has the same bytes."""
    chosen_TK = choose(of.shape, tokens, of.x.device)
    routing = plain.route(chosen_TK, list(accumulate(map(sum, lengths_of(tokens)))), of.shape.experts)
    adapters = plain_adapters(of, routing)
    x_SK = (of.x.index_select(0, routing.order_S // of.shape.slots) if of.gathers else of.x).requires_grad_()
    y_SN = plain.expert_linear(x_SK, lambda: of.weights, routing, adapters)
    y_SN.backward(of.dy)
    assert x_SK.grad is not None
    s, ds = of.shrink(), of.shrink_back()
    found = {"y": _relative(of.multiply(s), y_SN.detach()), "dx": _relative(of.multiply_back(ds), x_SK.grad)}
    of.sum_a(ds)
    of.sum_b(s)
    sums = adapters.weights.da_RK, adapters.weights.db_RN
    found |= {name: _relative(*pair) for name, pair in zip(("dA", "dB"), zip(of.banks[2:], sums, strict=True), strict=True)}
    x_SK.requires_grad_(False)
    return found


@torch.no_grad()
def same_alone(of: Parameter, tokens: int) -> bool:
    """Whether y, dx and sums of the first job are, byte for byte, those of its own tokens alone."""
    shape, own, device = of.shape, tokens // JOBS, of.x.device
    banks = [*of.banks[:2], *(torch.zeros_like(bank) for bank in of.banks[2:])]
    batch = kernels.make_batch(lengths_of(tokens, 1), own, {"": rows_of(shape, banks, 1)}, device)
    routing = kernels.route(choose(shape, tokens, device)[:own], batch, shape.experts, 64)
    rows = batch.rows("")
    assert rows is not None
    mine = of.routing.inverse_S[: own * shape.slots].index_select(0, routing.order_S)  # where each row lies among all
    x = of.x[:own] if of.gathers else of.x.index_select(0, mine)
    alone = Parameter(shape, of.gathers, of.weights, x, of.dy.index_select(0, mine), banks, routing, rows)
    for bank in of.banks[2:]:
        bank.zero_()
    results: list[list[Tensor]] = []
    for each in (of, alone):
        s, ds = each.shrink(), each.shrink_back()
        each.sum_a(ds)
        each.sum_b(s)
        results.append([each.multiply(s), each.multiply_back(ds), *(bank[: shape.experts * shape.rank] for bank in each.banks[2:])])
    together = [*(whole.index_select(0, mine) for whole in results[0][:2]), *results[0][2:]]
    return all(torch.equal(ours, theirs) for ours, theirs in zip(together, results[1], strict=True))


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def milliseconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median of `repeats` timings, of three calls each."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(3):
                work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 3)
        else:
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def kernel_rows(of: Parameter, tile_rows: int, card: CardClass) -> Iterator[dict[str, Any]]:
    """Each kernel with each of its tiles, and the base alone."""
    device, s, ds = of.x.device, of.shrink(), of.shrink_back()
    work = 2e-9 * len(of.routing.order_S) * of.x.shape[1] * of.dy.shape[1]
    first: dict[str, Tensor] = {}
    for tile in gemm_tiles(card, tile_rows):
        for name, product in (("forward", partial(of.multiply, s, tile)), ("input gradient", partial(of.multiply_back, ds, tile))):
            y = product()
            same = torch.equal(first.setdefault(name, y), y)
            ms = milliseconds(product, device)
            yield {"kernel": name, "tile": repr(tile), "ms": ms, "tflops": work / ms, "same_bits": same}
    base = partial(kernels.multiply, of.x, of.weights, of.routing, None, of.gathers, tile=gemm_tiles(card, tile_rows)[0])
    ms = milliseconds(base, device)
    yield {"kernel": "forward without adapters", "ms": ms, "tflops": work / ms}
    for tile in shrink_tiles(tile_rows):
        for name, launch in (("shrink x", of.shrink), ("shrink dy", of.shrink_back)):
            yield {"kernel": name, "tile": repr(tile), "ms": milliseconds(partial(launch, tile), device)}
    for tile in sum_tiles():
        for name, add, of_rows in (("sum x", of.sum_a, ds), ("sum dy", of.sum_b, s)):
            yield {"kernel": name, "tile": repr(tile), "ms": milliseconds(partial(add, of_rows, tile), device)}
    if device.type == "cuda":
        yield library_row(of, work)


def library_row(of: Parameter, work: float) -> dict[str, Any]:
    """torch's grouped product, base alone, of rows that are sorted already."""
    cells, samples = of.routing.cells, of.routing.num_samples
    weight: Any = of.weights.weight
    right = weight if of.shape.transposed else weight.transpose(1, 2)
    x_SK = of.x.index_select(0, of.routing.order_S // of.shape.slots) if of.gathers else of.x
    try:
        ms = milliseconds(partial(torch._grouped_mm, x_SK, right, offs=cells[samples::samples].contiguous()), of.x.device)
    except RuntimeError as error:
        return {"kernel": "grouped_mm", "why_not": str(error).splitlines()[0][:200]}
    return {"kernel": "grouped_mm", "ms": ms, "tflops": work / ms}


def layer_rows(parameters: list[Parameter], tokens: int, tile_rows: int) -> Iterator[dict[str, Any]]:
    """A layer, forward and backward: by the kernels, and by the plain path."""
    up, down = parameters
    shape, device = up.shape, up.x.device
    x_TH, dout_TH = up.x.clone().requires_grad_(), torch.randn_like(up.x)
    chosen_TK, weights_TK = choose(shape, tokens, device), torch.rand(tokens, shape.slots, device=device, dtype=up.x.dtype)
    batch = kernels.make_batch(lengths_of(tokens), tokens, {"": rows_of(shape, up.banks, JOBS)}, device)

    def gate(y_SN: Tensor) -> Tensor:
        left, right = y_SN.chunk(2, -1)
        return F.silu(left) * right

    def by_kernels() -> Tensor:
        routing = kernels.route(chosen_TK, batch, shape.experts, tile_rows)
        y_SN = kernels.expert_linear(x_TH, lambda: up.weights, routing, up.rows, True)
        return kernels.combine(kernels.expert_linear(gate(y_SN), lambda: down.weights, routing, down.rows), weights_TK, routing)

    def by_plain() -> Tensor:
        routing = plain.route(chosen_TK, list(accumulate(map(sum, lengths_of(tokens)))), shape.experts)
        y_SN = plain.expert_linear(plain.dispatch(x_TH, routing), lambda: up.weights, routing, plain_adapters(up, routing))
        y_SH = plain.expert_linear(gate(y_SN), lambda: down.weights, routing, plain_adapters(down, routing))
        return plain.combine(y_SH, weights_TK, routing)

    for name, run in (("kernels", by_kernels), ("plain", by_plain)):
        repeats = 5 if name == "kernels" else 1
        with torch.no_grad():
            forward = milliseconds(run, device, repeats)
        whole = milliseconds(lambda: run().backward(dout_TH), device, repeats)  # noqa: B023
        yield {"kernel": f"layer, {name}", "forward_ms": forward, "ms": whole}
    routing = kernels.route(chosen_TK, batch, shape.experts, tile_rows)
    yield {"kernel": "route", "ms": milliseconds(lambda: kernels.route(chosen_TK, batch, shape.experts, tile_rows), device)}
    y_SH = torch.randn(tokens * shape.slots, shape.hidden, device=device, dtype=up.x.dtype)
    yield {"kernel": "add slots", "ms": milliseconds(lambda: kernels.add_slots(y_SH, weights_TK, routing), device)}
    yield {"kernel": "spread slots", "ms": milliseconds(lambda: kernels.spread_slots(dout_TH, y_SH, weights_TK, routing, True), device)}


def launches(card: CardClass) -> Iterator[Callable[[], object]]:
    """All that is timed, on tensors without memory."""
    for shape in SHAPES.values():
        for tile_rows in (64, 128):
            for up in (True, False):
                inner, columns = shape.parameter(up)
                request = ExpertRequest(inner, columns, shape.experts, shape.slots, shape.transposed, shape.transposed, up, "bfloat16")
                routing, rows = empty_routing(request, tile_rows)
                matrix = (inner, columns) if shape.transposed else (columns, inner)
                empty = partial(torch.empty, dtype=torch.bfloat16, device=META)
                bias = empty(shape.experts, columns) if shape.transposed else None
                weights = plain.ExpertWeights(empty(shape.experts, *matrix), bias, shape.transposed)
                count = len(routing.order_S)
                x, dy = empty(count // shape.slots if up else count, inner), empty(count, columns)
                of = Parameter(shape, up, weights, x, dy, [], routing, rows)
                s = empty(count, rows.width)
                yield partial(kernels.multiply, of.x, weights, routing, None, up, tile=gemm_tiles(card, tile_rows)[0])
                for tile in gemm_tiles(card, tile_rows):
                    yield partial(of.multiply, s, tile)
                    yield partial(of.multiply_back, s, tile)
                for tile in shrink_tiles(tile_rows):
                    yield partial(of.shrink, tile)
                    yield partial(of.shrink_back, tile)
                for tile in sum_tiles() if tile_rows == 64 else []:
                    yield partial(of.sum_a, s, tile)
                    yield partial(of.sum_b, s, tile)


def compile_all(capability: int) -> None:
    from tlora.kernels import compile_ahead
    from tlora.kernels.device import compile_as, is_forced

    compile_ahead._without_a_gpu(capability)
    card = class_of(capability) or HOPPER
    if is_forced():
        compile_as(card, capability)
    with multiprocessing.get_context("fork").Pool(min(32, multiprocessing.cpu_count())) as pool:
        list(pool.imap_unordered(operator.call, list(launches(card)), chunksize=1))


def rows_for(shape: Shape, tokens: int, tile_rows: int, place: tuple[torch.device, torch.dtype], times: bool) -> Iterator[dict[str, Any]]:
    """All that is found of one layer; of a wrong result there is no time."""
    parameters, card = parameters_of(shape, tokens, tile_rows, *place), launched_as(place[0])
    for part, of in zip(("gate_up", "down"), parameters, strict=True):
        errors = check(of, tokens)
        if not max(errors.values()) <= MOST_ERROR:
            raise SystemExit(f"{shape}, {tokens} tokens, {part}: {errors}; no time of a wrong result")
        yield {"parameter": part, "kernel": "check", "errors": errors, "alone_is_together": same_alone(of, tokens)}
        if times:
            yield from ({"parameter": part} | row for row in kernel_rows(of, tile_rows, card))
    if times:
        yield from layer_rows(parameters, tokens, tile_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), default=(8192, 1024))
    parser.add_argument("--tiny", action="store_true", help="small layers in fp16, for a CPU")
    parser.add_argument("--compile-for", type=int, help="compile what is timed for a GPU of this capability, and end")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args()
    if options.compile_for:
        compile_all(options.compile_for)
        return
    device, begun = torch.device(options.device), time.monotonic()
    dtype = torch.float16 if options.tiny else torch.bfloat16
    found: dict[str, Any] = {"benchmark": "expert kernels", **machine.facts(device, options.commit), "rows": []}
    if device.type == "cuda":
        subprocess.run([sys.executable, "-m", "bench.expert_kernels", "--compile-for", str(capability_of(device))], check=True)
    found["compile_seconds"] = time.monotonic() - begun
    for name, shape in (TINY if options.tiny else SHAPES).items():
        for tokens in (48,) if options.tiny else options.tokens:
            best = kernels.tile_rows_for(tokens * shape.slots, shape.experts, dtype)
            for tile_rows in (best,) if options.tiny else (best, 192 - best):
                for row in rows_for(shape, tokens, tile_rows, (device, dtype), times=not options.tiny):
                    found["rows"].append({"shape": name, "tokens": tokens, "tile_rows": tile_rows} | row)
                    print(_line(found["rows"][-1]), flush=True)
                found["seconds"] = time.monotonic() - begun
                machine.write(options.out, found)
    print(f"{found['seconds']:.0f} s, of which compiling {found['compile_seconds']:.0f}")


def _line(row: dict[str, Any]) -> str:
    return " ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())


if __name__ == "__main__":
    main()
