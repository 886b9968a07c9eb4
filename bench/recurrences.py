"""Times the recurrences of a hybrid's layer on one GPU: the gated delta rule by kernels and by PyTorch's operations, and the convolution.

    python -m bench.recurrences --out FILE       # Qwen3.5-9B's shape, 8,192 tokens; about a minute

Before anything is timed, out and gradients are compared with fp64, and a sample's bytes in company with those of it alone. `forward` and
`both` (with backward) are medians in ms; `bytes` what a call takes at most beyond its inputs; `kernels` the ms of each kernel in `both`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench.machine import facts, median_milliseconds, write
from tlora.kernels.chunk_layout import list_chunks
from tlora.kernels.delta_kernels import delta_rule_by_kernels
from tlora.kernels.delta_rule import CHUNK, gated_delta_rule
from tlora.kernels.triton_conv import causal_convolution

KEY_HEADS, VALUE_HEADS, SIZE, WIDTH = 16, 32, 128, 4
MIXES = {
    "16 of 512": (512,) * 16,
    "24 of 4 to 2,048": (
        2048, 1024, 800, 600, 500, 450, 400, 350, 300, 280, 250, 220, 200, 180, 160, 120, 80, 60, 50, 40, 40, 20, 10, 4, 6,
    ),
    "one of 8,192": (8192,),
}  # fmt: skip
MOST_ERROR = 2e-2  # relative, in norm, of bf16 against fp64
NAMES = ("q", "k", "v", "g", "beta")


def inputs(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """As a layer has them: q, k and v parts of one tensor in bf16, g in fp32."""
    draw = torch.Generator("cuda").manual_seed(seed)
    tokens, keys = sum(lengths), KEY_HEADS * SIZE
    mixed = torch.randn(tokens, 2 * keys + VALUE_HEADS * SIZE, generator=draw, device="cuda").to(torch.bfloat16)
    q, k, v = (part.unflatten(1, (-1, SIZE)) for part in mixed.split([keys, keys, VALUE_HEADS * SIZE], 1))
    g = -torch.rand(tokens, VALUE_HEADS, generator=draw, device="cuda")
    beta = torch.rand(tokens, VALUE_HEADS, generator=draw, device="cuda").to(torch.bfloat16)
    return [x.detach().requires_grad_() for x in (q, k, v, g, beta)]


def with_gradients(run: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    out = run(*tensors)
    return [out, *torch.autograd.grad(out.float().square().sum(), list(tensors))]


def errors(lengths: tuple[int, ...]) -> dict[str, float]:
    """Of the first samples, against fp64; raises where one is above `MOST_ERROR`, or a sample has other bytes in company."""
    tables, tensors = list_chunks(lengths, CHUNK, torch.device("cuda")), inputs(lengths)
    found = with_gradients(lambda *x: delta_rule_by_kernels(*x, tables=tables, normalize=True), tensors)
    first = [x[: lengths[0]].detach().requires_grad_() for x in tensors]
    own = with_gradients(
        lambda *x: delta_rule_by_kernels(*x, tables=list_chunks(lengths[:1], CHUNK, torch.device("cuda")), normalize=True), first
    )
    true = with_gradients(
        lambda *x: gated_delta_rule(*x, lengths=lengths[:1], normalize=True), [x.detach().double().requires_grad_() for x in first]
    )
    names, result = ("out", *NAMES), dict[str, float]()
    for name, packed, alone, exact in zip(names, found, own, true, strict=True):
        assert torch.equal(packed[: lengths[0]], alone), f"{name} of a sample has other bytes in company"
        result[name] = float(((alone.double() - exact).norm() / exact.norm()).detach())
    assert max(result.values()) <= MOST_ERROR, result
    return result


def time_of(run: Callable[..., Tensor], tensors: Sequence[Tensor], detailed: bool) -> dict[str, Any]:
    with torch.no_grad():
        forward = median_milliseconds(lambda: run(*tensors))
    dout = torch.randn_like(run(*tensors))

    def both() -> None:
        torch.autograd.grad(run(*tensors), [x for x in tensors if x.requires_grad], dout)

    took = median_milliseconds(both)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    both()
    found = {"forward": forward, "both": took, "bytes": torch.cuda.max_memory_allocated() - before}
    return found | ({"kernels": _kernels(both)} if detailed else {})


def _kernels(run: Callable[[], None]) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total / 1000 for event in seen.key_averages() if event.device_time_total > 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args()
    device = torch.device("cuda")
    result: dict[str, Any] = {"benchmark": "recurrences", **facts(device, args.commit)}
    result |= {"errors": {name: errors(mix) for name, mix in MIXES.items()}, "ms": {}}
    print(result["errors"], flush=True)
    for name, lengths in MIXES.items():
        tables, tensors = list_chunks(lengths, CHUNK, device), inputs(lengths)
        channels = 2 * KEY_HEADS * SIZE + VALUE_HEADS * SIZE
        x, weight = torch.randn(sum(lengths), channels, device=device), torch.randn(channels, WIDTH, device=device)
        x, weight = x.to(torch.bfloat16).requires_grad_(), weight.to(torch.bfloat16)
        ways: dict[str, tuple[Callable[..., Tensor], list[Tensor], bool]] = {
            "kernels": (lambda *x, tables=tables: delta_rule_by_kernels(*x, tables=tables, normalize=True), tensors, True),
            "PyTorch's operations": (lambda *x, lengths=lengths: gated_delta_rule(*x, lengths=lengths, normalize=True), tensors, False),
            "convolution": (
                lambda x, weight=weight, tables=tables: causal_convolution(x, weight, None, tables.positions, True), [x], True
            ),
        }  # fmt: skip
        result["ms"][name] = {way: time_of(*of) for way, of in ways.items()}
        print(name, result["ms"][name], flush=True)
        write(args.out, result)


if __name__ == "__main__":
    main()
