"""AdamW of one adapter as four Triton kernels: norm of the gradient, verdict, check (where the verdict needs one), update.

The gradient sums are read, and the weights in the compute dtype written, where they lie in the bank. A program takes one chunk
(`triton_chunks.py`). No kernel reads anything of another adapter, no sum depends on which program came first, and nothing waits for
the host. Formulas: `torch.optim.AdamW`'s.

Before anything is stored it must be known that the whole update is finite. Computing it twice would move 54 bytes per parameter,
keeping it in second buffers 42 and 12 bytes of memory. Instead each update leaves the largest |weight| and moments behind; from
them and the norm follows a bound of the next update, far below overflow in any sane training: 38 bytes. Only where the bound
does not show it is the update computed once more, for its being finite alone.
"""

# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# (a jit function's call is typed NoReturn, and its constants `constexpr`)

from __future__ import annotations

import triton
import triton.language as tl

from tlora.kernels.triton_chunks import chunk_at, rows_at

# One adapter's row of `scalars`, fp64; made by `fused_adamw.scalars_of`.
ALLOWED, MAX_NORM, BETA1, BETA2, EPSILON, DECAY, STEP_SIZE, ROOT_CORRECTION, LARGEST_WEIGHT, LARGEST_STATE, SMALLEST_STATE = (
    tl.constexpr(i) for i in range(11)
)
# Functions that several kernels share have their numbers of columns as defaults: Triton (3.6) puts the globals of such a function into a
# kernel's key in the cache or not by which kernel was compiled before.
NUM_SCALARS = 12  # an even number: rows start at multiples of 16 bytes, so that all are one kernel

# One adapter's row of `outcome`, fp64: the norm, by what the gradient is multiplied, the verdict, and whether the check refused.
NORM, CLIP, VERDICT, CHECK_FAILED = (tl.constexpr(i) for i in range(4))
NUM_OUTCOMES = 4
REFUSED, PROVEN, OPEN = (tl.constexpr(i) for i in range(3))


@triton.jit
def norm_kernel(chunks_ptr, params_ptr, squares_ptr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """Sum of squares of each chunk's gradient, in fp64: squares of fp32 numbers do not overflow there."""
    chunk = tl.program_id(0)
    _, _, sums, count = chunk_at(chunks_ptr, chunk, ALIGNED)
    i = tl.arange(0, CHUNK)
    grad = tl.load(rows_at(sums, params_ptr, ALIGNED) + i, mask=i < count, other=0.0).to(tl.float64)
    tl.store(squares_ptr + chunk, tl.sum(grad * grad))


@triton.jit
def _largest(values_ptr, num_chunks, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), values_ptr.dtype.element_ty)
    for start in range(0, num_chunks, BLOCK):
        largest = tl.maximum(largest, tl.load(values_ptr + start + i, mask=start + i < num_chunks, other=0.0))
    return tl.max(largest).to(tl.float64)


@triton.jit
def _bounded(scalars_ptr, largest_grad, params, exp_avg, exp_avg_sq):
    """Whether no number of an update can overflow, given the largest magnitudes that go into it.

    |exp_avg'| <= |exp_avg| + |grad|, exp_avg_sq' <= exp_avg_sq + grad², |weight'| <= |weight * decay| + step * |exp_avg'| / epsilon,
    with a factor of 4 for rounding. An epsilon that is no normal number of the state's dtype bounds nothing.
    """
    epsilon, step_size = tl.load(scalars_ptr + EPSILON), tl.load(scalars_ptr + STEP_SIZE)
    exp_avg += largest_grad
    exp_avg_sq += largest_grad * largest_grad
    ratio = exp_avg / epsilon
    update = step_size * ratio
    params = params * tl.abs(tl.load(scalars_ptr + DECAY)) + update
    limit = tl.load(scalars_ptr + LARGEST_STATE) / 4
    # Each by itself, not their maximum: a comparison with NaN is false, a maximum drops it.
    fits = (exp_avg < limit) & (exp_avg_sq < limit) & (ratio < limit) & (step_size * exp_avg < limit)
    return fits & (params < tl.load(scalars_ptr + LARGEST_WEIGHT) / 4) & (epsilon >= tl.load(scalars_ptr + SMALLEST_STATE))


