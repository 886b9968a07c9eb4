"""The one matrix product of the Triton kernels. The operands' dtype decides how it is computed, here and nowhere else.

16 bits and fp8 are multiplied as they are. fp32 takes three passes of the tensor cores (3xTF32): each operand is split into two TF32
numbers, high = x rounded and low = x - high, and a @ b = low @ high + high @ low + high @ high. What is left out, low @ low, lies below
fp32's rounding. This is not TF32, which is `high @ high` alone and 500 times as far from fp64. PyTorch's memory-efficient attention does
the same with fp32. Hopper's fastest instruction reads TF32 operands only along what is summed over. Where b lies ACROSS, as a weight does
in an input gradient, each operand is three numbers of bfloat16 instead, in six passes that take as long as three of TF32. Inf stays Inf and
NaN stays NaN (Triton leaves NaN out of the small products); magnitudes above LARGEST are Inf.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4011621342146535e38)  # of TF32's numbers; fp32 goes 0.05 % further


# No global here: Triton (3.6) puts those of a function into the cache key of a kernel only where another kernel had the function before.
@triton.jit
def dot(a, b, acc=None, MAX_IMPRECISE: tl.constexpr = None, ACROSS: tl.constexpr = False):
    """acc + a @ b in fp32, or a @ b without `acc`. MAX_IMPRECISE is `tl.dot`'s, for fp8. ACROSS: b's rows are contiguous."""
    FITS: tl.constexpr = a.shape[1] <= 128 and b.shape[1] <= 128  # the halves of wider ones do not fit into the registers: FMAs
    FP32: tl.constexpr = "bf16x6" if ACROSS else "tf32x3"
    PRECISION: tl.constexpr = FP32 if a.dtype == tl.float32 and FITS else "ieee"
    return tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=MAX_IMPRECISE)
