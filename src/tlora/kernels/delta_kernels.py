"""The gated delta rule by the kernels of `triton_delta_rule.py` and `triton_delta_gradients.py`: block sizes and launches.

Block sizes go by the dtype alone: they are part of a sample's bits. Forward keeps its inputs and the chunks' inverses, 256 bytes of a
token and head, and backward makes the rest again by the kernels of forward: with the states, K * V numbers of a chunk and head, a layer
would keep twenty times as much as its q, k and v.
"""

# pyright: reportArgumentType=false
# (a jit function's constants are typed `constexpr` and passed as numbers)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.kernels.chunk_layout import ChunkTables
from tlora.kernels.delta_rule import CHUNK
from tlora.kernels.triton_delta_gradients import (
    fold_kernel,
    output_back_kernel,
    prepare_back_kernel,
    scan_back_kernel,
    within_kernel,
)
from tlora.kernels.triton_delta_rule import invert_kernel, output_kernel, prepare_kernel, scan_kernel, system_kernel

_FOLDED = 16  # tokens of a program of the last kernel
_INVERT_WARPS = 1  # so that its 15 steps wait for no barrier
_GRADIENT_WARPS = 8  # of the kernels that hold the most sums: with four, these do not fit into registers


@dataclass(frozen=True)
class _Blocks:
    """Columns of V that a program takes at a time, in the loops over a sample's chunks (such a program has one block) and in the kernels of
    one chunk; warps and stages of both.
    """

    scan: int
    chunk: int
    scan_warps: int
    chunk_warps: int
    scan_stages: int
    chunk_stages: int


_BLOCKS = {2: _Blocks(64, 64, 4, 4, 2, 1), 4: _Blocks(16, 16, 4, 8, 1, 1)}
"""By bytes per element. In fp32 all kernels spill by up to 3 KB a thread, so that no run takes them: they are there to be compared."""


def all_tiles(dtype: torch.dtype) -> tuple[object, ...]:
    """All sizes that a sample's bits may depend on."""
    return _BLOCKS[dtype.itemsize], _FOLDED, CHUNK, _INVERT_WARPS, _GRADIENT_WARPS


