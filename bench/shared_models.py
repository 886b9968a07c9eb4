"""Bases that ranks share or stream, made of a model that is loaded already, or of drawn weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tlora.job import BasePrecision
from tlora.sharing.host_memory import Alone, Streaming
from tlora.sharing.layout import BaseLayout
from tlora.sharing.peers import Peers, Sharing
from tlora.supermodel.load import Base, make_base
from tlora.supermodel.shared_base import Precision, share_linears

_SEEDED_ROWS = 1024  # rows that one seed gives, independent of which rank asks for which of them


def share_model(model: Any, name: str, sharing: Sharing | Streaming, device: torch.device, precision: BasePrecision | None = None) -> Base:
    """A base of a causal LM that every rank has loaded whole: its decoder layers are shared, or streamed, from then on.

    With `precision` they are held in that, with the bits of a base that is not shared. Raises ModelError, RankError.
    """
    peers = Alone(sharing) if isinstance(sharing, Streaming) else Peers(sharing)
    with peers.telling():
        form = Precision(precision, model.get_output_embeddings().weight.dtype)
        stream = share_linears(model, name, form, lambda linear, first, last: model.get_submodule(linear).weight[first:last], peers, device)
    return make_base(model, name, stream)


def random_rows(
    seed: int, layout: BaseLayout, dtype: torch.dtype, device: torch.device, std: float = 0.02
) -> Callable[[str, int, int], Tensor]:
    """Normally distributed weights, drawn on `device`: the same for any number of ranks."""

    def rows(name: str, first: int, last: int) -> Tensor:
        length = layout.places[name][1].row_length
        blocks = range(first // _SEEDED_ROWS, -(-last // _SEEDED_ROWS))
        drawn = torch.cat([_draw(seed, name, block, length, dtype, device) for block in blocks])
        return drawn[first - blocks[0] * _SEEDED_ROWS :][: last - first].mul_(std)

    return rows


def _draw(seed: int, name: str, block: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name} {block}".encode()))
    return torch.randn(_SEEDED_ROWS, length, generator=generator, dtype=dtype, device=device)
