"""Chunks of one adapter: runs of elements that are contiguous both in its flat vectors and in the bank. A program takes one chunk.

Here are how a kernel reads the table of chunks, and the copies of an adapter's gradient sums to and from one flat vector, and of its
weights from one.
"""

# pyright: reportGeneralTypeIssues=false
# (a jit function's call is typed NoReturn)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_at(chunks_ptr, chunk, ALIGNED: tl.constexpr):
    """(offset, address of weights, address of sums, elements) of one chunk: the columns of `bank_chunks.chunk_table`."""
    at = chunks_ptr + chunk.to(tl.int64) * 4
    start, weights, sums, count = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3).to(tl.int32)
    if ALIGNED:
        start, count = tl.multiple_of(start, 16), tl.multiple_of(count, 16)
    return start, weights, sums, count


@triton.jit
def rows_at(address, like, ALIGNED: tl.constexpr):
    """An address as a pointer to elements of `like`; 16 bytes at a time where all rows are so aligned."""
    pointer = address.to(like.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def gather_kernel(chunks_ptr, flat_ptr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """flat[offset : offset + elements] = sums of the chunk."""
    start, _, sums, count = chunk_at(chunks_ptr, tl.program_id(0), ALIGNED)
    i = tl.arange(0, CHUNK)
    tl.store(flat_ptr + start + i, tl.load(rows_at(sums, flat_ptr, ALIGNED) + i, mask=i < count), mask=i < count)


@triton.jit
def scatter_kernel(chunks_ptr, flat_ptr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """The reverse: sums of the chunk = flat[offset : offset + elements]."""
    start, _, sums, count = chunk_at(chunks_ptr, tl.program_id(0), ALIGNED)
    i = tl.arange(0, CHUNK)
    tl.store(rows_at(sums, flat_ptr, ALIGNED) + i, tl.load(flat_ptr + start + i, mask=i < count), mask=i < count)


@triton.jit
def write_kernel(chunks_ptr, flat_ptr, weights_like_ptr, CHUNK: tl.constexpr, ALIGNED: tl.constexpr):
    """Weights of the chunk, elements of `weights_like`'s type = flat[offset : offset + elements]."""
    start, weights, _, count = chunk_at(chunks_ptr, tl.program_id(0), ALIGNED)
    i = tl.arange(0, CHUNK)
    values = tl.load(flat_ptr + start + i, mask=i < count).to(weights_like_ptr.dtype.element_ty)
    tl.store(rows_at(weights, weights_like_ptr, ALIGNED) + i, values, mask=i < count)
