"""Makes a transformers model of tensors that are given by their names in files, and loads packed checkpoints that way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming, rename_source_key

from tlora.adapters.targets import in_indexer
from tlora.errors import ModelError
from tlora.job import split_revision
from tlora.supermodel.experts import expert_parameters, hold_experts
from tlora.supermodel.held_experts import HeldExperts
from tlora.supermodel.held_linear import HeldLinear, hold_packed
from tlora.supermodel.inject import find_linears
from tlora.supermodel.mxfp4_format import packed_form
from tlora.supermodel.packed_format import Format, PackedTensor, without_packing
from tlora.supermodel.tensor_files import find_tensors
from tlora.supermodel.text_model import leave_out_other_modalities, model_class
from tlora.supermodel.transposed_linears import stand_up
from tlora.supermodel.weight_files import find_safetensors, refuse_incomplete


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of any shape that takes the memory of one number, and is known by its address."""
    return torch.zeros((), dtype=dtype).expand(tuple(shape))


def assemble(config: Any, dtype: torch.dtype, tensors: Mapping[str, Tensor], name: str) -> Any:
    """The causal LM of `config` in `dtype` with the weights `tensors`, under their names in files; none is copied. Raises ModelError."""
    model = _assemble_whole(config, dtype, tensors, name)
    leave_out_other_modalities(model)
    return model


def _assemble_whole(config: Any, dtype: torch.dtype, tensors: Mapping[str, Tensor], name: str) -> Any:
    try:
        plain = without_packing(config)
        model, info = model_class(config).from_pretrained(
            None, config=plain, state_dict=dict(tensors), dtype=dtype, output_loading_info=True
        )
    except Exception as error:  # a library's border: what it raises depends on family and version
        raise ModelError(f"base_model {name}: cannot be loaded: {' '.join(str(error).split())[:400]}. Copy the model again") from None
    refuse_incomplete(info, name)
    stand_up(model)
    return model


@torch.no_grad()
def load_packed(base_model: str, config: Any, dtype: torch.dtype, form: Format, device: torch.device) -> Any:
    """The model in `dtype` with its packed weights on `device`, read one after another; all else lies in mapped files, but for indexers'
    weights, which are unpacked. Raises ModelError.

    transformers matches names: stand-ins for the packed weights show which linear or parameter of experts each belongs to.
    """
    stored = find_tensors(find_safetensors(*split_revision(base_model)))
    packed = form.find(stored)
    taken = {name for tensor in packed.values() for name in tensor.names}
    stand_ins = {key: stand_in(tensor.shape, dtype) for key, tensor in packed.items() if not in_indexer(key)}
    plain = {name: tensor.map() for name, tensor in stored.items() if name not in taken}
    plain |= {key: tensor.plain(dtype) for key, tensor in packed.items() if in_indexer(key)}
    model = _assemble_whole(config, dtype, plain | stand_ins, base_model)
    keys = {tensor.data_ptr(): key for key, tensor in stand_ins.items()}
    found = {name: keys.pop(weight.data_ptr(), None) for name, weight in _packable(model).items()}
    leave_out_other_modalities(model)
    for name in _packable(model):
        if (key := found[name]) is not None:
            hold_tensor(model, name, packed[key], dtype, device)
    if keys:
        raise ModelError(
            f"base_model {base_model}: {len(keys)} of its packed tensors are no linear layer's by themselves, {min(keys.values())} first. "
            "Use the original model"
        )
    return model


def _packable(model: nn.Module) -> dict[str, Tensor]:
    """The weights of linears by these' names, and parameters of experts."""
    return {name: linear.weight for name, linear in find_linears(model).items()} | expert_parameters(model)  # type: ignore[return-value]


