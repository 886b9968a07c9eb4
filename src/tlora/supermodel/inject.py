"""Finds the linears of a base by type and name, resolves `target_modules`, and puts `LoraLinear`s in their places. No list of models."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from tlora.adapter_shape import ExpertSize
from tlora.adapters.targets import resolve
from tlora.errors import ModelError
from tlora.job import LoraConfig
from tlora.supermodel.experts import Experts
from tlora.supermodel.held_linear import HeldLinear
from tlora.supermodel.indexers import find_indexers
from tlora.supermodel.lora_linear import BaseLinear, Context, LoraLinear, StreamedLinear
from tlora.supermodel.text_model import output_embeddings


def find_linears(model: nn.Module) -> dict[str, BaseLinear]:
    """Every `nn.Linear` of the model but the output head, by dotted name, as PEFT's `all-linear` takes them, also of a class of its own
    that computes the same (Falcon's). Those of other modalities than text, which have no weights, are none, nor are those of indexers,
    which get no gradients (`indexers.py`). Raises ModelError: there are none.
    """
    head = output_embeddings(model) if hasattr(model, "get_output_embeddings") else None
    linears: dict[str, BaseLinear] = {}
    indexers = tuple(f"{name}." for name in find_indexers(model))
    for name, m in model.named_modules():
        if name.startswith(indexers):
            continue
        is_plain = isinstance(m, nn.Linear) and m.weight is not None and _is_linear(type(m))
        if (is_plain or type(m) is HeldLinear or type(m) is StreamedLinear) and m is not head:
            linears[name] = m  # type: ignore[assignment]
    if not linears:
        raise ModelError(f"{type(model).__name__} has no nn.Linear layer to adapt. Use a base model that is made of linear layers")
    return linears


@lru_cache
def _is_linear(kind: type[nn.Linear]) -> bool:
    """Whether a small layer of the class `kind` gives what an `nn.Linear` of its weight and bias gives."""
    if kind is nn.Linear:
        return True
    weight, bias, rows = torch.arange(1.0, 16).sin().view(3, 5), torch.arange(1.0, 4).sin(), torch.arange(20.0).cos().view(1, 4, 5)
    expected = F.linear(rows, weight, bias)
    small = torch.nn.utils.skip_init(nn.Linear, 5, 3, device="cpu").requires_grad_(False)
    small.load_state_dict({"weight": weight, "bias": bias})
    small.__class__ = kind
    try:
        found = small(rows)
    except (TypeError, ValueError, AttributeError, RuntimeError, LookupError):  # of a class with more than a weight and a bias
        return False
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def expert_modules(model: nn.Module) -> list[str]:
    """Names of mixture-of-experts blocks: what has a module called `experts`, or one called `router`. Experts with a router of their own
    are a block by themselves, beside which attention may stand. Where experts stand in the decoder layer itself, beside its attention, they
    and their siblings that route are such blocks.
    """
    blocks: set[str] = set()
    for name, module in model.named_modules():
        block, _, last = name.rpartition(".")
        if last not in ("experts", "router"):
            continue
        if last == "experts" and hasattr(module, "router"):
            blocks.add(name)
        elif not block.rpartition(".")[2].isdigit():
            blocks.add(block)
        elif last == "experts":
            routers = [child for child, module in model.get_submodule(block).named_children() if "Router" in type(module).__name__]
            blocks.update(f"{block}.{child}" for child in ("experts", *routers))
    return sorted(blocks)


def resolve_targets(
    model: nn.Module, linears: Mapping[str, BaseLinear | LoraLinear], experts: Experts, lora: LoraConfig
) -> dict[str, tuple[int, int] | ExpertSize]:
    """Module name -> (in, out features) of the linears that `lora` adapts, then its parameters of `experts`.

    As `adapters.targets.resolve`, which raises ModelError.
    """
    modules = [name for name, _ in model.named_modules()]
    if lora.target_parameters and experts.why_not is not None:
        raise ModelError(f"target_parameters: experts of this base cannot be adapted: {experts.why_not}. Take target_parameters out")
    return resolve(sizes(linears), modules, expert_modules(model), lora, experts.sizes)


def sizes(linears: Mapping[str, BaseLinear | LoraLinear]) -> dict[str, tuple[int, int]]:
    """Dotted name -> (in features, out features)."""
    return {name: (linear.in_features, linear.out_features) for name, linear in linears.items()}


def inject(model: nn.Module, linears: Mapping[str, BaseLinear], context: Context) -> dict[str, LoraLinear]:
    """Replace each linear by a `LoraLinear` that holds the same frozen weight; gives these by name."""
    injected = {name: LoraLinear(linear, name, context) for name, linear in linears.items()}
    for name, linear in injected.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, linear)
    return injected