@triton.jit(do_not_specialize=["num_chunks"])
def verdict_kernel(squares_ptr, largest_ptr, scalars_ptr, outcome_ptr, num_chunks, BLOCK: tl.constexpr):
    """One program: the norm, how to clip, and whether to update. `largest` [3, chunks]: |weight|, |exp_avg|, exp_avg_sq."""
    i = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, num_chunks, BLOCK):
        squares += tl.load(squares_ptr + start + i, mask=start + i < num_chunks, other=0.0)
    norm = tl.sqrt(tl.sum(squares))
    limit = tl.load(scalars_ptr + MAX_NORM)
    clipped = (limit > 0) & (norm + 1e-6 > limit)  # torch's rule, its 1e-6 included
    clip = tl.where(clipped, limit / (norm + 1e-6), 1.0)
    params = _largest(largest_ptr, num_chunks, BLOCK)
    exp_avg = _largest(largest_ptr + num_chunks, num_chunks, BLOCK)
    exp_avg_sq = _largest(largest_ptr + 2 * num_chunks, num_chunks, BLOCK)
    fits = _bounded(scalars_ptr, norm * clip, params, exp_avg, exp_avg_sq)
    finite = (norm < float("inf")) & (tl.load(scalars_ptr + ALLOWED) > 0)
    verdict = tl.where(finite, tl.where(fits, PROVEN, OPEN), REFUSED)
    tl.store(outcome_ptr + NORM, norm)
    tl.store(outcome_ptr + CLIP, clip)
    tl.store(outcome_ptr + VERDICT, verdict.to(tl.float64))
    tl.store(outcome_ptr + CHECK_FAILED, 0.0)


@triton.jit
def _divide(a, b):
    """Rounded to nearest: Triton's `/` of fp32 is an approximation on a GPU."""
    if a.dtype == tl.float32:
        quotient = tl.div_rn(a, b)
    else:
        quotient = a / b
    return quotient


@triton.jit
def _root(x):
    if x.dtype == tl.float32:
        root = tl.sqrt_rn(x)
    else:
        root = tl.sqrt(x)
    return root


@triton.jit
def _adamw(params, exp_avg, exp_avg_sq, grad, scalars_ptr, clip,
           BETA1: tl.constexpr = 2, BETA2: tl.constexpr = 3, EPSILON: tl.constexpr = 4, DECAY: tl.constexpr = 5,
           STEP_SIZE: tl.constexpr = 6, ROOT_CORRECTION: tl.constexpr = 7):  # fmt: skip
    """The state after one step. Scalars are combined in fp64 and rounded once, as torch does with Python's."""
    dtype: tl.constexpr = params.dtype
    beta1, beta2 = tl.load(scalars_ptr + BETA1), tl.load(scalars_ptr + BETA2)
    decay, step_size = tl.load(scalars_ptr + DECAY).to(dtype), tl.load(scalars_ptr + STEP_SIZE).to(dtype)
    epsilon, correction = tl.load(scalars_ptr + EPSILON).to(dtype), tl.load(scalars_ptr + ROOT_CORRECTION).to(dtype)
    grad = grad * clip.to(dtype)
    new_share, old_share = (1 - beta1).to(dtype), beta1.to(dtype)
    difference = grad - exp_avg
    exp_avg = tl.where(beta1 > 0.5, exp_avg + new_share * difference, grad - difference * old_share)  # torch.lerp's two forms
    exp_avg_sq = exp_avg_sq * beta2.to(dtype) + (1 - beta2).to(dtype) * grad * grad
    denominator = _divide(_root(exp_avg_sq), correction) + epsilon
    params = params * decay - _divide(step_size * exp_avg, denominator)
    return params, exp_avg, exp_avg_sq


