"""Which attention a micro-batch takes, and that each of them is the same attention: against eager fp64, forward and every gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.tolerances import KERNEL, assert_close

with interpreted():
    from tlora.kernels import packed_attention, varlen_attention
    from tlora.kernels.packed_attention import AttentionPlan, attend, attend_backward, attention_shape, padded, plan_attention

pytestmark = MARKS
ON_GPU = DEVICE.type == "cuda"
LENGTHS = (5, 1, 33, 20)
ALIKE = (64, 64, 64)


def eager(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, lengths: tuple[int, ...], scale: float, window: int, softcap: float) -> Tensor:
    """Each sample by itself, by the definition."""
    repeat = q_THD.shape[1] // k_TGD.shape[1]
    outputs: list[Tensor] = []
    for q, k, v in zip(*(t.split(lengths) for t in (q_THD, k_TGD, v_TGD)), strict=True):
        k, v = (t.repeat_interleave(repeat, 1) for t in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(q), device=q.device)
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        outputs.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -math.inf).softmax(-1), v))
    return torch.cat(outputs)


def operands(num_tokens: int, heads: int, groups: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    g = torch.Generator().manual_seed(heads + size)
    shapes = [(num_tokens, heads, size), (num_tokens, groups, size), (num_tokens, groups, size), (num_tokens, heads, size)]
    return [torch.randn(*shape, generator=g).to(DEVICE, dtype) for shape in shapes]


def check(
    plan: AttentionPlan, lengths: tuple[int, ...], dtype: torch.dtype, size: int = 16, window: int = 0, softcap: float = 0.0,
    by_heads: bool = False,
) -> None:  # fmt: skip
    """`by_heads`: q and k lie head by head, as latent attention has them; what comes back lies token by token in any case."""
    q, k, v, dout = operands(sum(lengths), 4, 2, size, dtype)
    if by_heads:
        q, k = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k))
    scale = size**-0.5
    true_q, true_k, true_v = (t.double().requires_grad_() for t in (q, k, v))
    true = eager(true_q, true_k, true_v, lengths, scale, window, softcap)
    true.backward(dout.double())
    out, lse = attend(q, k, v, plan, scale, window, softcap)
    grads = attend_backward(dout, q, k, v, out, lse, plan, scale, window, softcap)
    for name, found, expected in zip(
        ("out", "dq", "dk", "dv"), (out, *grads), (true.detach(), true_q.grad, true_k.grad, true_v.grad), strict=True
    ):
        assert found.is_contiguous() and expected is not None
        assert_close(found, expected, KERNEL[dtype], name)


@pytest.mark.parametrize("deterministic", [False, True] if ON_GPU else [True])  # without a GPU the plan is the same
@pytest.mark.parametrize("lengths", [LENGTHS, ALIKE] if ON_GPU else [(5, 1, 20)], ids=str)
@pytest.mark.parametrize(("size", "window", "softcap"), [(16, 0, 0.0), (24, 7, 5.0), *([(64, 7, 0.0), (128, 0, 5.0)] if ON_GPU else [])])
def test_fp32_equals_eager_attention(lengths: tuple[int, ...], size: int, window: int, softcap: float, deterministic: bool) -> None:
    """24 is a head that no tile fits."""
    check(plan_attention(lengths, DEVICE, deterministic), lengths, torch.float32, size, window, softcap)
    check(plan_attention(lengths, DEVICE, deterministic), lengths, torch.float32, size, by_heads=True)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("lengths", "kind"), [((1024,) * 4, "cudnn"), ((1000, 1, 777, 64), "own"), ((65,) * 3, "own")])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_each_kind_in_bf16(lengths: tuple[int, ...], kind: str, deterministic: bool, size: int) -> None:
    plan = plan_attention(lengths, DEVICE, deterministic)
    assert plan.kind == ("own" if deterministic else kind)
    for window, softcap in ((0, 0.0), (100, 0.0), (0, 30.0)):
        check(plan, lengths, torch.bfloat16, size, window, softcap)
    check(plan, lengths, torch.bfloat16, size, by_heads=True)


def made(kind: str) -> AttentionPlan:
    return replace(plan_attention(LENGTHS, DEVICE, True), kind=kind, length=512)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda")], ids=str)
def test_only_lengths_that_are_alike_on_a_gpu_are_part_of_a_shape(device: torch.device) -> None:
    for lengths in (LENGTHS, ALIKE, (65,) * 3):
        assert plan_attention(lengths, DEVICE, False).shape == attention_shape(lengths, DEVICE, False)
        assert attention_shape(lengths, device, True) == ("own", len(lengths), 0)
    assert attention_shape(LENGTHS, device, False) == ("own", 4, 0)
    assert attention_shape(ALIKE, device, False) == (("cudnn", 3, 64) if device.type == "cuda" else ("own", 3, 0))
    assert attention_shape((65,) * 3, device, False) == ("own", 3, 0), "cuDNN was timed at multiples of 64"


def test_samples_are_filled_up_with_empty_ones_where_they_differ() -> None:
    assert padded((64, 64)) == (64, 64)  # what cuDNN takes
    assert padded((5, 1)) == (5, 1, *[0] * 14) and padded((5,)) == (5, *[0] * 15) and padded((5, 1) * 8) == (5, 1) * 8


def test_chunks_are_attended_to_by_themselves() -> None:
    """Where a chunk cuts a sample; tables are as long for other samples of as many tokens, as a graph needs them."""
    chunks, chunk = (16, 64), 16
    plan = plan_attention((5, 16, 37), DEVICE, True, chunks)
    assert plan.shape == attention_shape((5, 16, 37), DEVICE, True, chunks) == ("own", 3, 0, 16), "64 cut nothing"
    check(plan.cut(chunk), (5, 16, 16, 16, 5), torch.float32)
    check(plan.cut(64), (5, 16, 37), torch.float32)
    other = plan_attention((1, 56, 1), DEVICE, True, chunks)
    assert [t.shape for t in other.buffers] == [t.shape for t in plan.buffers] and len(plan.buffers) == 2
    assert plan_attention((1, 1, 16), DEVICE, True, chunks).shape == ("own", 3, 0)


def test_empty_samples_change_no_bit() -> None:
    """Forward and backward, with more empty tiles than real ones."""
    q, k, v, dout = operands(sum(LENGTHS), 4, 2, 16, torch.float32)
    found: list[list[Tensor]] = []
    for lengths in (LENGTHS, padded(LENGTHS)):
        plan = plan_attention(lengths, DEVICE, True)
        out, lse = attend(q, k, v, plan, 0.25, 0, 0.0)
        found.append([out, lse, *attend_backward(dout, q, k, v, out, lse, plan, 0.25, 0, 0.0)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["cudnn", "own"])
@pytest.mark.parametrize(
    ("change", "other_takes_it"),
    [
        ({}, True),
        ({"window": 512}, True),  # as long as a sample: no window at all
        ({"window": 511}, False),
        ({"softcap": 30.0}, False),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, True),
        ({"size": 20}, False),
        ({"size": 136}, False),
        ({"sinks": True}, False),
    ],
    ids=str,
)
def test_cudnn_takes_what_it_can_compute(kind: str, change: dict[str, object], other_takes_it: bool) -> None:
    wanted = {"window": 0, "softcap": 0.0, "sinks": False, "dtype": torch.bfloat16, "size": 128, **change}
    q = torch.zeros(59, 4, wanted["size"], dtype=wanted["dtype"])  # type: ignore[call-overload]
    found = packed_attention._kind(q, made(kind), wanted["window"], wanted["softcap"], wanted["sinks"])  # type: ignore[arg-type]
    assert found == (kind if other_takes_it else "own")


def test_no_window_and_no_cap_are_handed_on_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero would be a window that sees nothing, and a cap at nothing."""
    handed: list[tuple[object, ...]] = []
    monkeypatch.setattr(varlen_attention, "varlen_attention_forward", lambda *args: handed.append(args[5:7]) or args[:2])
    monkeypatch.setattr(varlen_attention, "varlen_attention_backward", lambda *args: handed.append(args[-2:]) or args[:3])
    q, k, v, dout = operands(59, 4, 2, 16, torch.float32)
    for window, softcap in ((0, 0.0), (7, 5.0)):
        attend(q, k, v, made("own"), 0.25, window, softcap)
        attend_backward(dout, q, k, v, q, q, made("own"), 0.25, window, softcap)
    assert handed == [(None, None)] * 2 + [(7, 5.0)] * 2
