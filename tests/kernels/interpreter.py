"""Triton kernels in tests: on the GPU where there is one, else through Triton's interpreter on the CPU.

A kernel is interpreted when `TRITON_INTERPRET` was set as it was defined, and so must Triton's own `tl.sum` and the like have been:
`tests/conftest.py` imports this before anything that imports triton (transformers does). The variable does not stay set, since the
super-model would then take its GPU path on the CPU; a test module wraps its imports of kernels in `interpreted`.

The interpreter's `tl.dot` is numpy's matmul, and so a BLAS. Some BLAS kernels (OpenBLAS's for Haswell and Zen) sum an element in an order
that depends on where it stands in the tile, which no GPU does. Here `tl.dot` is `dot`, which has one order on every machine.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

_VARIABLE = "TRITON_INTERPRET"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MARKS = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # numpy on the interpreter
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy on NaN and overflows made on purpose
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]
"""`pytestmark` of a module whose kernels run on `DEVICE`."""

INTERPRETED_ALONE = [
    *(mark for mark in MARKS if mark.name != "gpu"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU interprets nothing"),
]
"""`pytestmark` of a module that is about the interpreter, or needs it."""


@contextmanager
def interpreted() -> Iterator[None]:
    """Kernels that are defined (modules that are first imported) within it are interpreted, unless there is a GPU."""
    before = os.environ.get(_VARIABLE)
    if DEVICE.type == "cpu":
        os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VARIABLE, None)


def dot(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """a @ b in `dtype`: each element is a[i, 0] * b[0, j], then + a[i, 1] * b[1, j], and so on, each product and each sum rounded once."""
    # Of contiguous operands, numpy's own loop runs over j innermost: a vector register holds elements of a row, never parts of one sum.
    return np.einsum("...ik,...kj->...ij", np.ascontiguousarray(a, dtype), np.ascontiguousarray(b, dtype), optimize=False)


def _create_dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    from triton.language import float16
    from triton.runtime import interpreter

    def numbers(of: Any) -> np.ndarray:
        assert not of.dtype.is_bf16(), "the interpreter holds bfloat16 as integers: convert before tl.dot"
        if of.dtype.is_fp8():
            return interpreter._convert_float(of.data, of.dtype, float16, None).view(np.float16)
        return of.data

    return interpreter.TensorHandle(dot(numbers(a), numbers(b), d.data.dtype) + d.data, d.dtype.scalar)


def _call_from_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
    """As Triton's, which looks through all of `triton.language` for what to replace at each call, though the kernel's launch did."""
    from triton import language
    from triton.runtime import interpreter

    used = [value for value in function.fn.__globals__.values() if value is language or value is language.core]
    if any(language.core.is_builtin(module.load) for module in used):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


if find_spec("triton") is not None:
    assert "triton" not in sys.modules or _VARIABLE in os.environ or DEVICE.type == "cuda", "triton was imported before tests/conftest.py"
    with interpreted():
        import triton.experimental.gluon  # noqa: F401  (its first use, by the interpreter, would define things late)
        from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, InterpreterOptions, interpreter_builder

        InterpreterBuilder.create_dot = _create_dot
        InterpretedFunction.__call__ = _call_from_kernel
        # It computes each integer sum and product again in 64 bits, for an assertion that it makes with `debug` only: a third of the time.
        interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)
