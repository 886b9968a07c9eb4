"""Causal attention of packed samples on a GPU, each sample by itself, with bits that repeat: plan, tile shapes, launches.

Reference and CPU path: `supermodel.attention`. The kernels are `triton_attention`'s; like them this module needs triton.
"""

# pyright: reportArgumentType=false
# (a jit function's constants are typed `constexpr` and passed as numbers)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tlora.kernels.cards import HOPPER, CardClass
from tlora.kernels.device import launched_as, to_device
from tlora.kernels.triton_attention import dkv_kernel, dq_kernel, forward_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_HEAD = 256
TILE_ROWS = (32, 64, 128)
"""Rows of a tile that a plan has a list for."""


@dataclass(frozen=True)
class TileLists:
    """Where the tiles of one micro-batch lie; made once, read by all layers.

    Per rows of a tile, int32 [tiles, 4] on the device: the sequence's first token, its length, the tile's first row within it, and a
    zero, so that each list starts at a multiple of 16 bytes: Triton compiles a kernel of its own for one that does not.
    The tiles with the most work come first, so that no long one starts when the others are done: of queries the late, of keys the early.
    Empty tiles fill each list up to the most that so many sequences of so many tokens can have: its length then depends on these alone.
    """

    num_tokens: int
    buffer: Tensor  # all of the lists are views of it
    queries: Mapping[int, Tensor]
    keys: Mapping[int, Tensor]


