"""The digest of the tiles of all kernels that compute one base: part of its jobs' bits, which a deterministic run compares on a resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tlora.kernels.cards import CardClass
from tlora.kernels.device import launched_as, runs_kernels
from tlora.supermodel.experts import Experts
from tlora.supermodel.load import Base
from tlora.supermodel.lora_linear import LoraLinear
from tlora.supermodel.recurrent_layers import recurrent_tiles
from tlora.supermodel.routers import router_tiles

if TYPE_CHECKING:
    from tlora.kernels.fused_linear import LinearGroup  # brings triton, which not every CPU install has


def digest_of_passes(base: Base, groups: Sequence[LinearGroup], linears: Sequence[LoraLinear], experts: Experts, routers: bool) -> str:
    """Where all is on the kernels; `routers`: these too."""
    from tlora.kernels.tiles import digest, keys_of
    from tlora.kernels.varlen_attention import all_tiles

    dtype, tiles = base.head.weight_VH.dtype, groups[0].tiles
    weight_dtypes = {linear.form.dtype for linear in linears}
    keys = [key for group in groups for w in weight_dtypes for key in keys_of(group.in_features, group.widths, dtype, w)]
    others = _beside_linears(base, experts, tiles.card) + (router_tiles(base, experts) if routers else ())
    attention = all_tiles(tiles.card)[dtype.itemsize]
    return digest(tiles, keys, (attention, *others) if others else attention)


def digest_on_plain_path(base: Base, experts: Experts, device: torch.device) -> str | None:
    """Where kernels compute experts and recurrences alone; None where they do not."""
    computed = experts.on_kernels or (device.type == "cuda" and runs_kernels(device))
    others = _beside_linears(base, experts, launched_as(device)) if computed else ()
    if not others:
        return None
    from tlora.kernels.tiles import TileTable, digest

    return digest(TileTable(), (), others[0] if len(others) == 1 else others)


def _beside_linears(base: Base, experts: Experts, card: CardClass) -> tuple[object, ...]:
    found = experts.tiles(card), recurrent_tiles(base.model, base.head.weight_VH.dtype)
    return tuple(tiles for tiles in found if tiles)
