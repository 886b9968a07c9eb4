"""What the other tests of this directory take for granted: the interpreter's `tl.dot` depends neither on a BLAS nor on places in a tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import INTERPRETED_ALONE, dot, interpreted

pytest.importorskip("triton")
with interpreted():
    import triton
    import triton.language as tl

    @triton.jit
    def product(a_ptr, b_ptr, out_ptr, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
        m, k, n = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + n[:, None] * K + k[None, :])
        tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, tl.trans(b), input_precision="ieee"))


pytestmark = INTERPRETED_ALONE
SHAPES = [(16, 16, 16), (16, 128, 32), (64, 64, 64), (128, 32, 16), (32, 256, 128)]


def one_after_another(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = a[:, :1] * b[:1]
    for k in range(1, a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_dot_sums_one_product_after_another(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    draw = np.random.default_rng(0).standard_normal
    a, b = draw((m, k), np.float32), draw((n, k), np.float32)
    want, out = one_after_another(a, b.T), torch.empty(m, n)
    product[(1,)](torch.from_numpy(a), torch.from_numpy(b), out, m, k, n)
    assert np.array_equal(out.numpy(), want)


def test_a_dot_of_half_precision_or_in_double_is_as_exact_as_its_type() -> None:
    draw = np.random.default_rng(1).standard_normal
    a, b = draw((2, 16, 32)).astype(np.float16), draw((2, 32, 16)).astype(np.float16)
    for i, part in enumerate(dot(a, b, np.dtype(np.float64))):
        assert np.array_equal(part, one_after_another(a[i].astype(np.float64), b[i].astype(np.float64)))