@dataclass(frozen=True)
class _Inputs:
    """The operands of one call, whose rows of a head have adjacent elements, and the constants of its kernels."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    tables: ChunkTables
    normalize: bool

    @property
    def tokens(self) -> int:
        return self.v.shape[0]

    @property
    def heads(self) -> int:
        return self.v.shape[1]

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    @property
    def key_strides(self) -> tuple[int, int]:
        return self.k.stride(0), self.k.stride(1)

    @property
    def query_strides(self) -> tuple[int, int]:
        return self.q.stride(0), self.q.stride(1)

    @property
    def value_strides(self) -> tuple[int, int]:
        return self.v.stride(0), self.v.stride(1)

    @property
    def blocks(self) -> _Blocks:
        return _BLOCKS[self.q.element_size()]

    def constants(self, columns: int) -> tuple[int, ...]:
        """G, GROUP, K, V, BK and BV."""
        keys, values = self.q.shape[2], self.v.shape[2]
        return self.heads, self.heads // self.q.shape[1], keys, values, _block(keys), min(columns, _block(values))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.q.dtype, device=self.q.device)

    def launch_of_chunks(self, kernel: Any, *args: Any, warps: int | None = None) -> None:
        """A program for each chunk and head."""
        blocks = self.blocks
        options = {"num_warps": warps or blocks.chunk_warps, "num_stages": blocks.chunk_stages}
        kernel[len(self.tables.chunks) * self.heads,](*args, *self.constants(blocks.chunk), self.normalize, **options)

    def launch_of_samples(self, kernel: Any, *args: Any, warps: int | None = None) -> None:
        """A program for each sample, head and block of V's columns."""
        blocks = self.blocks
        constants = self.constants(blocks.scan)
        programs = len(self.tables.samples) * self.heads * -(-self.v.shape[2] // constants[-1])
        kernel[programs,](*args, *constants, num_warps=warps or blocks.scan_warps, num_stages=blocks.scan_stages)


def _block(size: int) -> int:
    """The power of two that holds `size`; products take 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class _Prepared:
    """What `prepare_kernel` gives."""

    u_TGV: Tensor
    w_TGK: Tensor
    c_TG: Tensor
    carry_TG: Tensor
    whole_CG: Tensor


def _invert(x: _Inputs) -> Tensor:
    """The inverse of each chunk's system, fp32 [T, G, 64]."""
    inverse_TGS = x.empty(x.tokens, x.heads, CHUNK, dtype=torch.float32)
    x.launch_of_chunks(system_kernel, x.k, x.g, x.beta, inverse_TGS, x.tables.chunks, *x.key_strides)
    x.launch_of_chunks(invert_kernel, inverse_TGS, x.tables.chunks, warps=_INVERT_WARPS)
    return inverse_TGS


def _prepare(x: _Inputs, inverse_TGS: Tensor) -> _Prepared:
    wide = torch.float32
    made = _Prepared(
        x.empty(x.tokens, x.heads, x.v.shape[2]),
        x.empty(x.tokens, x.heads, x.q.shape[2]),
        x.empty(x.tokens, x.heads, dtype=wide),
        x.empty(x.tokens, x.heads, dtype=wide),
        x.empty(len(x.tables.chunks), x.heads, dtype=wide),
    )
    results = made.u_TGV, made.w_TGK, made.c_TG, made.carry_TG, made.whole_CG
    strides = *x.key_strides, *x.value_strides
    x.launch_of_chunks(prepare_kernel, x.k, x.v, x.g, x.beta, inverse_TGS, *results, x.tables.chunks, *strides)
    return made


def _scan(x: _Inputs, made: _Prepared) -> tuple[Tensor, Tensor]:
    """The state before each chunk [slots, G, K, V], and new [T, G, V]."""
    state_CGKV = x.empty(len(x.tables.chunks), x.heads, x.q.shape[2], x.v.shape[2])
    new_TGV = torch.empty_like(made.u_TGV)
    x.launch_of_samples(
        scan_kernel, x.k, made.u_TGV, made.w_TGK, made.carry_TG, made.whole_CG, state_CGKV, new_TGV, x.tables.samples, *x.key_strides
    )
    return state_CGKV, new_TGV


def forward(
    q_THK: Tensor, k_THK: Tensor, v_TGV: Tensor, g_TG: Tensor, beta_TG: Tensor, tables: ChunkTables, normalize: bool
) -> tuple[Tensor, Tensor]:
    """out [T, G, V], as `delta_rule.gated_delta_rule`, and what backward reads of it: the chunks' inverses, fp32 [T, G, 64]."""
    x = _inputs(q_THK, k_THK, v_TGV, g_TG, beta_TG, tables, normalize)
    inverse_TGS = _invert(x)
    made = _prepare(x, inverse_TGS)
    state_CGKV, new_TGV = _scan(x, made)
    out_TGV = torch.empty_like(new_TGV)
    strides = *x.query_strides, *x.key_strides
    x.launch_of_chunks(output_kernel, x.q, x.k, made.c_TG, state_CGKV, new_TGV, out_TGV, tables.chunks, x.scale, *strides)
    return out_TGV, inverse_TGS


def backward(
    dout_TGV: Tensor, q_THK: Tensor, k_THK: Tensor, v_TGV: Tensor, g_TG: Tensor, beta_TG: Tensor, inverse_TGS: Tensor,
    tables: ChunkTables, normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g and beta, contiguous. `inverse` is `forward`'s."""
    x, dout = _inputs(q_THK, k_THK, v_TGV, g_TG, beta_TG, tables, normalize), dout_TGV.contiguous()
    made = _prepare(x, inverse_TGS)
    state_CGKV, new_TGV = _scan(x, made)
    dstate_CGKV, dnew_TGV = torch.empty_like(state_CGKV), torch.empty_like(new_TGV)
    read_TG, dc_TG = torch.empty_like(made.c_TG), torch.empty_like(made.c_TG)
    strides = *x.query_strides, *x.key_strides
    x.launch_of_chunks(within_kernel, x.q, x.k, made.c_TG, dout, read_TG, dnew_TGV, tables.chunks, x.scale, *strides)
    scanned = x.q, x.k, made.w_TGK, made.carry_TG, read_TG, made.whole_CG, dout, dnew_TGV, dstate_CGKV
    x.launch_of_samples(scan_back_kernel, *scanned, tables.samples, *strides, warps=_GRADIENT_WARPS)
    dq_TGK, dk_TGK = (x.empty(x.tokens, x.heads, x.q.shape[2], dtype=torch.float32) for _ in range(2))
    states = made.c_TG, made.whole_CG, state_CGKV, dstate_CGKV, new_TGV, dout
    results = dq_TGK, dk_TGK, dc_TG
    x.launch_of_chunks(output_back_kernel, x.q, x.k, *states, *results, tables.chunks, x.scale, *strides, warps=_GRADIENT_WARPS)
    dv_TGV, dg_TG, dbeta_TG = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x.v, x.g, x.beta))
    read = x.k, x.v, x.beta, made.c_TG, inverse_TGS, state_CGKV, new_TGV, dnew_TGV, dc_TG
    strides = *x.key_strides, *x.value_strides
    results = dk_TGK, dv_TGV, dg_TG, dbeta_TG
    x.launch_of_chunks(prepare_back_kernel, *read, *results, tables.chunks, *strides, warps=_GRADIENT_WARPS)
    return _fold(x, x.q, dq_TGK, x.scale), _fold(x, x.k, dk_TGK, 1.0), dv_TGV, dg_TG, dbeta_TG


