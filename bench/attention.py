"""Times causal attention of packed samples on one GPU: our kernels with several shapes of tiles, and whatever else computes the same.

    python -m bench.attention [--head-size 128] [--heads 32] [--kv-heads 8] [--tokens 8192] [--out FILE]

Medians of `triton.testing.do_bench`, in ms: bf16, q, k and v slices of one fused projection.
Prints first what a user of each gets (forward, backward, both, and the first call on new lengths: some build a plan then),
then every candidate of tiles, and last the best ones. A way or a tile that fails is reported, and the rest goes on. cuDNN's operation
on packed samples is not among them: with torch 2.11 it ends in an illegal memory access, which takes the process with it, as its backward
takes the size of a head for the longest length (https://github.com/pytorch/pytorch/pull/186142).
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from bench.machine import facts, median_milliseconds, write
from tlora.kernels.device import launched_as
from tlora.kernels.varlen_attention import (
    Rule,
    Saved,
    Tile,
    TileLists,
    launch_dkv,
    launch_dq,
    launch_forward,
    list_tiles,
    padded,
    tiles_of,
    varlen_attention_backward,
    varlen_attention_forward,
)

CANDIDATES: Mapping[str, Mapping[int, Sequence[Tile]]] = {
    "forward": {
        64: (Tile(128, 64, 8, 3), Tile(128, 128, 8, 3), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 128, 4, 3)),
        128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 128, 4, 2)),
        256: (Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 4, 3)),
    },
    "dq": {
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
        128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)),
        256: (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2), Tile(64, 64, 8, 2)),
    },
    "dkv": {
        64: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 8, 2)),
        128: (
            Tile(128, 64, 8, 2),
            Tile(128, 64, 8, 3),
            Tile(128, 32, 8, 3),
            Tile(128, 32, 8, 2),
            Tile(128, 32, 8, 4),
            Tile(64, 64, 8, 2),
            Tile(64, 64, 4, 2),
            Tile(64, 32, 4, 2),
            Tile(64, 32, 4, 3),
        ),
        256: (Tile(64, 32, 8, 2), Tile(64, 64, 8, 1), Tile(64, 16, 4, 2)),
    },
}


def mixes(tokens: int) -> dict[str, tuple[int, ...]]:
    """Lengths of samples that fill `tokens`; "real" is log-normal as chat data is: median 300, few beyond 2,000; "long" are two samples."""
    drawn = np.clip(np.random.default_rng(0).lognormal(np.log(300), 0.9, tokens // 16), 16, 2048).astype(int).tolist()
    real: list[int] = []
    while sum(real) < tokens:
        real.append(min(drawn.pop(0), tokens - sum(real)))
    equal = {f"{count}x{tokens // count}": (tokens // count,) * count for count in (4, 16, 32, 1)}
    return equal | {"real": tuple(real), "long": (tokens * 7 // 10, tokens - tokens * 7 // 10)}


@dataclass(frozen=True)
class Problem:
    """One mix of samples and its tensors."""

    lengths: tuple[int, ...]
    q_THD: Tensor
    k_TGD: Tensor
    v_TGD: Tensor
    dout_THD: Tensor
    plan: TileLists
    starts_S: Tensor

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1

    @property
    def scale(self) -> float:
        return self.q_THD.shape[2] ** -0.5


def make(lengths: tuple[int, ...], heads: int, kv_heads: int, head_size: int) -> Problem:
    device, tokens = torch.device("cuda"), sum(lengths)
    torch.manual_seed(0)
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_size, device=device, dtype=torch.bfloat16)
    dout = torch.randn(tokens, heads, head_size, device=device, dtype=torch.bfloat16)
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 1)
    return Problem(lengths, q, k, v, dout, list_tiles(lengths, device), starts)


Step = Callable[[], Any]
Way = Callable[[Problem], tuple[Step, Callable[[Any], Step]]]
"""A forward, and from its result a backward, ready to be timed."""


def ours(p: Problem) -> tuple[Step, Callable[[Any], Step]]:
    """As the engine calls it."""
    inputs = (p.q_THD, p.k_TGD, p.v_TGD)
    return (
        lambda: varlen_attention_forward(*inputs, p.plan, p.scale),
        lambda done: lambda: varlen_attention_backward(p.dout_THD, *inputs, *done, plan=p.plan, scale=p.scale),
    )


def by_autograd(forward: Callable[..., Tensor], inputs: Sequence[Tensor], dout: Tensor) -> tuple[Step, Callable[[Any], Step]]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return lambda: forward(*leaves), lambda out: lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def sdpa(backend: SDPBackend) -> Way:
    def way(p: Problem) -> tuple[Step, Callable[[Any], Step]]:
        if not p.equal:
            raise NotImplementedError("equal lengths only")
        q, k, v, dout = (t.unflatten(0, (len(p.lengths), -1)).transpose(1, 2) for t in (p.q_THD, p.k_TGD, p.v_TGD, p.dout_THD))

        def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return by_autograd(forward, (q, k, v), dout)

    return way


def varlen(p: Problem) -> tuple[Step, Callable[[Any], Step]]:
    """`torch.nn.attention.varlen`; how it is told to be causal has changed between releases."""
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    longest = max(p.lengths)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, p.starts_S, p.starts_S, longest, longest, **options)
        assert isinstance(out, Tensor)
        return out

    return by_autograd(forward, (p.q_THD, p.k_TGD, p.v_TGD), p.dout_THD)


WAYS: dict[str, Way] = {
    "ours": ours,
    "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
    "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "varlen_attn": varlen,
}


def milliseconds(step: Step) -> float:
    return median_milliseconds(step, warmup=10, rep=40)


def first_call(step: Step) -> tuple[Any, float]:
    torch.cuda.synchronize()
    start = time.perf_counter()
    done = step()
    torch.cuda.synchronize()
    return done, 1e3 * (time.perf_counter() - start)


def attempt(way: Way, p: Problem, true: Sequence[Tensor] | None) -> tuple[dict[str, Any], Sequence[Tensor]]:
    """Times of one way; its out, dq, dk and dv; and how far they are from `true`, relative."""
    forward, prepare = way(p)
    done, first_forward = first_call(forward)
    backward = prepare(done)
    grads, first_backward = first_call(backward)
    found = [flat(t) for t in (done if isinstance(done, Tensor) else done[0], *grads)]
    row: dict[str, Any] = {"first_forward": first_forward, "first_backward": first_backward}
    if true is not None:
        row["errors"] = [float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, true, strict=True)]
    return row | {"forward": milliseconds(forward), "backward": milliseconds(backward)}, found


def flat(t: Tensor) -> Tensor:
    return t.transpose(1, 2).flatten(0, 1) if t.dim() == 4 else t


def compare(name: str, p: Problem) -> dict[str, Any]:
    """All ways on one mix."""
    rows: dict[str, Any] = {}
    true: Sequence[Tensor] | None = None
    for label, way in WAYS.items():
        try:
            rows[label], found = attempt(way, p, true)
        except Exception as error:  # whatever a rival's operation raises is a result about it
            if label == "ours":
                raise
            rows[label] = {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:110] if str(error).strip() else ''}"}
            print(f"{name:8} {label:30} {rows[label]['failed']}", flush=True)
            continue
        true = true or found
        row = rows[label]
        apart = f"   differs from ours by {max(row['errors']):.1e}" if "errors" in row else ""
        forward, backward = row["forward"], row["backward"]
        times = f"forward {forward:6.3f}  backward {backward:6.3f}  both {forward + backward:6.3f}"
        print(f"{name:8} {label:30} {times}   first call {row['first_forward']:7.1f} + {row['first_backward']:7.1f}{apart}", flush=True)
    return rows


def steps_of(p: Problem) -> dict[str, Callable[[Tile], Step]]:
    """Our three kernels, each by its tile."""
    rule, tiles = Rule(p.scale), tiles_of(p.q_THD.shape[2], p.q_THD.dtype, launched_as(p.q_THD.device))
    inputs = (p.q_THD, p.k_TGD, p.v_TGD)
    saved = Saved(p.dout_THD, *inputs, *launch_forward(*inputs, p.plan, rule, tiles.forward))
    _, delta = launch_dq(saved, p.plan, rule, tiles.dq)
    return {
        "forward": lambda tile: lambda: launch_forward(*inputs, p.plan, rule, tile),
        "dq": lambda tile: lambda: launch_dq(saved, p.plan, rule, tile),
        "dkv": lambda tile: lambda: launch_dkv(saved, delta, p.plan, rule, tile),
    }


def try_tiles(problems: Mapping[str, Problem], head_size: int) -> dict[str, Any]:
    """Every candidate on every mix, and per kernel and mix the best."""
    table: dict[str, Any] = {}
    steps = {name: steps_of(p) for name, p in problems.items()}
    print(f"\n{'':42}" + "".join(f"{name:>9}" for name in problems))
    for kernel, by_size in CANDIDATES.items():
        table[kernel] = {}
        for tile in by_size[max(64, padded(head_size))]:
            label = f"rows {tile.rows} block {tile.block} warps {tile.warps} stages {tile.stages}"
            try:
                table[kernel][label] = {name: milliseconds(steps[name][kernel](tile)) for name in problems}
            except Exception as error:  # too much shared memory, for one: a result about the candidate
                print(f"{kernel:8} {label:32} {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            print(f"{kernel:8} {label:32}  " + "".join(f"{ms:9.3f}" for ms in table[kernel][label].values()), flush=True)
    for kernel, found in table.items():
        for name in problems:
            best = min(found, key=lambda label: found[label][name])
            print(f"best {kernel:8} {name:8} {best}, {found[best][name]:.3f} ms")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="file for the figures, JSON")
    parser.add_argument("--commit", help="which commit this is, where there is no git")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this times kernels of a GPU, and there is none")
    start = time.perf_counter()
    heads = {"heads": args.heads, "kv_heads": args.kv_heads, "head_size": args.head_size}
    problems = {name: make(lengths, **heads) for name, lengths in mixes(args.tokens).items()}
    ways = {name: compare(name, p) for name, p in problems.items()}
    found = {"ways_ms": ways, "tiles_ms": try_tiles(problems, args.head_size), **heads, "tokens": args.tokens}
    if args.out:
        write(args.out, facts(torch.device("cuda"), args.commit) | found)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
