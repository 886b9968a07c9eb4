"""Packed attention against masked softmax in fp64, gradients too; and what of a neighbour must never get through."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tolerances import KERNEL, assert_close
from tlora.errors import ModelError
from tlora.supermodel.attention import packed_attention

LENGTHS = (3, 3, 1, 9, 1, 1, 12)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 4},
    "softcap": {"softcap": 2.0},
    "both": {"sliding_window": 4, "softcap": 2.0},
    "sinks": {"sinks": (1.5, -1.0, 0.25, 40.0)},
    "all": {"sliding_window": 4, "softcap": 2.0, "sinks": (0.5, -1.0, 2.0, -40.0)},
}
MODULE = nn.Identity()


def operands(dtype: torch.dtype, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    total = sum(LENGTHS)
    return [torch.randn(1, h, total, 8, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)]


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: tuple[float, ...] | None = None,
) -> Tensor:
    """One dense score matrix per head with everything invisible at minus infinity, and one column more for a head's sink."""
    total, repeat = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    owner = torch.repeat_interleave(torch.tensor(LENGTHS))
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    visible = (owner[:, None] == owner[None, :]) & (distance >= 0)
    if sliding_window:
        visible &= distance < sliding_window
    scores = q @ k.transpose(2, 3) * scaling
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~visible, -math.inf)
    columns = [scores] if sinks is None else [scores, torch.tensor(sinks).to(q).view(1, -1, 1, 1).expand(1, -1, total, 1)]
    return (torch.cat(columns, -1).softmax(-1)[..., :total] @ v).transpose(1, 2)


def check_against_oracle(attend: Callable[..., Tensor], kv_heads: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Output and gradients."""
    found, true = operands(dtype, kv_heads=kv_heads), [t.detach().double().requires_grad_() for t in operands(dtype, kv_heads=kv_heads)]
    out, expected = attend(*found, **options), oracle(*true, scaling=0.3, **options)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(dy.to(dtype))
    expected.backward(dy)
    assert_close(out, expected, 10 * KERNEL[dtype], "out")
    for name, mine, its in zip("qkv", found, true, strict=True):
        assert mine.grad is not None and its.grad is not None
        assert_close(mine.grad, its.grad, 10 * KERNEL[dtype], f"d{name}")


def check_no_leak(attend: Callable[..., Tensor], bad: float, options: dict[str, Any]) -> None:
    """The second of two equal lengths, which run as one batch, and the long one are `bad`: their neighbours' bits stay."""
    good, poisoned = operands(torch.float32), operands(torch.float32)
    mine = torch.ones(sum(LENGTHS), dtype=torch.bool)
    for start, stop in ((3, 6), (7, 16)):
        mine[start:stop] = False
        for t in poisoned:
            t.data[:, :, start:stop] = bad
    outs = [attend(*ts, **options) for ts in (good, poisoned)]
    for out in outs:
        out.backward(torch.ones_like(out))
    assert torch.equal(outs[0][:, mine], outs[1][:, mine])
    for mine_t, its_t in zip(good, poisoned, strict=True):
        assert mine_t.grad is not None and its_t.grad is not None
        assert torch.equal(mine_t.grad[:, :, mine], its_t.grad[:, :, mine])


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: tuple[float, ...] | None = None, **options: Any) -> Tensor:
    options["s_aux"] = None if sinks is None else torch.tensor(sinks, dtype=q.dtype)
    return packed_attention(MODULE, q, k, v, None, scaling=0.3, sequence_lengths=LENGTHS, **options)[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_output_and_gradients(kv_heads: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check_against_oracle(attend, kv_heads, dtype, options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_sample_leaks_nowhere(bad: float, options: dict[str, Any]) -> None:
    check_no_leak(attend, bad, options)


def test_without_lengths_it_refuses() -> None:
    with pytest.raises(ModelError, match="Identity .*keyword arguments"):
        packed_attention(MODULE, *operands(torch.float32), None)
