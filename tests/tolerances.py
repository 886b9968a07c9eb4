"""The one table of tolerances. A relative error is ‖found - true‖ / ‖true‖ (Frobenius), with the truth in fp64.

Kernel bounds are a few roundings of the operands' own precision, not what the code happens to reach; a failing test means that the
code lost precision, never that the table wants a bigger number.
"""

from __future__ import annotations

import torch
from torch import Tensor

KERNEL = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""One linear or one cross-entropy, forward and each gradient."""

LOGITS = {torch.float64: 1e-9, torch.float32: 3e-5}
"""A whole model's logits, two programs, the same weights. Rounding of two layers: 1.1e-5 was seen on an Intel Xeon."""

TRAINED = {torch.float64: 1e-9, torch.float32: 1e-3}
"""L3: weight change of a trained adapter, together against alone, and against PEFT."""


def relative_error(found: Tensor, true: Tensor) -> float:
    """‖found - true‖ / ‖true‖, or ‖found‖ where the truth is zero. NaN or Inf anywhere gives NaN or Inf, which no bound accepts."""
    found, true = found.detach().double(), true.detach().double()
    norm = float(true.norm())
    return float((found - true).norm()) / (norm if norm else 1.0)


def assert_close(found: Tensor, true: Tensor, bound: float, what: str = "") -> None:
    assert found.shape == true.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(true.shape)}"
    error = relative_error(found, true)
    assert error <= bound, f"{what}: relative error {error:.2e} > {bound:.0e}"
