"""Loads a base whose decoder layers several ranks of a host share: each holds its ranges of every layer, and has the rest fetched."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tlora.errors import ModelError
from tlora.job import BasePrecision, split_revision
from tlora.sharing.layer_stream import LayerStream
from tlora.sharing.layout import NO_OFFSETS, BaseLayout, lay_out
from tlora.sharing.peer_memory import open_peer_memory
from tlora.sharing.peers import Peers, Sharing
from tlora.sharing.shards import Rows, fill
from tlora.supermodel.fp8_linear import check_fp8, check_widths, hold_in_fp8
from tlora.supermodel.inject import expert_modules, find_linears
from tlora.supermodel.load import Base, decoder_of, layers_of, load_config, make_base, pick_dtype
from tlora.supermodel.lora_linear import BaseLinear, LoraLinear
from tlora.supermodel.streamed_linear import StreamedLinear
from tlora.supermodel.tensor_files import StoredTensor, find_tensors, unmapped
from tlora.supermodel.weight_files import check_weights, find_safetensors, refuse_incomplete


def load_shared_base(base_model: str, dtype: str, device: torch.device, base_precision: BasePrecision | None, sharing: Sharing) -> Base:
    """The base of `load_base`, shared: this rank reads its own ranges of the decoder layers from the files, and all else whole.

    Raises ModelError, ConfigError, and RankError for what goes wrong between ranks.
    """
    peers = Peers(sharing)
    with peers.telling():
        config = load_config(base_model)
        wanted = pick_dtype(config, dtype, base_model)
        if base_precision == "fp8":
            check_fp8(device, wanted)
        name, revision = split_revision(base_model)
        check_weights(base_model, config)
        stored = find_tensors(find_safetensors(name, revision))
        model, tensors = _without_shared_weights(base_model, config, wanted, stored)
        offsets = {linear: _offset(tensor, wanted, device) for linear, tensor in tensors.items()}
        layout = lay_out_model(model, base_model, base_precision == "fp8", sharing.world_size, offsets)
        stream = share_linears(model, layout, lambda linear, *rows: tensors[linear].read(*rows).to(wanted), peers, device)
    return make_base(model, base_model, stream)


def _without_shared_weights(
    base_model: str, config: Any, dtype: torch.dtype, stored: Mapping[str, StoredTensor]
) -> tuple[Any, dict[str, StoredTensor]]:
    """The model with all weights but those of the linears to share, and for each of these where its weight is stored.

    transformers matches names, and knows what a family renames and ties. So it makes the model twice: of stand-ins alone, which show where
    each tensor goes, and of stand-ins for the shared linears and the real tensors for all else.
    """
    stand_ins = {name: stand_in(tensor.shape, dtype) for name, tensor in stored.items()}
    model = assemble(config, dtype, stand_ins, base_model)
    if expert_modules(model):
        raise ModelError(f"base_model {base_model}: is a mixture of experts, which cannot be shared yet. Load it unshared")
    names = {tensor.data_ptr(): name for name, tensor in stand_ins.items()}
    found: dict[str, StoredTensor] = {}
    for linear in lay_out_model(model, base_model, False, 1).places:
        name = names.get(model.get_submodule(linear).weight.data_ptr())
        if name is None:
            raise ModelError(f"base_model {base_model}: {linear} is put together of several tensors as it is loaded. Load it unshared")
        found[linear] = stored[name]
    shared = {tensor.name for tensor in found.values()}
    whole = {name: stand_ins[name] if name in shared else tensor.map() for name, tensor in stored.items()}
    return assemble(config, dtype, whole, base_model), found


def _offset(tensor: StoredTensor, dtype: torch.dtype, device: torch.device) -> int:
    """How far behind a multiple of 64 bytes an unshared base would have the weight: on a CPU it lies in the mapped file, unless its dtype
    is changed. A CPU's BLAS gives other bits for another alignment.
    """
    mapped = device.type == "cpu" and tensor.dtype == dtype and tensor.start % dtype.itemsize == 0
    return tensor.start % 64 if mapped else 0


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return unmapped(tensor) if device.type == "cpu" else tensor.to(device)


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of any shape that takes the memory of one number, and is known by its address."""
    return torch.zeros((), dtype=dtype).expand(*shape)


def assemble(config: Any, dtype: torch.dtype, tensors: Mapping[str, Tensor], name: str) -> Any:
    """The causal LM of `config` in `dtype` with the weights `tensors`, under their names in files; none is copied. Raises ModelError."""
    try:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
        model, found = model_class.from_pretrained(None, config=config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True)
    except Exception as error:  # a library's border: what it raises depends on family and version
        raise ModelError(f"base_model {name}: cannot be loaded: {' '.join(str(error).split())[:400]}. Copy the model again") from None
    refuse_incomplete(found, name)
    return model


def share_model(model: Any, name: str, sharing: Sharing, device: torch.device, fp8: bool = False) -> Base:
    """A base of a causal LM that every rank has loaded whole: its decoder layers are shared from then on.

    With `fp8` they are held in that, with the bits of a base that is not shared. Raises ModelError, RankError.
    """
    peers = Peers(sharing)
    with peers.telling():
        layout = lay_out_model(model, name, fp8, sharing.world_size)
        stream = share_linears(model, layout, lambda linear, first, last: model.get_submodule(linear).weight[first:last], peers, device)
    return make_base(model, name, stream)


def lay_out_model(model: Any, name: str, fp8: bool, world_size: int, offsets: Mapping[str, int] = NO_OFFSETS) -> BaseLayout:
    """The layout of the linears in the decoder layers of `model`, those that are in the head's dtype. `offsets` as in `lay_out`.

    Raises ModelError where there are none, or for widths that fp8 cannot have.
    """
    dtype = model.get_output_embeddings().weight.dtype
    linears = {dotted: linear for dotted, linear in find_linears(model).items() if linear.weight.dtype == dtype}
    layers = shapes_by_layer(model, layers_of(decoder_of(model, name)), linears)
    if not layers:
        raise ModelError(f"base_model {name}: {type(model).__name__} has no list of decoder layers with linears to share. Load it unshared")
    for linear, (num_rows, row_length) in ((n, shape) for layer in layers for n, shape in layer.items() if fp8):
        check_widths(linear, row_length, num_rows)
    return lay_out(layers, dtype, fp8, world_size, offsets)


def shapes_by_layer(
    model: nn.Module, layers: Sequence[nn.Module], linears: Mapping[str, BaseLinear | LoraLinear]
) -> list[dict[str, tuple[int, int]]]:
    """For each of `layers` that has any of `linears` within it: these by name, with the shape [N, K] of the weight."""
    names = {module: dotted for dotted, module in model.named_modules()}
    found = [{n: (m.out_features, m.in_features) for n, m in linears.items() if n.startswith(names[layer] + ".")} for layer in layers]
    return [layer for layer in found if layer]


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
        setattr(model.get_submodule(parent), child, StreamedLinear(piece, None if bias is None else _moved(bias.detach(), device), stream))
    if layout.fp8:
        hold_in_fp8(model, [n for n, m in find_linears(model).items() if isinstance(m, nn.Linear)], device)
    model._apply(lambda tensor: tensor if tensor.is_meta else _moved(tensor, device))
    return stream
