"""Loads a base whose decoder layers are fetched as they run: several ranks of a host share them, each holding its ranges of every layer, or
they lie in the host's memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import MergeModulelist, Transpose

from tlora.adapters.targets import in_indexer
from tlora.errors import ModelError
from tlora.job import BasePrecision, split_revision
from tlora.kernels import nf4
from tlora.kernels.frozen import FrozenWeight, PlainWeight, form_of
from tlora.kernels.packed_weight import PackedWeight
from tlora.sharing.host_memory import Alone, HostMemory, Streaming
from tlora.sharing.layer_stream import LayerStream
from tlora.sharing.layout import lay_out
from tlora.sharing.peer_memory import open_peer_memory
from tlora.sharing.peers import Peers, Sharing
from tlora.sharing.shards import Found, Rows, fill
from tlora.supermodel.assembly import assemble, put_together, stand_in
from tlora.supermodel.experts import expert_parameters, hold_experts
from tlora.supermodel.held_experts import HeldExperts
from tlora.supermodel.held_linear import check_precision, check_rows, hold, quantized
from tlora.supermodel.inject import expert_modules, find_linears, sizes
from tlora.supermodel.load import Base, decoder_of, layers_of, load_config, make_base, pick_dtype
from tlora.supermodel.lora_linear import StreamedLinear, look_up_streamed
from tlora.supermodel.packed_format import PackedTensor, check_unpacked, format_of
from tlora.supermodel.tensor_files import StoredTensor, find_tensors, unmapped
from tlora.supermodel.text_model import output_embeddings
from tlora.supermodel.transposed_linears import transposed_in_files
from tlora.supermodel.weight_files import check_weights, find_safetensors


def load_shared_base(
    base_model: str, dtype: str, device: torch.device, base_precision: BasePrecision | None, sharing: Sharing | Streaming
) -> Base:
    """The base of `load_base`, shared: this rank reads its own ranges of the decoder layers from the files, and all else whole. With
    `Streaming` it reads all layers, into the host's memory.

    Raises ModelError, ConfigError, RankError for what goes wrong between ranks, and CapacityError for too little host memory.
    """
    peers = _peers_of(sharing)
    with peers.telling():
        config = load_config(base_model)
        stored_dtype, wanted = (pick_dtype(config, each, base_model) for each in ("auto", dtype))
        form = format_of(config, base_model)
        check_unpacked(form, base_precision, base_model)
        precision = base_precision if form is None else None
        check_precision(precision, device, wanted)
        name, revision = split_revision(base_model)
        check_weights(base_model, config)
        stored = find_tensors(find_safetensors(name, revision))
        model, tensors = _without_shared_weights(base_model, config, wanted, stored, {} if form is None else form.find(stored))
        packed = {linear: tensor for linear, tensor in tensors.items() if isinstance(tensor, PackedTensor)}
        transposed = transposed_in_files(model)

        def rows(linear: str, first: int, last: int) -> Found:
            source = tensors[linear]
            if isinstance(source, PackedTensor):
                return source.read(wanted).rows(first, last)
            if linear in transposed:
                return source.map()[:, first:last].t().to(wanted).contiguous()
            part = replace(source, shape=(math.prod(source.shape[:-1]), source.shape[-1])).read(first, last).to(wanted)
            return part if len(source.shape) == 2 else {"weight": part}  # experts are held as they are

        stream = share_linears(model, base_model, Precision(precision, stored_dtype, packed), rows, peers, device)
    return make_base(model, base_model, stream)


def _without_shared_weights(
    base_model: str, config: Any, dtype: torch.dtype, stored: Mapping[str, StoredTensor], packed: Mapping[str, PackedTensor]
) -> tuple[Any, dict[str, StoredTensor | PackedTensor]]:
    """The model with all weights but those of the linears to share, and for each of these where its weight is stored. `packed`: those that
    several of the `stored` tensors make together, by the name that the plain weight would have.

    transformers matches names, and knows what a family renames and ties. So it makes the model twice: of stand-ins alone, which show where
    each tensor goes, and of stand-ins for the shared linears and the real tensors for all else.
    """
    taken = {name for tensor in packed.values() for name in tensor.names}
    sources: dict[str, StoredTensor | PackedTensor] = {name: tensor for name, tensor in stored.items() if name not in taken}
    sources |= packed
    stand_ins = {name: stand_in(tensor.shape, dtype) for name, tensor in sources.items()}
    model = assemble(config, dtype, stand_ins, base_model)
    refuse_experts(model, base_model)
    names = {tensor.data_ptr(): name for name, tensor in stand_ins.items()}
    source_by_linear: dict[str, StoredTensor | PackedTensor] = {}
    shared = set[str]()
    experts = expert_parameters(model)
    for linear in chain.from_iterable(shared_weights(model, base_model)):
        name = names.get((experts[linear] if linear in experts else model.get_submodule(linear).weight).data_ptr())
        if name is None:
            raise ModelError(f"base_model {base_model}: {linear} is put together of several tensors as it is loaded. Load it whole")
        source_by_linear[linear] = sources[name]
        shared.add(name)
    indexers = {name for name in packed if in_indexer(name)}
    if others := sorted(packed.keys() - shared - indexers):
        raise ModelError(
            f"base_model {base_model}: {len(others)} of its packed tensors are no linears of decoder layers, {others[0]} first, and cannot "
            "be shared or streamed. Load it whole, or use the original model"
        )
    whole = {
        name: stand_ins[name] if isinstance(tensor, PackedTensor) or name in shared else tensor.map() for name, tensor in sources.items()
    }
    whole |= {name: packed[name].plain(dtype) for name in indexers}
    return assemble(config, dtype, whole, base_model), source_by_linear


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return unmapped(tensor) if device.type == "cpu" else tensor.to(device)


def _peers_of(sharing: Sharing | Streaming) -> Peers | Alone:
    return Alone(sharing) if isinstance(sharing, Streaming) else Peers(sharing)


@dataclass(frozen=True)
class Precision:
    """How a base's linears are held, and the dtype of its checkpoint. `packed`: linears that its files hold packed, which stay so."""

    name: BasePrecision | None
    value_dtype: torch.dtype
    packed: Mapping[str, PackedTensor] = field(default_factory=dict)

    def held(self, weight_NK: Tensor) -> FrozenWeight:
        return PlainWeight(weight_NK) if self.name is None else quantized(weight_NK, self.name, self.value_dtype)


