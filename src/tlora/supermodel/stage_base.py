"""Loads one stage of a base: the weights of its layers alone, with the embedding on the first stage, norm and head on the last."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import MergeModulelist

from tlora.adapters.targets import in_indexer
from tlora.errors import ModelError, first_line
from tlora.job import BasePrecision, split_revision
from tlora.shape.stages import LayerRange
from tlora.supermodel.assembly import assemble, hold_tensor, put_together, stand_in, why_in_parts
from tlora.supermodel.experts import expert_parameters
from tlora.supermodel.held_experts import held_experts
from tlora.supermodel.held_linear import check_precision, hold
from tlora.supermodel.inject import expert_modules, find_linears
from tlora.supermodel.load import Base, decoder_of, hidden_states, layers_of, load_config, make_base, outline, pick_dtype
from tlora.supermodel.packed_format import PackedTensor, check_unpacked, format_of
from tlora.supermodel.stage import Stage, StandInEmbedding, stage_of
from tlora.supermodel.tensor_files import StoredTensor, find_tensors, unmapped
from tlora.supermodel.text_model import output_embeddings
from tlora.supermodel.weight_files import check_weights, find_safetensors

_WHOLE = "Load it whole, shared or streamed"


def load_stage(base_model: str, dtype: str, device: torch.device, base_precision: BasePrecision | None, layers: LayerRange) -> Base:
    """The base of `load_base` as far as `layers` go, on `device`. No weight of another stage is read.

    Raises ModelError, also for a base that cannot be cut (`check_stages`), and ConfigError.
    """
    config = load_config(base_model)
    stored_dtype, wanted = (pick_dtype(config, each, base_model) for each in ("auto", dtype))
    form = format_of(config, base_model)
    check_unpacked(form, base_precision, base_model)
    if form is None:
        check_precision(base_precision, device, wanted)
    check_weights(base_model, config)
    outlined = outline(base_model, dtype, base_precision)
    check_stages(outlined, device)
    stored = find_tensors(find_safetensors(*split_revision(base_model)))
    packed = {} if form is None else form.find(stored)
    model, tensors = _with_own_weights(base_model, config, wanted, stored, packed, layers)
    own = _own_linears(model, base_model, layers)
    for name in (*own, *expert_parameters(model)) if form is not None else ():
        if isinstance(tensor := tensors.get(name), PackedTensor):
            hold_tensor(model, name, tensor, wanted, device)
    stage = _cut(model, base_model, layers, wanted, device)
    if base_precision is not None and form is None:
        hold(model, own, device, base_precision, stored_dtype)
    model._apply(lambda tensor: tensor if tensor.is_meta or (tensor.device == device and device.type != "cpu") else _moved(tensor, device))
    return make_base(model, base_model, stage=stage, outlined=outlined)


def check_stages(base: Base, device: torch.device) -> None:
    """Raise ModelError for a base (on the meta device) that cannot be cut into stages on a `device`, as `why_no_stages` says."""
    if why := why_no_stages(base, device):
        raise ModelError(f"base_model {base.name}: {type(base.model).__name__} cannot be cut into stages: {why}. {_WHOLE}")


def why_no_stages(base: Base, device: torch.device) -> str:
    """Why a base (on the meta device) cannot be cut on a `device`: layers that read more than the hidden states of the layer before,
    anything but layers between embedding and norm, files with each expert by itself, which transformers puts together of all layers, or
    with a layer's weight in parts, or on a GPU packed experts. Nothing: it can.
    """
    if base.why_one_by_one:
        return f"its samples go one by one: {base.why_one_by_one}"
    if device.type == "cuda" and held_experts(base.model):
        return "its experts are packed, which the kernels that stages run on do not take"
    if expert_modules(base.model) and put_together(base.model, MergeModulelist):
        return "its files have each expert by itself"
    names = {module: name for name, module in base.model.named_modules()}
    weights = [f"{names[layer]}.{weight}" for layer in layers_of(base.decoder) for weight, _ in layer.named_parameters()]
    if why := why_in_parts(base.model, weights):
        return why
    if sum(isinstance(module, nn.Embedding) for module in base.decoder.modules()) != 1:
        return "it has more embeddings than that of its tokens"
    if len(_norms(base.decoder)) != 1 or base.whole_model:
        return "behind its layers there is more than a norm"
    strange = list[str]()

    def look(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if not isinstance(output, Tensor):
            strange.append("its layers give more than hidden states")
        if any(isinstance(value, MutableMapping) for value in kwargs.values()):
            strange.append("its layers leave each other keys and values")
        if not (args and isinstance(args[0], Tensor)) and "hidden_states" not in kwargs:
            strange.append("its layers take hidden states by another name")
        beside = [*args[1:], *(value for name, value in kwargs.items() if args or name != "hidden_states")]
        if any(isinstance(value, Tensor) and value.requires_grad for value in beside):  # of parameters none does
            strange.append("its layers read the embedding beside hidden states")

    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers_of(base.decoder)]
    hooks.append(base.model.get_input_embeddings().register_forward_hook(lambda _module, _args, x: x.detach().requires_grad_() * 1))
    try:
        place = base.head.weight_VH.device
        with torch.enable_grad():
            hidden_states(base, torch.zeros(2, dtype=torch.long, device=place), torch.arange(2, device=place), (2,))
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError) as error:  # of a family's own code
        return f"its layers do not run without weights ({first_line(error)})"
    finally:
        for hook in hooks:
            hook.remove()
    return strange[0] if strange else ""


def _norms(decoder: Any) -> list[str]:
    """Names of what runs behind the layers: a decoder's own modules with weights, but for layers and embedding."""
    others = ((name, m) for name, m in decoder.named_children() if not isinstance(m, nn.ModuleList | nn.Embedding | StandInEmbedding))
    return [name for name, module in others if any(True for _ in module.parameters())]