@triton.jit
def _updated(params_ptr, exp_avg_ptr, exp_avg_sq_ptr, sums, scalars_ptr, outcome_ptr, at, mask, CLIP: tl.constexpr = 1):
    params = tl.load(params_ptr + at, mask=mask, other=0.0)
    exp_avg = tl.load(exp_avg_ptr + at, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0)
    grad = tl.load(sums, mask=mask, other=0.0)
    return _adamw(params, exp_avg, exp_avg_sq, grad, scalars_ptr, tl.load(outcome_ptr + CLIP))


@triton.jit
def check_kernel(chunks_ptr, params_ptr, exp_avg_ptr, exp_avg_sq_ptr, weights_like_ptr, scalars_ptr, outcome_ptr,
                 CHUNK: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """Where the verdict is open: notes whether a number of the update would not be finite, the weight in the bank's dtype included."""
    if tl.load(outcome_ptr + VERDICT) == OPEN:
        start, _, sums, count = chunk_at(chunks_ptr, tl.program_id(0), ALIGNED)
        i = tl.arange(0, CHUNK)
        mask = i < count
        params, exp_avg, exp_avg_sq = _updated(
            params_ptr, exp_avg_ptr, exp_avg_sq_ptr, rows_at(sums, params_ptr, ALIGNED) + i, scalars_ptr, outcome_ptr, start + i, mask
        )
        weights = params.to(weights_like_ptr.dtype.element_ty).to(tl.float64)
        infinity = float("inf")
        finite = (tl.abs(weights) < infinity) & (tl.abs(params) < infinity) & (tl.abs(exp_avg) < infinity) & (exp_avg_sq < infinity)
        refused = tl.max((mask & ~finite).to(tl.int32))
        # Every program that stores stores the same.
        tl.store(outcome_ptr + CHECK_FAILED, refused.to(tl.float64), mask=refused > 0)


@triton.jit(do_not_specialize=["num_chunks"])
def update_kernel(chunks_ptr, params_ptr, exp_avg_ptr, exp_avg_sq_ptr, weights_like_ptr, largest_ptr, scalars_ptr, outcome_ptr, num_chunks,
                  CHUNK: tl.constexpr, ALIGNED: tl.constexpr):  # fmt: skip
    """The step itself, where verdict and check allow it: state, weights in the bank, largest magnitudes. The sums are zero afterwards."""
    chunk = tl.program_id(0)
    start, weights, sums, count = chunk_at(chunks_ptr, chunk, ALIGNED)
    i = tl.arange(0, CHUNK)
    mask = i < count
    sums_at = rows_at(sums, params_ptr, ALIGNED) + i
    if (tl.load(outcome_ptr + VERDICT) != REFUSED) & (tl.load(outcome_ptr + CHECK_FAILED) == 0):
        params, exp_avg, exp_avg_sq = _updated(params_ptr, exp_avg_ptr, exp_avg_sq_ptr, sums_at, scalars_ptr, outcome_ptr, start + i, mask)
        tl.store(params_ptr + start + i, params, mask=mask)
        tl.store(exp_avg_ptr + start + i, exp_avg, mask=mask)
        tl.store(exp_avg_sq_ptr + start + i, exp_avg_sq, mask=mask)
        weights_at = rows_at(weights, weights_like_ptr, ALIGNED) + i
        tl.store(weights_at, params.to(weights_like_ptr.dtype.element_ty), mask=mask)
        tl.store(largest_ptr + chunk, tl.max(tl.where(mask, tl.abs(params), 0.0)))
        tl.store(largest_ptr + num_chunks + chunk, tl.max(tl.where(mask, tl.abs(exp_avg), 0.0)))
        tl.store(largest_ptr + 2 * num_chunks + chunk, tl.max(tl.where(mask, exp_avg_sq, 0.0)))
        tl.debug_barrier()  # another thread may zero what this one still has to load
    tl.store(sums_at, tl.zeros((CHUNK,), params_ptr.dtype.element_ty), mask=mask)
