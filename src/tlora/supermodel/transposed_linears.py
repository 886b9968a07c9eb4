"""GPT-2's `Conv1D`: a linear layer whose weight is transposed, in the model and in its files. A loaded model has `nn.Linear`s in their
places, so that nothing else need know of them. PEFT adapts both alike, with A [r, in] and B [out, r].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def stand_up(model: Any) -> None:
    """Replace each `Conv1D` of `model` by the same `nn.Linear`. What is done already stays so."""
    names = [name for name, module in model.named_modules() if type(module) is Conv1D]
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _linear(model.get_submodule(name)))
    model.tlora_transposed = transposed_in_files(model) | frozenset(names)


def transposed_in_files(model: Any) -> frozenset[str]:
    """Dotted names of the linears of a loaded `model` that its files hold as [in, out]."""
    return getattr(model, "tlora_transposed", frozenset())


def are_transposed(model: Any, targets: Iterable[str]) -> bool:
    """Whether PEFT finds `Conv1D`s in the places of `targets`: it wants to be told (`fan_in_fan_out`)."""
    return not transposed_in_files(model).isdisjoint(targets)


def _linear(layer: Conv1D) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(layer.nx, layer.nf)
    linear.weight = nn.Parameter(_transposed(layer.weight.detach()), requires_grad=layer.weight.requires_grad)
    linear.bias = layer.bias
    return linear.train(layer.training)


def _transposed(weight_KN: Tensor) -> Tensor:
    """As [out, in]. A stand-in, which takes the memory of one number and is known by its address, stays one."""
    return weight_KN.t() if 0 in weight_KN.stride() else weight_KN.t().contiguous()