def _with_own_weights(
    base_model: str,
    config: Any,
    dtype: torch.dtype,
    stored: Mapping[str, StoredTensor],
    packed: Mapping[str, PackedTensor],
    layers: LayerRange,
) -> tuple[Any, dict[str, StoredTensor | PackedTensor]]:
    """The model with the weights of this stage in mapped files and stand-ins for all others, and where each own linear's weight is stored.

    transformers matches names, so it makes the model twice, as for a shared base (`shared_base.py`).
    """
    taken = {name for tensor in packed.values() for name in tensor.names}
    sources: dict[str, StoredTensor | PackedTensor] = {name: tensor for name, tensor in stored.items() if name not in taken}
    sources |= packed
    stand_ins = {name: stand_in(tensor.shape, dtype) for name, tensor in sources.items()}
    model = assemble(config, dtype, stand_ins, base_model)
    names = {tensor.data_ptr(): name for name, tensor in stand_ins.items()}
    own_modules = _own_modules(model, base_model, layers)
    own = {names[buffer.data_ptr()] for _, buffer in model.named_buffers() if buffer.data_ptr() in names}  # they are small: of all layers
    tensors: dict[str, StoredTensor | PackedTensor] = {}
    copied: list[str] = []
    for dotted, parameter in model.named_parameters(remove_duplicate=False):
        if not dotted.startswith(tuple(own_modules)):
            continue
        name = names.get(parameter.data_ptr())
        if name is None and dotted in stand_ins and stand_ins[dotted].shape == parameter.shape:  # the bias of a tied head is copied
            name = dotted
            copied.append(name)
        if name is None:
            raise ModelError(f"base_model {base_model}: {dotted} is put together of several tensors as it is loaded. {_WHOLE}")
        own.add(name)
        tensors[dotted.removesuffix(".weight")] = sources[name]
    wanted = stand_ins | {name: tensor.map() for name, tensor in sources.items() if name in own and isinstance(tensor, StoredTensor)}
    wanted |= {name: packed[name].plain(dtype) for name in own & packed.keys() if in_indexer(name)}
    loaded = assemble(config, dtype, wanted, base_model)
    changed = next((name for name in copied if not torch.equal(loaded.get_parameter(name), wanted[name].to(dtype))), None)
    if changed is not None:
        raise ModelError(f"base_model {base_model}: {changed} is changed as it is loaded. {_WHOLE}")
    return loaded, tensors


def _own_modules(model: Any, name: str, layers: LayerRange) -> list[str]:
    """Prefixes of the parameters that a stage of `layers` reads."""
    decoder = decoder_of(model, name)
    names = {module: dotted for dotted, module in model.named_modules()}
    own = [layer for number, layer in enumerate(layers_of(decoder)) if number in layers]
    if layers.is_first:
        own.append(model.get_input_embeddings())
    if layers.is_last:
        own += [output_embeddings(model), *(getattr(decoder, norm) for norm in _norms(decoder))]
    return [f"{names[module]}." for module in own]


def _own_linears(model: Any, name: str, layers: LayerRange) -> list[str]:
    own = tuple(_own_modules(model, name, layers))
    return [linear for linear in find_linears(model) if linear.startswith(own)]


def _cut(model: Any, name: str, layers: LayerRange, dtype: torch.dtype, device: torch.device) -> Stage:
    """Take what is not this stage's out of the passes of `model`, and its weights off the device."""
    decoder = decoder_of(model, name)
    all_layers = layers_of(decoder)
    stage = stage_of(all_layers, model, layers)
    for number, layer in enumerate(all_layers):
        if number not in layers:
            layer.to("meta")
            layer.forward = _hand_on
    head, embedded = output_embeddings(model), model.get_input_embeddings().weight.shape
    nothing = torch.zeros((), dtype=dtype, device=device)
    if not layers.is_first:
        model.set_input_embeddings(StandInEmbedding(nothing.expand(embedded)))
        all_layers[layers.first].register_forward_pre_hook(stage.input.put_in, with_kwargs=True)
    if not layers.is_last:
        for norm in _norms(decoder):
            setattr(decoder, norm, nn.Identity())
        head.weight = nn.Parameter(nothing.clone().expand(head.weight.shape), requires_grad=False)
        head.bias = None
    return stage


def _hand_on(hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
    """The forward of a layer of another stage."""
    return hidden_states


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return tensor.to(device)
    return tensor if 0 in tensor.stride() else unmapped(tensor)  # a stand-in takes the memory of one number
