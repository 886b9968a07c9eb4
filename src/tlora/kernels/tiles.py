"""Tile shapes of the GPU kernels: an exact entry of a measured table (`tile_files.py`), else a rule.

Chosen by the shape of the base and its dtype alone, never by the neighbours or other work on the GPU: a tile shape is part of a job's bits.
One thing is not: how many rows and columns a GEMM's tile has. Each element of y is a sum over `inner` by itself, in one order, so a GEMM of
few tokens takes smaller tiles, of which more processors have one.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

import torch

from tlora.kernels.cards import HOPPER, CardClass
from tlora.wording.dtypes import dtype_name

Kernel = Literal["forward", "input_gradient", "shrink", "sum"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)


@dataclass(frozen=True)
class Tile:
    """One program's output tile of a GEMM, and its pipeline. `halves` stores it in two, which leaves shared memory for a stage more."""

    rows: int
    columns: int
    inner: int
    stages: int
    warps: int
    halves: bool = False
    promote: bool = False  # fp8 on Hopper: every `inner` products are added in fp32, not in the tensor core's 14 bits or so
    band: int = 8  # row tiles that share a band of the weight in L2
    first: bool = False  # start from the adapters' product instead of ending with it


@dataclass(frozen=True)
class SkinnyTile:
    """One program's tokens and columns of x per iteration in the shrink and sum kernels."""

    tokens: int
    columns: int
    stages: int
    warps: int


AnyTile = Tile | SkinnyTile

_SMALLER = (Tile(128, 128, 64, 4, 4), Tile(64, 128, 64, 5, 4), Tile(64, 64, 64, 6, 4))
MOST_SIZES = 1 + len(_SMALLER)
WIDEST_BLOCK = 256  # of all tiles' sides
LARGEST_TOGETHER = 3  # linears in one launch
_SECONDS = {(128, 256): 1.0, (128, 128): 0.6, (64, 128): 0.45, (64, 64): 0.38}
"""That processors take for one tile each of these rows and columns, in units of the largest's: 16 bits, one H200, weights that come from
memory (bench/results/h200_a316ad7_small_tiles.json)."""


class Key(NamedTuple):
    """What a tile is chosen by. `dtype` is that of the larger operands, such as "bfloat16"; `together` the linears in one launch.

    A GEMM gives `columns` and adds up over `inner`, that of all its linears. The shrink gives as many columns as there are ranks (0
    here) of an x `inner` wide, the sum an adapter's rows of `columns` over the tokens (0).
    """

    kernel: Kernel
    dtype: torch.dtype
    columns: int
    inner: int
    together: int


@dataclass(frozen=True)
class TileTable:
    """Measured tiles of one GPU; empty, all go by the rules of its class. `sized`: a GEMM of few tokens takes a smaller tile."""

    entries: Mapping[Key, AnyTile] = field(default_factory=dict)
    sized: bool = False
    card: CardClass = HOPPER

    def find(self, key: Key) -> AnyTile:
        return self.entries.get(key) or tile_by_rule(key, self.card)

    def gemm(self, key: Key, tokens: int, processors: int) -> Tile:
        """Of a GEMM that gives y [tokens, columns] on so many processors."""
        tile = self.find(key)
        assert isinstance(tile, Tile), f"{tile} is no tile of a GEMM"
        return for_tokens(tile, key.dtype, tokens, key.columns, processors) if self.sized else tile

    def shrink(self, dtype: torch.dtype, inner: int, together: int) -> SkinnyTile:
        tile = self.find(Key("shrink", dtype, 0, inner, together))
        assert isinstance(tile, SkinnyTile), f"{tile} is no tile of a shrink"
        return tile

    def sum(self, dtype: torch.dtype, columns: int, together: int) -> SkinnyTile:
        tile = self.find(Key("sum", dtype, columns, 0, together))
        assert isinstance(tile, SkinnyTile), f"{tile} is no tile of a sum"
        return tile


def sizes_of(tile: Tile, dtype: torch.dtype) -> tuple[Tile, ...]:
    """`tile` and the smaller ones that give the same bits, the largest first. Only for those that were measured: 16 bits, `inner` 64."""
    size = tile.rows * tile.columns
    if dtype.itemsize != 2 or tile.inner != 64 or (tile.rows, tile.columns) not in _SECONDS:
        return (tile,)
    smaller = [small for small in _SMALLER if small.rows * small.columns < size]
    return (tile, *(replace(small, promote=tile.promote, band=tile.band, first=tile.first) for small in smaller))