def hold_tensor(model: nn.Module, name: str, tensor: PackedTensor, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear or the parameter of experts `name` of `model` by one that holds `tensor`, read onto `device`."""
    weight = tensor.read(dtype)
    weight = replace(weight, **{part: values.to(device) for part, values in weight.tensors.items()})
    parent, _, child = name.rpartition(".")
    if len(tensor.shape) == 3:
        hold_experts(model, name, HeldExperts(weight, tensor.shape, transposed=True))
        return
    bias: Tensor | None = model.get_submodule(name).bias  # type: ignore[assignment]
    setattr(model.get_submodule(parent), child, HeldLinear(weight, None if bias is None else bias.detach()))


def put_together(model: Any, *steps: type[Any]) -> bool:
    """Whether transformers makes weights of the model's family from several tensors, or others, by any of these `steps`."""
    transforms = (each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter))
    return any(isinstance(step, steps) for each in transforms for step in each.operations)


def why_in_parts(model: Any, names: Sequence[str]) -> str:
    """Which of the parameters `names` transformers makes anew of tensors of a file, in words: joined, or one cut out of a larger. What it
    transposes lies where it lay. "": none.
    """
    transforms = (each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter))
    made = [each.target_patterns for each in transforms if any(not isinstance(step, Transpose) for step in each.operations)]
    ends = tuple(end for targets in made for end in targets)
    part = next((name for name in names if name.endswith(ends)), None)
    return "" if part is None else f"its files have the parts of {part} apart, or in another tensor"


def lost_by_peft(model: Any, linears: Iterable[str]) -> list[str]:
    """Those of `linears` for whose adapters PEFT finds no place: it renames an adapter's tensors as transformers renames those of the
    family's files, also where they have the model's names already (`language_model.layers` in place of `layers`, twice).
    """
    if get_checkpoint_conversion_mapping(model.config.model_type) is None:
        return []
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    modules = {name for name, _ in model.named_modules()}
    found = {name: rename_source_key(f"{name}.weight", renamings, [])[0].removesuffix(".weight") for name in linears}
    # where it is but a prefix that an adapter's own name has, PEFT undoes it
    return [name for name, renamed in found.items() if renamed not in modules and not f"base_model.model.{name}".endswith(renamed)]


def hold_outlined(model: nn.Module, form: Format, value_dtype: torch.dtype) -> None:
    """On the meta device: the same for all that files of `form` hold packed, whose plain weights would be in `value_dtype`."""
    hold_packed(model, [name for name in find_linears(model) if form.packs(name)], form.group, value_dtype, form.has_zero)
    for name, weight in expert_parameters(model).items():
        if form.packs_experts(name):
            experts, inputs, outputs = weight.shape
            packed = packed_form(experts, inputs, outputs, weight.dtype)
            hold_experts(model, name, HeldExperts(packed, (experts, inputs, outputs), transposed=True))


_GROUPED = getattr(torch, "_grouped_mm", None)


class OutlinedExperts(TorchFunctionMode):
    """Within it a grouped product of tensors without numbers is an ordinary one with its first expert: it has the same output and keeps
    the same bytes for backward. Transformers' experts run it as `torch.nn.functional.grouped_mm`. Counts of tokens are none (JetMoE's),
    questions are answered with yes (whether a batch is one sample), and all that is looked for is there (keys that an indexer may choose,
    those behind a mask).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _GROUPED and args[0].is_meta:
            return args[0] @ args[1][0]
        if func is Tensor.tolist and args[0].is_meta:
            return [0] * args[0].numel()
        if func in (Tensor.__bool__, Tensor.__contains__) and args[0].is_meta:
            return True
        if func in (torch.nonzero, Tensor.nonzero) and args[0].is_meta and not (kwargs or {}).get("as_tuple"):
            return args[0].new_empty(args[0].numel(), args[0].ndim, dtype=torch.long)
        if func is Tensor.__getitem__ and args[0].is_meta:
            return func(args[0], tuple(map(_all_of, args[1])) if isinstance(args[1], tuple) else _all_of(args[1]))
        return func(*args, **(kwargs or {}))


def _all_of(index: Any) -> Any:
    """Of one that chooses by a mask without numbers, all."""
    is_mask = isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool and index.ndim == 1
    return slice(None) if is_mask else index