def list_tiles(lengths: Sequence[int], device: torch.device) -> TileLists:
    """For samples of `lengths` one after another; a length may be zero. One copy to the device, which the host does not wait for."""
    lengths_S = np.asarray(lengths, dtype=np.int32)
    starts_S = np.cumsum(lengths_S, dtype=np.int32) - lengths_S
    tables: list[np.ndarray] = []
    for rows in TILE_ROWS:
        counts_S = -(-lengths_S // rows)
        owner = np.repeat(np.arange(len(lengths_S)), counts_S)
        first = (np.arange(len(owner), dtype=np.int32) - np.repeat(np.cumsum(counts_S) - counts_S, counts_S)) * rows
        table = np.stack([starts_S[owner], lengths_S[owner], first, np.zeros_like(first)], 1).astype(np.int32)
        empty = np.zeros((int(lengths_S.sum()) // rows + len(lengths_S) - len(table), 4), np.int32)
        for order in (np.argsort(-first, kind="stable"), np.argsort(first - lengths_S[owner], kind="stable")):
            tables.append(np.concatenate([table[order], empty]))
    flat = to_device(np.concatenate(tables), device)
    parts = flat.split([len(table) for table in tables])
    queries, keys = (dict(zip(TILE_ROWS, parts[k::2], strict=True)) for k in (0, 1))
    return TileLists(int(lengths_S.sum()), flat, queries, keys)


@dataclass(frozen=True)
class Rule:
    """What becomes of q·k: times `scale`, capped by `cap * tanh(s / cap)`, seen where 0 <= i - j < `window`; 0 is no cap, no window."""

    scale: float
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        assert self.scale > 0 and self.window >= 0 and self.softcap >= 0, f"{self} makes no sense"

    @property
    def factors(self) -> tuple[float, float]:
        """`inner` and `factor` of `triton_attention`."""
        if self.softcap:
            return self.scale / self.softcap, self.softcap * math.log2(math.e)
        return 0.0, self.scale * math.log2(math.e)


@dataclass(frozen=True)
class Tile:
    """A program's own rows (queries; of dk and dv keys), the rows per block of its loop, and how it runs."""

    rows: int
    block: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Tiles of the three kernels."""

    forward: Tile
    dq: Tile
    dkv: Tile


ALL_TILES = {
    2: {
        64: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        128: Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 32, 4, 3)),
        256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
    },
    4: {
        64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
        128: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        256: Tiles(Tile(32, 16, 16, 1), Tile(32, 16, 16, 1), Tile(32, 16, 8, 1)),
    },
}
"""By bytes per element and the head's size, rounded up. Never by lengths or their number: tile shapes are part of a sample's bits.

Chosen by `bench/attention.py` on an H200, and for what was not timed, fp32 and heads above 128, by what keeps the loop over full blocks in
registers and fits an SM's 227 KiB. In fp32 both halves of q (`triton_dot.py`) stay in
registers, so tiles are small; above 128 they do not fit, and products are FMAs.
"""

POINTER_TILES = {
    2: {
        64: Tiles(Tile(64, 64, 4, 3), Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
        128: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 32, 8, 2)),
        256: Tiles(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(32, 32, 8, 2)),
    },
    4: ALL_TILES[4],
}
"""The same for cards without bulk copies: chosen by what the compiler makes of them in 99 KiB, and timed on none."""


def tiles_of(head_size: int, dtype: torch.dtype, card: CardClass = HOPPER) -> Tiles:
    """Of q, k and v with `head_size` in `dtype` on GPUs of a class."""
    assert dtype in DTYPES and head_size <= LARGEST_HEAD, f"no kernel for heads of {head_size} in {dtype}"
    return all_tiles(card)[dtype.itemsize][max(64, padded(head_size))]


def all_tiles(card: CardClass) -> Mapping[int, Mapping[int, Tiles]]:
    """Those of a class of GPUs."""
    return ALL_TILES if card.loads == "descriptor" else POINTER_TILES


def _tiles(q_THD: Tensor) -> Tiles:
    return tiles_of(q_THD.shape[2], q_THD.dtype, launched_as(q_THD.device))


def padded(head_size: int) -> int:
    """The power of two that a head is filled up to with zeros: what `tl.dot` takes."""
    return max(16, 1 << (head_size - 1).bit_length())


def varlen_attention_forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: TileLists, scale: float, window: int | None = None, softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(cap(q k^T scale)) v of each sample by itself: out [T, H, D], and log-sum-exp of its scores, fp32 [H, T], for backward.

    H is a multiple of G; query head h reads kv head h // (H / G). Query i of a sample sees its keys j with 0 <= i - j < `window`.
    `sinks_H` are scores of one key more for each head, neither scaled nor capped, whose v is 0 (gpt-oss); lse has them in it.
    Any strides of T and of heads. bf16 and fp16 are multiplied as they are and summed in fp32; fp32 as `triton_dot` says.
    Raises AssertionError for other dtypes, heads over 256, and tokens that the plan does not cover.
    """
    rule = Rule(scale, window or 0, softcap or 0.0)
    return launch_forward(_rows(q_THD), _rows(k_TGD), _rows(v_TGD), plan, rule, _tiles(q_THD).forward, sinks_H)


def varlen_attention_backward(
    dout_THD: Tensor, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, out_THD: Tensor, lse_HT: Tensor, plan: TileLists,
    scale: float, window: int | None = None, softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq [T, H, D], dk and dv [T, G, D], given what forward took and gave; sinks are in `out` and `lse`.

    With p = exp(s - lse) and delta = sum of out * dout:
    dv = p^T dout,  ds = p (dout v^T - delta) (1 - (s / cap)²),  dq = scale ds k,  dk = scale ds^T q  (FlashAttention-2, section 3.1).
    """
    rule, tiles = Rule(scale, window or 0, softcap or 0.0), _tiles(q_THD)
    saved = Saved(_rows(dout_THD), _rows(q_THD), _rows(k_TGD), _rows(v_TGD), out_THD.contiguous(), lse_HT)
    dq_THD, delta_HT = launch_dq(saved, plan, rule, tiles.dq)
    return dq_THD, *launch_dkv(saved, delta_HT, plan, rule, tiles.dkv)


@dataclass(frozen=True)
class Saved:
    """What backward reads; all but `out` and `lse` with any strides of T and of heads."""

    dout_THD: Tensor
    q_THD: Tensor
    k_TGD: Tensor
    v_TGD: Tensor
    out_THD: Tensor
    lse_HT: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(t.stride(axis) for t in (self.dout_THD, self.q_THD, self.k_TGD, self.v_TGD) for axis in (0, 1))


def launch_forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: TileLists, rule: Rule, tile: Tile, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and lse [H, T] with the tiles given."""
    _check(q_THD, k_TGD, v_TGD, plan)
    assert sinks_H is None or (sinks_H.shape == q_THD.shape[1:2] and sinks_H.is_contiguous()), f"sinks {sinks_H.shape} for {q_THD.shape}"
    num_tokens, heads = q_THD.shape[:2]
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    lse_HT = torch.empty(heads, num_tokens, dtype=torch.float32, device=q_THD.device)
    table = plan.queries[tile.rows]
    if len(table):  # a grid may not be empty
        forward_kernel[(len(table) * heads,)](
            q_THD, k_TGD, v_TGD, sinks_H, out_THD, lse_HT, table, num_tokens, *rule.factors,
            *(t.stride(axis) for t in (q_THD, k_TGD, v_TGD) for axis in (0, 1)),
            BM=tile.rows, BN=tile.block, **_constants(q_THD, k_TGD, rule, tile),
        )  # fmt: skip
    return out_THD, lse_HT


def launch_dq(saved: Saved, plan: TileLists, rule: Rule, tile: Tile) -> tuple[Tensor, Tensor]:
    """dq [T, H, D] and delta, fp32 [H, T]."""
    q_THD = saved.q_THD
    _check(q_THD, saved.k_TGD, saved.v_TGD, plan)
    assert saved.dout_THD.shape == saved.out_THD.shape == q_THD.shape and saved.dout_THD.dtype == q_THD.dtype
    dq_THD, delta_HT = torch.empty_like(saved.out_THD), torch.empty_like(saved.lse_HT)
    table = plan.queries[tile.rows]
    if len(table):
        dq_kernel[(len(table) * q_THD.shape[1],)](
            saved.dout_THD, q_THD, saved.k_TGD, saved.v_TGD, saved.out_THD, saved.lse_HT, delta_HT, dq_THD, table,
            q_THD.shape[0], rule.scale, *rule.factors, *saved.strides,
            BM=tile.rows, BN=tile.block, **_constants(q_THD, saved.k_TGD, rule, tile),
        )  # fmt: skip
    return dq_THD, delta_HT


def launch_dkv(saved: Saved, delta_HT: Tensor, plan: TileLists, rule: Rule, tile: Tile) -> tuple[Tensor, Tensor]:
    """dk and dv [T, G, D]."""
    q_THD, k_TGD, v_TGD = saved.q_THD, saved.k_TGD, saved.v_TGD
    dk_TGD, dv_TGD = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (k_TGD, v_TGD))
    table = plan.keys[tile.rows]
    if len(table):
        dkv_kernel[(len(table) * k_TGD.shape[1],)](
            saved.dout_THD, q_THD, k_TGD, v_TGD, saved.lse_HT, delta_HT, dk_TGD, dv_TGD, table,
            q_THD.shape[0], rule.scale, *rule.factors, *saved.strides,
            BM=tile.block, BN=tile.rows, **_constants(q_THD, k_TGD, rule, tile),
        )  # fmt: skip
    return dk_TGD, dv_TGD


def _constants(q_THD: Tensor, k_TGD: Tensor, rule: Rule, tile: Tile) -> dict[str, int | bool]:
    heads, head_size = q_THD.shape[1:]
    return {
        "H": heads,
        "GROUP": heads // k_TGD.shape[1],
        "D": head_size,
        "BD": padded(head_size),
        "WINDOW": rule.window,
        "SOFTCAP": rule.softcap > 0,
        "EXACT": q_THD.dtype == torch.float32,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _check(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: TileLists) -> None:
    num_tokens, heads, head_size = q_THD.shape
    assert q_THD.dtype == k_TGD.dtype == v_TGD.dtype, f"{q_THD.dtype}, {k_TGD.dtype}, {v_TGD.dtype}"
    assert k_TGD.shape == v_TGD.shape == (num_tokens, k_TGD.shape[1], head_size), f"q {q_THD.shape}, k {k_TGD.shape}, v {v_TGD.shape}"
    assert heads % k_TGD.shape[1] == 0, f"{heads} heads for {k_TGD.shape[1]}"
    assert num_tokens == plan.num_tokens, f"{num_tokens} tokens, planned {plan.num_tokens}"


def _rows(t: Tensor) -> Tensor:
    """With adjacent elements in a head; a sum's gradient, for one, is a single number seen from everywhere."""
    return t if t.stride(2) == 1 else t.contiguous()
