"""Makes a transformers model of tensors that are given by their names in files, and loads packed checkpoints that way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tlora.errors import ModelError
from tlora.job import split_revision
from tlora.supermodel.held_linear import HeldLinear
from tlora.supermodel.inject import find_linears
from tlora.supermodel.packed_format import Format, PackedTensor, without_packing
from tlora.supermodel.tensor_files import ANY_DTYPE, find_tensors
from tlora.supermodel.text_model import leave_out_other_modalities, model_class
from tlora.supermodel.weight_files import find_safetensors, refuse_incomplete


def stand_in(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of any shape that takes the memory of one number, and is known by its address."""
    return torch.zeros((), dtype=dtype).expand(*shape)


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
    return model


@torch.no_grad()
def load_packed(base_model: str, config: Any, dtype: torch.dtype, form: Format, device: torch.device) -> Any:
    """The model in `dtype` with its packed linears on `device`, read one after another; all else lies in mapped files. Raises ModelError.

    transformers matches names: stand-ins for the packed weights show which linear each belongs to.
    """
    stored = find_tensors(find_safetensors(*split_revision(base_model)), ANY_DTYPE)
    packed = form.find(stored)
    taken = {name for tensor in packed.values() for name in tensor.names}
    stand_ins = {key: stand_in(tensor.shape, dtype) for key, tensor in packed.items()}
    plain = {name: tensor.map() for name, tensor in stored.items() if name not in taken}
    model = _assemble_whole(config, dtype, plain | stand_ins, base_model)
    keys = {tensor.data_ptr(): key for key, tensor in stand_ins.items()}
    found = {name: keys.pop(linear.weight.data_ptr(), None) for name, linear in find_linears(model).items()}  # type: ignore[union-attr]
    leave_out_other_modalities(model)
    for name in find_linears(model):
        if (key := found[name]) is not None:
            hold_tensor(model, name, packed[key], dtype, device)
    if keys:
        raise ModelError(
            f"base_model {base_model}: {len(keys)} of its packed tensors are no linear layer's by themselves, {min(keys.values())} first. "
            "Use the original model"
        )
    return model


def hold_tensor(model: nn.Module, name: str, tensor: PackedTensor, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the linear `name` of `model` by one that holds `tensor`, read onto `device`."""
    weight = tensor.read(dtype)
    weight = replace(weight, **{part: values.to(device) for part, values in weight.tensors.items()})
    bias: Tensor | None = model.get_submodule(name).bias  # type: ignore[assignment]
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, HeldLinear(weight, None if bias is None else bias.detach()))


_GROUPED = getattr(torch, "_grouped_mm", None)


class OutlinedExperts(TorchFunctionMode):
    """Within it a grouped product of tensors without numbers is an ordinary one with its first expert: it has the same output and keeps
    the same bytes for backward. Transformers' experts run it as `torch.nn.functional.grouped_mm`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _GROUPED and args[0].is_meta:
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))
