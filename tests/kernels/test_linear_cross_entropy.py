"""The fused head and loss against torch's autograd in fp64, with every option, at every edge of a chunk."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tolerances import KERNEL, assert_close
from tlora.kernels import linear_cross_entropy as module
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.head import Head
from tlora.kernels.linear_cross_entropy import chunked_on_gpu, linear_cross_entropy

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.37},
    "softcap": {"softcap": 3.0},
    "all": {"bias": True, "scale": 1.7, "softcap": 2.0},
}


def make(tokens: int, dtype: torch.dtype, vocab: int = 97, width: int = 24, **options: object) -> tuple[Tensor, Head, Tensor, Tensor]:
    g = torch.Generator().manual_seed(tokens)
    hidden, weight = (torch.randn(n, width, generator=g, dtype=torch.float64).to(dtype) for n in (tokens, vocab))
    bias = torch.randn(vocab, generator=g, dtype=torch.float64).to(dtype) if options.pop("bias", False) else None
    head = Head(lambda: FrozenLinear(PlainWeight(weight), bias), **options)  # type: ignore[arg-type]
    labels = torch.randint(0, vocab, (tokens,), generator=g)
    return hidden, head, labels, torch.rand(tokens, generator=g).to(torch.float64 if dtype == torch.float64 else torch.float32)


def oracle(hidden: Tensor, head: Head, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    h = hidden.double().requires_grad_()
    logits = head.scale * (h @ head.weight_VH.double().t() + (0 if head.bias_V is None else head.bias_V.double()))
    logits = head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits
    losses = F.cross_entropy(logits, labels, reduction="none")
    (losses * weights.double()).sum().backward()
    assert h.grad is not None
    return losses.detach(), h.grad


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_and_gradient(dtype: torch.dtype, options: dict[str, object]) -> None:
    hidden, head, labels, weights = make(37, dtype, **options)
    losses, dh = linear_cross_entropy(hidden, head, labels, weights)
    true_losses, true_dh = oracle(hidden, head, labels, weights)
    assert dh is not None and dh.dtype == dtype and losses.dtype == weights.dtype
    assert_close(losses, true_losses, KERNEL[dtype], "losses")
    assert_close(dh, true_dh, KERNEL[dtype], "dh")


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 31, 32, 33, 64])
def test_edges_of_a_chunk(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 rows; `torch.empty` hands out NaN, so that a row left unwritten shows."""
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, math.nan))
    hidden, head, labels, weights = make(tokens, torch.float64)
    losses, dh = linear_cross_entropy(hidden, head, labels, weights)
    true_losses, true_dh = oracle(hidden, head, labels, weights)
    assert dh is not None
    assert_close(losses, true_losses, KERNEL[torch.float64], "losses")
    assert_close(dh, true_dh, KERNEL[torch.float64], "dh")


def test_no_tokens() -> None:
    hidden, head, labels, weights = make(3, torch.float32)
    losses, dh = linear_cross_entropy(hidden[:0], head, labels[:0], weights[:0])
    assert dh is not None and losses.shape == (0,) and dh.shape == (0, hidden.shape[1])


def test_without_weights_there_is_no_gradient() -> None:
    hidden, head, labels, weights = make(9, torch.float32)
    losses, dh = linear_cross_entropy(hidden, head, labels)
    assert dh is None and torch.equal(losses, linear_cross_entropy(hidden, head, labels, weights)[0])


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_bad_row_stays_in_its_row(bad: float, options: dict[str, object]) -> None:
    """With a softcap even an infinite logit gives a finite loss; its neighbours' bits are the same either way."""
    hidden, head, labels, weights = make(20, torch.float32, **options)
    poisoned = hidden.clone()
    poisoned[7] = bad
    rest = torch.arange(20) != 7
    for found, expected in zip(
        linear_cross_entropy(poisoned, head, labels, weights), linear_cross_entropy(hidden, head, labels, weights), strict=True
    ):
        assert found is not None and expected is not None and torch.equal(found[rest], expected[rest])


def test_large_logits_do_not_overflow() -> None:
    hidden, head, labels, weights = make(8, torch.float32)
    losses, dh = linear_cross_entropy(hidden * 1e4, head, labels, weights)
    assert dh is not None and bool(losses.isfinite().all()) and bool(dh.isfinite().all())


def test_weight_zero_gives_no_gradient() -> None:
    hidden, head, labels, weights = make(8, torch.float32)
    weights[3] = 0
    _, dh = linear_cross_entropy(hidden, head, labels, weights)
    assert dh is not None and not dh[3].any() and bool(dh[2].any())


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpus_chunks(dtype: torch.dtype, options: dict[str, object], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 rows; the last one is padded."""
    monkeypatch.setattr(module, "gpu_chunk_rows", lambda _: 16)
    hidden, head, labels, weights = make(tokens, dtype, **options)
    monkeypatch.setattr(torch, "empty_like", lambda t: torch.full_like(t, math.nan))
    losses, dh = chunked_on_gpu(hidden, head, labels, weights)
    true_losses, true_dh = oracle(hidden, head, labels, weights)
    assert dh is not None and dh.dtype == dtype and losses.dtype == weights.dtype
    assert_close(losses, true_losses, KERNEL[dtype], "losses")
    assert_close(dh, true_dh, KERNEL[dtype], "dh")
    assert torch.equal(chunked_on_gpu(hidden, head, labels, None)[0], losses)
    few = torch.arange(tokens)[: max(1, tokens // 2)]
    some_losses, some_dh = chunked_on_gpu(hidden[few], head, labels[few], weights[few])
    assert some_dh is not None and torch.equal(some_losses, losses[few]) and torch.equal(some_dh, dh[few])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_a_bad_row_stays_in_its_row_in_a_gpus_chunks(bad: float) -> None:
    hidden, head, labels, weights = make(20, torch.float32)
    poisoned, rest = hidden.clone(), torch.arange(20) != 7
    poisoned[7] = bad
    for found, expected in zip(chunked_on_gpu(poisoned, head, labels, weights), chunked_on_gpu(hidden, head, labels, weights), strict=True):
        assert found is not None and expected is not None and torch.equal(found[rest], expected[rest])
    losses, dh = chunked_on_gpu(hidden * 1e4, head, labels, weights)
    assert dh is not None and bool(losses.isfinite().all()) and bool(dh.isfinite().all())


def test_no_tokens_in_a_gpus_chunks() -> None:
    hidden, head, labels, weights = make(3, torch.bfloat16)
    losses, dh = chunked_on_gpu(hidden[:0], head, labels[:0], weights[:0])
    assert dh is not None and losses.dtype == torch.float32 and losses.shape == (0,) and dh.shape == (0, hidden.shape[1])
    assert chunked_on_gpu(hidden[:0], head, labels[:0], None)[1] is None
