"""Loads a base whose decoder layers several ranks of a host share: each holds its ranges of every layer, and has the rest fetched."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from tlora.errors import ModelError
from tlora.sharing.layer_stream import LayerStream
from tlora.sharing.layout import BaseLayout, lay_out
from tlora.sharing.peer_memory import open_peer_memory
from tlora.sharing.peers import Peers, Sharing
from tlora.sharing.shards import Rows, fill
from tlora.supermodel.fp8_linear import check_widths, hold_in_fp8
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import Base, decoder_of, layers_of, make_base
from tlora.supermodel.streamed_linear import StreamedLinear


def share_model(model: Any, name: str, sharing: Sharing, device: torch.device, fp8: bool = False) -> Base:
    """A base of a causal LM that every rank has loaded whole: its decoder layers are shared from then on.

    With `fp8` they are held in that, with the bits of a base that is not shared. Raises ModelError, RankError.
    """
    peers = Peers(sharing)
    with peers.telling():
        layout = lay_out_model(model, name, fp8, sharing.world_size)
        stream = share_linears(model, layout, lambda linear, first, last: model.get_submodule(linear).weight[first:last], peers, device)
    return make_base(model, name, stream)


def lay_out_model(model: Any, name: str, fp8: bool, world_size: int) -> BaseLayout:
    """The layout of the linears in the decoder layers of `model`, those that are in the head's dtype.

    Raises ModelError where there are none, or for widths that fp8 cannot have.
    """
    found, names = find_linears(model), {module: dotted for dotted, module in model.named_modules()}
    dtype = model.get_output_embeddings().weight.dtype
    layers: list[dict[str, tuple[int, int]]] = []
    for layer in layers_of(decoder_of(model, name)):
        inside = {n: m for n, m in found.items() if n.startswith(names[layer] + ".") and m.weight.dtype == dtype}
        layers.append({n: (m.out_features, m.in_features) for n, m in inside.items()})
        for linear, (num_rows, row_length) in layers[-1].items() if fp8 else ():
            check_widths(linear, row_length, num_rows)
    if not any(layers):
        raise ModelError(f"base_model {name}: {type(model).__name__} has no list of decoder layers with linears to share. Load it unshared")
    return lay_out([layer for layer in layers if layer], dtype, fp8, world_size)


def share_linears(model: Any, layout: BaseLayout, rows: Rows, peers: Peers, device: torch.device) -> LayerStream:
    """Put the weights of `layout`, given by `rows`, into the memory of all ranks, and streamed linears into `model`.

    All else of the model goes to `device` whole, other linears in fp8 if the layout is. All ranks call this together. Raises RankError.
    """
    peers.agree("layout", hashlib.sha256(repr(layout).encode()).hexdigest()[:16], "a base of layout")
    memory = open_peer_memory(layout.rank_bytes, peers, device)
    fill(memory.own, layout, peers.rank, rows)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    peers.exchange("filled", True)
    stream = LayerStream(layout, memory, peers.rank, peers.slots)
    for name, (_, piece) in layout.places.items():
        parent, _, child = name.rpartition(".")
        bias = model.get_submodule(name).bias
        setattr(model.get_submodule(parent), child, StreamedLinear(piece, None if bias is None else bias.detach().to(device), stream))
    if layout.fp8:
        hold_in_fp8(model, [n for n, m in find_linears(model).items() if isinstance(m, nn.Linear)], device)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    return stream
