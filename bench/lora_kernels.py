"""What the adapters add to the linears of one decoder block as the model runs them, forward and backward, over the bare base linears.

    python -m bench.lora_kernels --out FILE                                # Llama-3-8B's block, on a GPU
    TRITON_INTERPRET=1 python -m bench.lora_kernels --device cpu --tiny    # proves on a CPU that it is right; its times mean nothing

q, k and v are one product over one input, gate and up are one; bare is `F.linear` and `dy @ W` of the same joined weight. Before a
case is timed, its outputs and gradients are compared with the formula in fp32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import machine
from tlora.adapter_shape import ROW_ALIGNMENT
from tlora.kernels import fused_linear
from tlora.kernels.lora_tables import LoraTables, Run, Slots, build_tables
from tlora.kernels.reference import Segment, Segments, lora_backward_, lora_forward_

MOST_ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # relative, in norm, against fp32 from the same inputs
CACHE_BYTES = 200 << 20  # four times the L2 of an H200: inputs in turn, so that none is still there from the last time
SAMPLE_TOKENS = 512
SCALE = 2.0

# Name -> (in features, out features of the linears that share the input).
LLAMA_3_8B = {"q/k/v": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate/up": (4096, (14336, 14336)), "down": (14336, (4096,))}
TINY = {"q/k/v": (64, (64, 32, 32)), "o": (64, (64,)), "gate/up": (64, (96, 96)), "down": (96, (64,))}
ADAPTERS = {"8 of rank 8,16,32,64 twice": (8, 16, 32, 64) * 2, "16 of rank 64": (64,) * 16, "64 of rank 16": (16,) * 64}


@dataclass(frozen=True)
class Case:
    """One group of linears with its adapters: rows of linear m are `a[m]` [R, K] and `b[m]` [R, N_m], slot after slot as in the bank."""

    name: str
    widths: tuple[int, ...]
    weight_NK: Tensor  # of all linears
    weights: list[Tensor]  # each linear's rows of it
    group: fused_linear.LinearGroup
    tables: LoraTables
    segments: Segments
    a: list[Tensor]
    b: list[Tensor]
    da: list[Tensor]
    db: list[Tensor]


@dataclass(frozen=True)
class Inputs:
    """x [T, K], and dy as one tensor [T, N] for the joined base and as one per linear [T, N_m] for ours: as each gets them in a model."""

    x_TK: Tensor
    dy_TN: Tensor
    dys: list[Tensor]


def run(case: Case, inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    """Each linear's y and the dx of the group, adapters' gradients added to their sums: what the model's operation does in all."""
    ys, s = fused_linear.forward(inputs.x_TK, case.weights, (), case.group, case.tables)
    return ys, fused_linear.backward(inputs.dys, inputs.x_TK, s, case.weights, case.group, case.tables)


