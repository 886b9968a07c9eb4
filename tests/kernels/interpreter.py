"""Triton kernels in tests: on the GPU where there is one, else through Triton's interpreter on the CPU.

A kernel is interpreted when `TRITON_INTERPRET` was set as it was defined, and so must Triton's own `tl.sum` and the like have been:
`tests/conftest.py` imports this before anything that imports triton (transformers does). The variable does not stay set, since the
super-model would then take its GPU path on the CPU; a test module wraps its imports of kernels in `interpreted`.

Nine tenths of the interpreter's time goes to the types of small tensors. Five of its functions are replaced by ones that remember, by
shape or by element type, what those give, three of the language's by ones that first look whether there is anything to convert and remember
what numbers became, and three by numpy's own operations.

The interpreter's `tl.dot` is numpy's matmul, and so a BLAS. Some BLAS kernels (OpenBLAS's for Haswell and Zen) sum an element in an order
that depends on where it stands in the tile, which no GPU does. Here `tl.dot` is `dot`, which has one order on every machine. Nor does the
interpreter look at the precision that is asked for. Here fp32 operands are cut to TF32, or in two TF32 numbers each, or in three of
bfloat16, as a GPU does it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

_VARIABLE = "TRITON_INTERPRET"
_MOST_OPERANDS = 512  # that are remembered, each a tile
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

MARKS = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy on NaN and overflows made on purpose
    *([pytest.mark.gpu] if DEVICE.type == "cuda" else []),
]
"""`pytestmark` of a module whose kernels run on `DEVICE`."""

INTERPRETED_ALONE = [
    *(mark for mark in MARKS if mark.name != "gpu"),
    pytest.mark.skipif(DEVICE.type == "cuda", reason="a GPU interprets nothing"),
]
"""`pytestmark` of a module that is about the interpreter, or needs it."""


def thinned(cases: Iterable[tuple[Any, ...]], keep: Callable[..., bool], *first: int) -> list[Any]:
    """Parameters of a test: of the cases that `keep` those at the places `first` are in every run, or all where there is none; the others
    are in `make test-slow`, and all cases in `make soak`.
    """
    found, kept = list[Any](), 0
    for case in cases:
        mark = pytest.mark.soak if not keep(*case) else pytest.mark.slow if first and kept not in first else None
        kept += bool(keep(*case))
        found.append(pytest.param(*case, marks=() if mark is None else (mark,), id="-".join(map(str, case))))
    return found


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


def interpret(patch: pytest.MonkeyPatch) -> None:
    """The super-model takes its GPU path on a CPU. Does nothing where there is a GPU: what is defined then would stay interpreted."""
    if DEVICE.type == "cpu":
        patch.setenv(_VARIABLE, "1")


def dot(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """a @ b in `dtype`: each element is a[i, 0] * b[0, j], then + a[i, 1] * b[1, j], and so on, each product and each sum rounded once."""
    # Of contiguous operands, numpy's own loop runs over j innermost: a vector register holds elements of a row, never parts of one sum.
    return np.einsum("...ik,...kj->...ij", np.ascontiguousarray(a, dtype), np.ascontiguousarray(b, dtype), optimize=False)


def tf32(x: np.ndarray) -> np.ndarray:
    """fp32 to the nearest number with TF32's 10 bits after the point, halves away from zero (`cvt.rna.tf32.f32`). NaN and Inf stay."""
    rounded = ((x.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def dot_tf32x3(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b of fp32 operands as Triton computes it in three passes: the small products first, not counted where they are NaN."""
    a_high, b_high, fp32 = tf32(a), tf32(b), np.dtype(np.float32)
    a_low, b_low = ((x - high).view(np.uint32) & np.uint32(0xFFFFE000) for x, high in ((a, a_high), (b, b_high)))
    small = dot(a_low.view(fp32), b_high, fp32) + dot(a_high, b_low.view(fp32), fp32)
    return np.where(np.isnan(small), np.float32(0), small) + dot(a_high, b_high, fp32)


def bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to the nearest number with bfloat16's 7 bits after the point, halves to the even one. NaN and Inf stay."""
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def dot_bf16x6(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b of fp32 operands as Triton computes it in six passes, of three numbers for each: as `dot_tf32x3`, the small ones first.

    What is left of an operand when its high number is taken away is its middle and its low one, which are here one fp32 number.
    """
    a_high, b_high, fp32 = bf16(a), bf16(b), np.dtype(np.float32)
    a_rest, b_rest = a - a_high, b - b_high
    small = dot(bf16(a_rest), bf16(b_rest), fp32) + dot(a_rest, b_high, fp32) + dot(a_high, b_rest, fp32)
    return np.where(np.isnan(small), np.float32(0), small) + dot(a_high, b_high, fp32)


def _create_dot(_: Any, a: Any, b: Any, d: Any, precision: Any, _max_imprecise: Any) -> Any:
    from triton._C.libtriton.ir import INPUT_PRECISION
    from triton.language import float16
    from triton.runtime import interpreter

    def numbers(of: Any) -> np.ndarray:
        assert not of.dtype.is_bf16(), "the interpreter holds bfloat16 as integers: convert before tl.dot"
        if of.dtype.is_fp8():
            return interpreter._convert_float(of.data, of.dtype, float16, None).view(np.float16)
        return of.data

    left, right = numbers(a), numbers(b)
    if left.dtype == np.float32 and precision != INPUT_PRECISION.IEEE:
        if precision == INPUT_PRECISION.TF32:
            product = dot(tf32(left), tf32(right), left.dtype)
        else:
            product = {INPUT_PRECISION.TF32x3: dot_tf32x3, INPUT_PRECISION.BF16x6: dot_bf16x6}[precision](left, right)
    else:
        product = dot(left, right, d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_modules_of: dict[Any, list[Any]] = {}


def _call_from_kernel(function: Any, *args: Any, **kwargs: Any) -> Any:
    """As Triton's, which looks through all of `triton.language` for what to replace at each call, though the kernel's launch did."""
    from triton import language
    from triton.runtime import interpreter

    used = _modules_of.get(function.fn)
    if used is None:
        used = [value for value in function.fn.__globals__.values() if value is language or value is language.core]
        _modules_of[function.fn] = used
    if any(language.core.is_builtin(module.load) for module in used):
        interpreter._patch_lang(function.fn)
    return function.rewrite()(*args, **kwargs)


def _read_one_element_as_index() -> None:
    """As Triton's, whose tensor as an index is an array of one element and one dimension, of which NumPy 2.4 makes no number."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor


def _compare_to_bits() -> None:
    """As Triton's, whose comparison is of its operands' type: a mask of several, of 32 bits then, is refused by loads from Triton 3.9."""
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    builder: Any = InterpreterBuilder
    compute, comparisons = builder.binary_op, {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        return TensorHandle(op(lhs.data, rhs.data), int1) if op in comparisons else compute(self, lhs, rhs, op)

    builder.binary_op = binary_op


def _patch_attr(module: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As Triton's, without a dictionary of its own at each call."""
    from triton.runtime import interpreter

    semantic = interpreter.TritonSemantic(builder)
    scope.set_attr(module, name, lambda *args, _semantic=None, **kwargs: member(*args, **kwargs, _semantic=semantic))


def _remember_types() -> None:
    """Types of shapes and of blocks, the shapes of tensors, and numpy's names for element types are made once each."""
    from triton.language import core
    from triton.runtime import interpreter

    make_tuple_type, find_numpy_type = core._type_for_tuple_values, cache(interpreter._get_np_dtype)
    make_new, block_types, pointer = core.block_type.__init__, dict[Any, dict[str, Any]](), np.dtype(np.uint64)
    make_with_element, with_elements = core.block_type.with_element_ty, dict[Any, Any]()
    type_of_sizes = cache(lambda sizes: make_tuple_type(list(sizes)))

    def shape_and_numel(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def type_for_tuple_values(values: Any, fields: Any = None) -> Any:
        sizes = tuple(value.value if type(value) is core.constexpr else value for value in values)
        if fields is None and all(type(size) is int for size in sizes):
            return type_of_sizes(sizes)
        return make_tuple_type(values, fields)

    def make_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.of_tensors if kind.is_block() else of_scalars

    def make_block_type(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        key = (element.name, getattr(element, "address_space", None), sizes)
        known = block_types.get(key)
        if known is None:
            make_new(self, element, shape)
            self.of_tensors, self.sizes = shape_and_numel(sizes), sizes
            block_types[key] = dict(vars(self))
        else:
            vars(self).update(known)

    def with_element_type(self: Any, element: Any) -> Any:
        if type(element) is not core.dtype:  # a pointer
            return make_with_element(self, element)
        key = (element.name, self.sizes)
        if key not in with_elements:
            with_elements[key] = make_with_element(self, element)
        return with_elements[key]

    def numpy_type(kind: Any) -> np.dtype:
        return pointer if kind.scalar.is_ptr() else find_numpy_type(kind.scalar)

    core._type_for_tuple_values = type_for_tuple_values
    of_scalars = shape_and_numel(())
    block_type: Any = core.block_type
    block_type.__init__, block_type.with_element_ty = make_block_type, with_element_type
    tensor: Any = core.tensor
    tensor.__init__ = make_tensor
    interpreter._get_np_dtype = numpy_type


def _convert_what_differs() -> None:
    """Most operands are tensors of one type and one shape, or a tensor and a number: tiles of the same few numbers, which are made once.
    Most arguments are neither constants nor lists of these.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterBuilder

    check_types, broadcast, unwrap = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
        core._unwrap_if_constexpr,
    )
    plain = {bool, int, float, str, type(None), core.tensor, core.dtype}
    numbers = {bool, int, float}
    known: dict[Any, Any] = {}  # operands that a number has become, in the type and shape of the other operand

    def remember(key: Any, operand: Any) -> None:
        if len(known) >= _MOST_OPERANDS:
            known.clear()
        operand.handle.data.flags.writeable = False
        known[key] = operand

    def check_types_that_differ(self: Any, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        left, right = type(lhs), type(rhs)
        if left is right is core.tensor:
            divides = len(args) > 3 or kwargs.get("div_or_mod")  # types may change then
            if not divides and type(lhs.dtype) is type(rhs.dtype) is core.dtype and lhs.dtype.name == rhs.dtype.name:  # no pointers
                return self.broadcast_impl_value(lhs, rhs)
        elif type(self.builder) is not InterpreterBuilder:
            pass  # what is compiled is of one kernel alone
        elif left is core.tensor and right in numbers and rhs != 0.0 and type(lhs.dtype) is core.dtype:  # 0.0 and -0.0 are one key
            key = (lhs.type.name, right, rhs, "right", args, *kwargs.items())
            if key in known:
                return lhs, known[key]
            first, second = check_types(self, lhs, rhs, *args, **kwargs)
            if first is lhs:
                remember(key, second)
            return first, second
        elif right is core.tensor and left in numbers and lhs != 0.0 and type(rhs.dtype) is core.dtype:
            key = (rhs.type.name, left, lhs, "left", args, *kwargs.items())
            if key in known:
                return known[key], rhs
            first, second = check_types(self, lhs, rhs, *args, **kwargs)
            if second is rhs:
                remember(key, first)
            return first, second
        return check_types(self, lhs, rhs, *args, **kwargs)

    def broadcast_shapes_that_differ(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = getattr(lhs.type, "sizes", ()), getattr(rhs.type, "sizes", ())
        if left == right:
            return lhs, rhs
        if not right and type(rhs.dtype) is core.dtype and type(self.builder) is InterpreterBuilder:
            key = (left, rhs.dtype.name, rhs.handle.data.tobytes())
            if key not in known:
                remember(key, broadcast(self, lhs, rhs)[1])
            return lhs, known[key]
        return broadcast(self, lhs, rhs)

    def unwrap_what_is_wrapped(value: Any) -> Any:
        return value if type(value) in plain else value.value if type(value) is core.constexpr else unwrap(value)

    TritonSemantic.binary_op_type_checking_impl = check_types_that_differ
    TritonSemantic.broadcast_impl_value = broadcast_shapes_that_differ
    core._unwrap_if_constexpr = unwrap_what_is_wrapped


def _compute_directly() -> None:
    """Sums, differences and products of these types are numpy's, without five functions between."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def replace(name: str, operation: np.ufunc, *pointers: bool) -> None:
        compute = getattr(TritonSemantic, name)

        def compute_directly(self: Any, lhs: Any, rhs: Any, sanitize_overflow: bool) -> Any:
            lhs, rhs = self.binary_op_type_checking_impl(lhs, rhs, *pointers)
            kind = lhs.dtype
            if kind.name == rhs.dtype.name and kind.name in ("fp32", "int32", "int64") and type(self.builder) is InterpreterBuilder:
                return core.tensor(TensorHandle(operation(lhs.handle.data, rhs.handle.data), kind), lhs.type)
            return compute(self, lhs, rhs, sanitize_overflow)

        setattr(TritonSemantic, name, compute_directly)

    replace("add", np.add, True, True)
    replace("sub", np.subtract, True, False)
    replace("mul", np.multiply)


if find_spec("triton") is not None:
    assert "triton" not in sys.modules or _VARIABLE in os.environ or DEVICE.type == "cuda", "triton was imported before tests/conftest.py"
    with interpreted():
        import triton.experimental.gluon  # noqa: F401  (its first use, by the interpreter, would define things late)
        from triton.runtime import interpreter as tritons
        from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, InterpreterOptions, interpreter_builder

        builder: Any = InterpreterBuilder
        builder.create_dot = _create_dot
        function: Any = InterpretedFunction
        function.__call__ = _call_from_kernel
        tritons._patch_attr = _patch_attr
        _read_one_element_as_index()
        _compare_to_bits()
        _remember_types()
        _convert_what_differs()
        _compute_directly()
        # It computes each integer sum and product again in 64 bits, for an assertion that it makes with `debug` only: a third of the time.
        precisions: Any = (*InterpreterOptions.allowed_dot_input_precisions, "bf16x6")
        interpreter_builder.options = InterpreterOptions(sanitize_overflow=False, allowed_dot_input_precisions=precisions)