def shared_weights(model: Any, name: str, form: Precision | None = None) -> list[dict[str, FrozenWeight]]:
    """For each decoder layer of `model`, the linears and parameters of experts that are shared (those in the head's dtype), with their
    weights on the meta device, in their form. Raises ModelError where there are none, or for widths that the form cannot have.
    """
    dtype = output_embeddings(model).weight.dtype
    linears = {dotted: linear for dotted, linear in find_linears(model).items() if linear.weight.dtype == dtype}
    form = form or Precision(None, dtype)
    if form.name is not None:
        for dotted, widths in sizes(linears).items():
            form_of(form.name).check_widths(dotted, *widths, by_rows=True)
    weights: dict[str, FrozenWeight] = {}
    for dotted, linear in linears.items():
        if (packed := form.packed.get(dotted)) is not None:
            weights[dotted] = packed.form(dtype)
            check_rows(dotted, packed.matrix[1], packed.group)
        else:
            weights[dotted] = form.held(torch.empty(linear.out_features, linear.in_features, dtype=dtype, device="meta"))
    weights |= {dotted: weight for dotted, weight in expert_weights(model, form.packed).items() if weight.dtype == dtype}
    return by_layer(model, name, weights)


def expert_weights(model: nn.Module, packed: Mapping[str, PackedTensor] | None = None) -> dict[str, FrozenWeight]:
    """All parameters of experts, each as one matrix of all their rows, on the meta device; `packed`: those that files hold packed."""
    weights: dict[str, FrozenWeight] = {}
    for name, parameter in expert_parameters(model).items():
        if isinstance(parameter, HeldExperts):
            weights[name] = parameter.form
        elif packed and name in packed:
            weights[name] = packed[name].form(parameter.dtype)
        else:
            experts, rows, columns = parameter.shape
            weights[name] = PlainWeight(torch.empty(experts * rows, columns, dtype=parameter.dtype, device="meta"))
    return weights


def refuse_experts(model: nn.Module, name: str) -> None:
    """Raise ModelError for a mixture whose experts are no parameters of a layer, or not one tensor of its files each."""
    if not expert_modules(model):
        return
    fused = {parameter.rpartition(".")[0] for parameter in expert_parameters(model)}
    why = "its files have each expert by itself" if put_together(model, MergeModulelist, Transpose) else ""
    if any(module.rpartition(".")[2] == "experts" and module not in fused for module, _ in model.named_modules()):
        why = "its experts are no parameters of all of them"
    if why:
        raise ModelError(f"base_model {name}: is a mixture of experts that cannot be shared or streamed: {why}. Load it whole")