@functools.cache  # asked at every launch
def for_tokens(tile: Tile, dtype: torch.dtype, tokens: int, columns: int, processors: int) -> Tile:
    """The fastest of `sizes_of` the `tile` for y [tokens, columns] on so many processors, which take one tile after another."""

    def seconds(size: Tile) -> float:
        tiles = -(-tokens // size.rows) * -(-columns // size.columns)
        return -(-tiles // processors) * _SECONDS[size.rows, size.columns]

    sizes = sizes_of(tile, dtype)
    return min(sizes, key=seconds) if len(sizes) > 1 else tile


def keys_of(in_features: int, widths: Sequence[int], dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Key]:
    """Every key that a group of linears can ask for: x of `in_features` to `widths`, activations in `dtype`, weights in `weight_dtype`.

    Dropout gives each linear an x of its own, so that shrink and sum may run for one linear though more share the input.
    """
    together = len(widths)
    keys = [Key("forward", weight_dtype, width, in_features, 1) for width in widths]
    keys.append(Key("input_gradient", weight_dtype, in_features, sum(widths), together))
    for inner, members in ((in_features, together), (in_features, 1), *((width, 1) for width in widths)):
        keys += [Key("shrink", dtype, 0, inner, members), Key("sum", dtype, inner, 0, members)]
    return list(dict.fromkeys(keys))


def describe(key: Key, tile: AnyTile) -> dict[str, Any]:
    """Both as JSON holds them."""
    return key._asdict() | {"dtype": dtype_name(key.dtype), "tile": asdict(tile)}


def digest(table: TileTable, keys: Iterable[Key], others: object = None) -> str:
    """16 hex digits of the tiles that `keys` get, and of `others`: independent of the table or rule that they come from, and
    another digest when one tile differs.
    """
    rows = sorted(json.dumps(describe(key, table.find(key)), sort_keys=True) for key in set(keys))
    rows += [repr(others)] if others is not None else []
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


@functools.cache  # asked at every launch
def tile_by_rule(key: Key, card: CardClass = HOPPER) -> AnyTile:
    """The tile of a key that no table has."""
    if card.loads == "pointers":
        return pointer_tile(key)
    if key.kernel == "shrink":
        return shrink_tile(key.dtype, key.together)
    if key.kernel == "sum":
        return sum_tile(key.dtype, key.together)
    return replace(gemm_tile(key.columns, key.dtype), first=expand_first(key.together, key.columns, key.kernel == "forward"))


def shrink_tile(dtype: torch.dtype, together: int) -> SkinnyTile:
    """For `together` linears that share x."""
    if dtype.itemsize == 4:
        return SkinnyTile(64, 32, 4, 4)
    return SkinnyTile(64, 128 if together == 1 else 64, 4, 8)


def sum_tile(dtype: torch.dtype, together: int) -> SkinnyTile:
    """For `together` linears that share x."""
    if dtype.itemsize == 4:
        return SkinnyTile(32, 64, 4, 4)
    return SkinnyTile(64, 128, 3, 4 if together == 1 else 8)


def expand_first(together: int, num_columns: int, is_forward: bool) -> bool:
    """Whether a GEMM's tile starts from the adapters' product or ends with it, by measurement on an H200 (8,192 tokens, ms).

    4096 -> 14336 twice 2.71 first, 2.89 last; the input gradient of both 2.60 and 3.59; 14336 -> 4096 1.36 and 1.31, its input gradient
    1.46 and 1.37; 4096 -> 4096 0.39 and 0.38. The order of additions, and so the bits, follow.
    """
    return together == 2 or (is_forward and num_columns >= 8192)


def gemm_tile(num_columns: int, dtype: torch.dtype) -> Tile:
    """The tile for an output of `num_columns`.

    fp32's is narrower: three passes (`triton_dot.py`) take a second accumulator. 128 x 128 with 8 warps has the registers for both.
    """
    columns = next((c for c in (16, 32, 64, 128) if num_columns <= c), 256)
    if dtype.itemsize == 4:
        return Tile(128, min(columns, 128), 32, 3, 8)
    if columns < 128:
        return Tile(128, columns, 64, 3, 4)
    return Tile(128, columns, 64 if dtype.itemsize == 2 else 128, 3, 8, halves=columns == 256)


def pointer_tile(key: Key) -> AnyTile:
    """The tile of a key on cards without bulk copies, whichever their class: what fits into 99 KiB fits all of them.

    Small blocks, of which two or three share a processor. Of those tried on an H100 that was made to run sm_80's code, 128 x 128 x 32 in
    four stages by four warps is within 5 % of the fastest, which takes 96 KiB (8,192 tokens, 4096 -> 14336: 394 and 415 TFLOP/s).
    """
    wide = key.dtype.itemsize == 4
    if key.kernel == "shrink":
        if wide:
            return SkinnyTile(64, 32, 3, 4)
        return SkinnyTile(64, 64, 3, 4) if key.together == 1 else SkinnyTile(64, 32, 4, 8)
    if key.kernel == "sum":
        return SkinnyTile(32, 64, 3, 4) if wide else SkinnyTile(64, 64 if key.together == 1 else 32, 3, 4)
    columns = next((c for c in (16, 32, 64) if key.columns <= c), 128)
    if wide:
        return Tile(64, min(columns, 64), 32, 3, 4)
    # three linears in one input gradient leave the registers of a 128 x 128 tile no room
    return Tile(64 if key.together == LARGEST_TOGETHER else 128, columns, 32 if key.dtype.itemsize == 2 else 64, 4, 4)
