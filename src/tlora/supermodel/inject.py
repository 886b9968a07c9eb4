"""Finds the linears of a base by type and name, resolves `target_modules`, and puts `LoraLinear`s in their places. No list of models."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from torch import nn

from tlora.errors import ModelError
from tlora.job import LoraConfig
from tlora.supermodel.fp8_linear import Fp8Linear
from tlora.supermodel.lora_linear import BaseLinear, Context, LoraLinear
from tlora.supermodel.streamed_linear import StreamedLinear


def find_linears(model: nn.Module) -> dict[str, BaseLinear]:
    """Every `nn.Linear` of the model but the output head, by dotted name, as PEFT's `all-linear` takes them."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    found: dict[str, BaseLinear] = {}
    for name, m in model.named_modules():
        if (type(m) is nn.Linear or type(m) is Fp8Linear or type(m) is StreamedLinear) and m is not head:
            found[name] = m
    if not found:
        raise ModelError(f"{type(model).__name__} has no nn.Linear layer to adapt. Use a base model that is made of linear layers")
    return found


def expert_modules(model: nn.Module) -> list[str]:
    """Names of mixture-of-experts blocks: modules called `experts`, and their siblings that route."""
    blocks = {name.rsplit(".", 1)[0] for name, _ in model.named_modules() if name.endswith(".experts")}
    return sorted(blocks)


def resolve_targets(model: nn.Module, linears: Mapping[str, BaseLinear | LoraLinear], lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Module name -> (in, out features) of the linears that `lora` adapts.

    A literal target matches a whole dotted name or its end, as in PEFT. Raises ModelError for a target that matches nothing
    (naming those that exist), and for experts of mixture-of-experts layers.
    """
    wanted = lora.target_modules
    names = list(linears) if wanted == "all-linear" else [n for n in linears if any(n == t or n.endswith("." + t) for t in wanted)]
    exist = sorted({name.rsplit(".", 1)[-1] for name in linears})
    for target in [] if wanted == "all-linear" else wanted:
        if not any(n == target or n.endswith("." + target) for n in linears):
            if any(n == target or n.endswith("." + target) for n, _ in model.named_modules()):
                raise ModelError(
                    f"target module {target!r} is no inner linear layer, and cannot be adapted. Choose from: {', '.join(exist)}"
                )
            close = difflib.get_close_matches(target, exist, 1)
            hint = f"Did you mean {close[0]}? " if close else ""
            raise ModelError(f"target module {target!r} is not in this base model. {hint}It has: {', '.join(exist)} (or write all-linear)")
    for block in expert_modules(model):
        inside = [n for n in names if n.startswith(block + ".")]
        if inside or wanted == "all-linear":
            raise ModelError(
                f"{block} is a mixture of experts, whose layers cannot be adapted yet. "
                f"Name the attention's linears in target_modules instead: {', '.join(exist)}"
            )
    for key in (*lora.rank_pattern, *lora.alpha_pattern):
        if not any(n == key or n.endswith("." + key) for n in names):
            raise ModelError(f"{key!r} in rank_pattern or alpha_pattern matches none of the adapted layers: {', '.join(exist)}")
    return sizes({name: linears[name] for name in names})


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