def run_bare(case: Case, inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    """The base alone, by the vendor's library."""
    return [F.linear(inputs.x_TK, case.weight_NK)], inputs.dy_TN @ case.weight_NK


def make_case(
    name: str, shape: tuple[int, tuple[int, ...]], ranks: Sequence[int], tokens: int, place: tuple[torch.device, torch.dtype]
) -> Case:
    """`tokens` in equal runs for adapters of `ranks`."""
    (inner, widths), (device, dtype) = shape, place
    assert tokens % len(ranks) == 0, f"{tokens} tokens cannot be shared equally by {len(ranks)} adapters"
    each = tokens // len(ranks)
    *starts, total = np.cumsum([0, *(-(-rank // ROW_ALIGNMENT) * ROW_ALIGNMENT for rank in ranks)]).tolist()
    a = [torch.randn(total, inner, device=device, dtype=dtype) * inner**-0.5 for _ in widths]
    b = [torch.randn(total, width, device=device, dtype=dtype) * 0.02 for width in widths]
    da, db = ([torch.zeros_like(rows, dtype=torch.float32) for rows in all_rows] for all_rows in (a, b))
    addresses = [
        [[*(t[start].data_ptr() for t in (a[m], b[m], da[m], db[m])), rank] for start, rank in zip(starts, ranks, strict=True)]
        for m in range(len(widths))
    ]
    lengths = (min(each, SAMPLE_TOKENS),) * max(1, each // SAMPLE_TOKENS)
    runs = [Run(i * each, (i + 1) * each, lengths) for i in range(len(ranks))]
    slots = Slots(
        rows_LS5=np.array(addresses, np.int64),
        starts_LS=np.array([starts] * len(widths), np.int32),
        scales_LS=np.full((len(widths), len(ranks)), SCALE, np.float32),
        module_keys_L=np.arange(len(widths)),
        weights=list(zip(a, b, strict=True)),
    )
    tables = build_tables(runs, slots, tokens, None, device)
    segments = tuple(Segment(r.t0, r.t1, start, start + rank, SCALE) for r, start, rank in zip(runs, starts, ranks, strict=True))
    weight_NK = torch.randn(sum(widths), inner, device=device, dtype=dtype) * inner**-0.5
    weights = list(weight_NK.split(widths))
    return Case(name, widths, weight_NK, weights, fused_linear.make_group(0, widths, inner, device), tables, segments, a, b, da, db)


def make_inputs(case: Case, tokens: int) -> list[Inputs]:
    """As many as it takes to fill the caches with any one part of them."""
    outer, inner = case.weight_NK.shape
    size = tokens * (outer + inner) * case.weight_NK.element_size()
    like = {"device": case.weight_NK.device, "dtype": case.weight_NK.dtype}
    found: list[Inputs] = []
    for _ in range(max(2, -(-CACHE_BYTES // size)) if case.weight_NK.device.type == "cuda" else 1):
        dy_TN = torch.randn(tokens, outer, **like)
        dys = [dy.contiguous() for dy in dy_TN.split(case.widths, 1)]
        found.append(Inputs(torch.randn(tokens, inner, **like), dy_TN, dys))
    return found


@torch.no_grad()
def errors(case: Case, inputs: Inputs) -> dict[str, float]:
    """Relative errors of y, dx and all adapters' gradients against the formula in fp32 from the same inputs."""
    for sums in (*case.da, *case.db):
        sums.zero_()
    ys, dx_TK = run(case, inputs)
    x, weight = inputs.x_TK.float(), case.weight_NK.float()
    want_y, want_dx, first = x @ weight.t(), inputs.dy_TN.float() @ weight, 0
    found: dict[str, float] = {}
    for m, width in enumerate(case.widths):
        columns = slice(first, first + width)
        a, b, da, db = case.a[m].float(), case.b[m].float(), torch.zeros_like(case.da[m]), torch.zeros_like(case.db[m])
        shrunk = lora_forward_(want_y[:, columns], x, a, b, case.segments, None, 0)
        lora_backward_(want_dx, inputs.dys[m].float(), x, shrunk, a, b, da, db, case.segments, None, 0)
        found[f"dA {m}"], found[f"dB {m}"] = _relative(case.da[m], da), _relative(case.db[m], db)
        first += width
    return found | {"y": _relative(torch.cat(ys, 1), want_y), "dx": _relative(dx_TK, want_dx)}


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def time_pair(case: Case, inputs: Sequence[Inputs], repeats: int) -> tuple[float, float]:
    """Seconds of one forward and backward: bare, and with adapters. They take turns, so that a change of clocks meets both; medians."""
    works = [_replayable(work, case, inputs) for work in (run_bare, run)]
    times: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for work, seconds in zip(works, times, strict=True):
            seconds.append(_seconds(work, case.weight_NK.device) / len(inputs))
    bare, ours = (statistics.median(seconds[1:]) for seconds in times)
    return bare, ours


def _replayable(work: Callable[[Case, Inputs], object], case: Case, inputs: Sequence[Inputs]) -> Callable[[], None]:
    """`work` over all inputs, on a GPU as one CUDA graph: what the kernels take, whatever the host does."""

    @torch.no_grad()
    def all_inputs() -> None:
        for each in inputs:
            work(case, each)

    if case.weight_NK.device.type != "cuda":
        return all_inputs
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and lets the library make its workspace, before the capture
        all_inputs()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_inputs()
    return graph.replay


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def measure(adapters: str, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the result: all groups of the block with one set of adapters."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    groups: dict[str, dict[str, float]] = {}
    for name, shape in (TINY if options.tiny else LLAMA_3_8B).items():
        torch.manual_seed(0)
        case = make_case(name, shape, ADAPTERS[adapters], tokens, (device, dtype))
        inputs = make_inputs(case, tokens)
        worst = max(errors(case, inputs[0]).items(), key=lambda item: item[1])
        if not worst[1] <= MOST_ERROR[dtype]:
            raise SystemExit(f"{name}, {adapters}, {tokens} tokens: {worst[0]} is off by {worst[1]:.1e}; no time of a wrong result")
        bare, ours = time_pair(case, inputs, options.repeats)
        groups[name] = {"bare_seconds": bare, "seconds": ours, "ratio": ours / bare, "worst_error": worst[1]}
        del case, inputs
    bare, ours = (sum(group[key] for group in groups.values()) for key in ("bare_seconds", "seconds"))
    return {"adapters": adapters, "tokens": tokens, "ratio": ours / bare, "bare_seconds": bare, "seconds": ours, "groups": groups}


def format_table(found: dict[str, Any]) -> str:
    """Seconds over bare seconds, for a terminal."""
    names = list(found["rows"][0]["groups"])
    lines = [f"{found['device']}, torch {found['versions']['torch']}, commit {found['commit']}: {found['command']}"]
    lines.append(f"{'forward + backward over bare':28} {'tokens':>7} {'block':>6}" + "".join(f"{name:>9}" for name in names) + "  bare ms")
    for row in found["rows"]:
        ratios = "".join(f"{row['groups'][name]['ratio']:9.3f}" for name in names)
        lines.append(f"{row['adapters']:28} {row['tokens']:7,} {row['ratio']:6.3f}{ratios} {row['bare_seconds'] * 1e3:8.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), help="default: 4096,16384; 128 with --tiny")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tiny", action="store_true", help="narrow linears, for a CPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args()
    machine.interpret_all_precisions()
    found: dict[str, Any] = {"benchmark": "kernels", **machine.facts(torch.device(options.device), options.commit), "rows": []}
    for adapters in ADAPTERS:
        for tokens in options.tokens or ((128,) if options.tiny else (4096, 16384)):
            found["rows"].append(measure(adapters, tokens, options))
            machine.write(options.out, found)
    print(format_table(found))


if __name__ == "__main__":
    main()