def _fold(x: _Inputs, value_THK: Tensor, d_TGK: Tensor, scale: float) -> Tensor:
    dx_THK = torch.empty(value_THK.shape, dtype=value_THK.dtype, device=value_THK.device)
    heads, keys = value_THK.shape[1:]
    launch: Any = fold_kernel[-(-x.tokens // _FOLDED) * heads,]
    constants = heads, x.heads // heads, keys, _block(keys), _FOLDED, x.normalize
    launch(value_THK, d_TGK, dx_THK, x.tokens, scale, value_THK.stride(0), value_THK.stride(1), *constants)
    return dx_THK


def _inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tables: ChunkTables, normalize: bool) -> _Inputs:
    q, k, v = (_rows(t) for t in (q, k, v))
    return _Inputs(q, k, v, g.contiguous(), beta.contiguous(), tables, normalize)


def _rows(x: Tensor) -> Tensor:
    """With adjacent elements in a head's row, and rows that start at multiples of 16 bytes."""
    aligned = all(x.stride(d) * x.element_size() % 16 == 0 for d in (0, 1)) and x.data_ptr() % 16 == 0
    return x if aligned and x.stride(2) == 1 else x.contiguous()


class _DeltaKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tables: ChunkTables, normalize: bool) -> Tensor:
        ctx.tables, ctx.normalize = tables, normalize
        out, inverse = forward(q, k, v, g, beta, tables, normalize)
        ctx.save_for_backward(q, k, v, g, beta, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, g, beta, inverse = ctx.saved_tensors
        return *backward(dout, q, k, v, g, beta, inverse, ctx.tables, ctx.normalize), None, None


def delta_rule_by_kernels(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, tables: ChunkTables, normalize: bool) -> Tensor:
    """`forward`'s out, with gradients."""
    return _DeltaKernels.apply(q, k, v, g, beta, tables, normalize)  # type: ignore[no-any-return]