def check_cut(model: nn.Module, weights: Mapping[str, FrozenWeight]) -> None:
    """Raises ModelError, with the words of a load, for packed `weights` whose rows are no whole groups: a base in parts or streamed is cut
    by rows.
    """
    is_packed = getattr(model.config, "quantization_config", None) is not None
    for name, weight in weights.items():
        if isinstance(weight, PackedWeight):
            out_features, in_features = weight.shape
            if is_packed:
                check_rows(name, in_features, weight.group)
            else:
                nf4.check_widths(name, in_features, out_features, by_rows=True)


def by_layer(model: Any, name: str, weights: Mapping[str, FrozenWeight]) -> list[dict[str, FrozenWeight]]:
    """For each decoder layer of the base called `name` that has any of the linears named in `weights` within it: these by name. Raises
    ModelError where there are none.
    """
    names = {module: dotted for dotted, module in model.named_modules()}
    within = [f"{names[layer]}." for layer in layers_of(decoder_of(model, name))]
    layers = [{dotted: weight for dotted, weight in weights.items() if dotted.startswith(layer)} for layer in within]
    if not any(layers):
        raise ModelError(f"base_model {name}: {type(model).__name__} has no list of decoder layers with linears to share. Load it whole")
    return [layer for layer in layers if layer]


@contextmanager
def held_in_parts(model: nn.Module) -> Iterator[None]:
    """Within it the experts of `model`, on the meta device, are held as a base in parts or streamed holds them: we compute them in every
    pass, and layers are not compiled.
    """
    plain = {name: parameter for name, parameter in expert_parameters(model).items() if isinstance(parameter, nn.Parameter)}
    weights = expert_weights(model)
    modules: dict[str, Any] = {name: model.get_submodule(name.rpartition(".")[0]) for name in plain}
    before = {name: (module.config._experts_implementation, getattr(module, "tlora_block", None)) for name, module in modules.items()}
    try:
        for name, parameter in plain.items():
            experts, rows, columns = parameter.shape
            hold_experts(model, name, HeldExperts(weights[name], (experts, rows, columns), transposed=False))
            if before[name][1] is not None:
                modules[name].tlora_block = before[name][1]  # which knows of jobs
        yield
    finally:
        for name, module in modules.items():
            delattr(module, name.rpartition(".")[2])
            setattr(module, name.rpartition(".")[2], plain[name])
            module.config._experts_implementation, module.tlora_block = before[name]


def share_linears(model: Any, name: str, form: Precision, rows: Rows, peers: Peers | Alone, device: torch.device) -> LayerStream:
    """Put the weights of the decoder layers, given by `rows`, into the memory of all ranks or of the host, and streamed linears into
    `model`.

    All else of the model goes to `device` whole, other linears in the same form. All ranks call this together. Raises ModelError and
    RankError.
    """
    weights = shared_weights(model, name, form)
    layout = lay_out(weights, peers.world_size)
    peers.agree("layout", hashlib.sha256(repr(layout).encode()).hexdigest()[:16], "a base of layout")
    if isinstance(peers, Alone):
        memory = HostMemory(layout.rank_bytes, device, peers.ordered)
    else:
        memory = open_peer_memory(layout.rank_bytes, peers, device)
    place = memory.own.device if form.name is None else device

    def placed_rows(dotted: str, first: int, last: int) -> Found:
        part = rows(dotted, first, last)
        return part.to(place) if isinstance(part, Tensor) else part

    fill(memory.own, layout, peers.rank, placed_rows, form.held, form.packed)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    peers.exchange("filled", True)
    stream, experts = LayerStream(layout, memory, peers.rank, peers.slots, device), expert_parameters(model)
    for dotted, weight in ((dotted, weight) for layer in weights for dotted, weight in layer.items()):
        if dotted in experts:
            look_up = partial(look_up_streamed, weight, dotted, stream)
            shape = tuple(experts[dotted].shape)
            hold_experts(model, dotted, HeldExperts(weight, shape, transposed=dotted in form.packed, look_up=look_up))
            continue
        parent, _, child = dotted.rpartition(".")
        bias = model.get_submodule(dotted).bias
        streamed = StreamedLinear(dotted, weight, None if bias is None else _moved(bias.detach(), device), stream)
        setattr(model.get_submodule(parent), child, streamed)
    if form.name is not None:
        others = [dotted for dotted, linear in find_linears(model).items() if isinstance(linear, nn.Linear)]
        hold(model, others, device, form.name, form.value_dtype)
    model._apply(lambda tensor: tensor if tensor.is_meta else _moved(tensor, device))
    return stream
