"""The kernels' one product: fp32 by several passes of the tensor cores is as exact as fp32, and keeps NaN and Inf in their rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.tolerances import KERNEL, assert_close, relative_error

pytest.importorskip("triton")
with interpreted():
    import triton
    import triton.language as tl

    from tlora.kernels.triton_dot import dot

    @triton.jit
    def product(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TF32: tl.constexpr, ACROSS: tl.constexpr):
        m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
        out = tl.dot(a, b, input_precision="tf32") if TF32 else dot(a, b, ACROSS=ACROSS)
        tl.store(out_ptr + m[:, None] * N + n[None, :], out)


pytestmark = MARKS
SHAPES = [(64, 64, 32), (64, 128, 16), (16, 32, 128)]
PASSES = ["tf32x3", "bf16x6"]
WIDE = (16, 256, 16)  # not by tensor cores: both halves of the operands would not fit into registers


def operands(shape: tuple[int, int, int], positive: bool = False, size: float = 1.0) -> tuple[Tensor, Tensor]:
    m, k, n = shape
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*sides, generator=draw) * size for sides in ((m, k), (k, n)))
    return (a.abs(), b.abs()) if positive else (a, b)


def computed(a: Tensor, b: Tensor, fp32: str) -> Tensor:
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, device=DEVICE)
    product[(1,)](a.to(DEVICE), b.to(DEVICE), out, *a.shape, b.shape[1], TF32=fp32 == "tf32", ACROSS=fp32 == "bf16x6")
    return out.cpu()


@pytest.mark.parametrize("fp32", PASSES)
@pytest.mark.parametrize("size", [1.0, 1e-15, 1e15])  # products of 1e-30 and of 1e30
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, WIDE], ids=str)
def test_fp32_is_as_exact_as_fp32(shape: tuple[int, int, int], positive: bool, size: float, fp32: str) -> None:
    a, b = operands(shape, positive, size)
    assert_close(computed(a, b, fp32), a.double() @ b.double(), KERNEL[torch.float32])


def test_one_pass_of_tf32_is_not() -> None:
    a, b = operands(SHAPES[0])
    assert relative_error(computed(a, b, "tf32"), a.double() @ b.double()) > 50 * KERNEL[torch.float32]


@pytest.mark.parametrize("fp32", PASSES)
@pytest.mark.parametrize("shape", [*SHAPES, WIDE], ids=str)
def test_what_is_not_finite_stays_in_its_row_and_is_what_fp32_makes_of_it(shape: tuple[int, int, int], fp32: str) -> None:
    a, b = operands(shape)
    clean = computed(a, b, fp32)
    poisoned = a.clone()
    poisoned[3, 5], poisoned[7, 2], poisoned[9, 0], poisoned[9, 1] = torch.inf, torch.nan, torch.inf, -torch.inf
    found, true = computed(poisoned, b, fp32), poisoned @ b
    others = [row for row in range(shape[0]) if row not in (3, 7, 9)]
    assert torch.equal(found[others], clean[others])
    assert torch.equal(found[3], true[3]) and found[3].isinf().all()
    assert found[7].isnan().all() and torch.equal(found[9].isnan(), true[9].isnan())
