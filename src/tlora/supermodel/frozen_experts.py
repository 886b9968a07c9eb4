"""Experts that stay as they are, as their modules do not ask transformers' `ExpertsInterface`: what a token is multiplied with there, and
what stands for their code on the meta device, where it cannot ask to which experts tokens go.

Which modules these are is read off their forwards and parameters: [E, A, B], or [E * A, B] (DBRX).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from types import MethodType
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from tlora.supermodel.experts import adaptable_modules, experts_per_token

Kind = Literal["routed", "in rows", "sorted", "all tokens"]
_ROUTED = ("hidden_states", "top_k_index", "top_k_weights")
_KINDS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "routed": (_ROUTED, ("gate_up_proj", "down_proj")),  # LongCat-Flash
    "in rows": (_ROUTED, ("mlp.w1", "mlp.v1", "mlp.w2")),  # DBRX: gate, up and down, all [E * A, B]
    "sorted": (("inputs", "expert_size"), ("weight",)),  # JetMoE
    "all tokens": (("hidden_states",), ("gate_up_proj", "down_proj")),  # Llama 4, with several experts a token
}
"""The parameters of a module's forward, and the names of its own."""
_INPUTS_FIRST = ("mlp.w2",)  # [E, in, out], beside those of "all tokens"


class Visited(NamedTuple):
    """Of a parameter: by how many experts a token is multiplied, on average where some are identities, and the features of one."""

    visits: Fraction
    in_features: int
    out_features: int


def frozen_parameters(model: nn.Module, adaptable: Iterable[str]) -> dict[str, Visited]:
    """All of such experts of `model`, but of the modules `adaptable`, by their dotted names."""
    found, per_token = dict[str, Visited](), experts_per_token(cast(Any, model).config.get_text_config())
    for name, kind, parameters in _frozen(model, adaptable):
        counts = [len(parameter) for parameter in parameters.values()]
        visits = Fraction(counts[0]) if kind == "all tokens" else Fraction(per_token * min(counts), max(counts))
        for each, parameter in parameters.items():
            rows, columns = parameter.shape[1:]
            inputs_first = kind == "all tokens" or each in _INPUTS_FIRST
            found[f"{name}.{each}"] = Visited(visits, *((rows, columns) if inputs_first else (columns, rows)))
    return found


def counted_on_host(model: nn.Module) -> str | None:
    """The name of experts of `model` whose code splits rows by counts that it reads on the host, if there are any."""
    return next((name for name, kind, _ in _frozen(model, adaptable_modules(model)) if kind == "sorted"), None)


def stand_in(model: nn.Module) -> None:
    """Let such experts of `model`, on the meta device, give each row to the first of them: they keep the same bytes for backward, as if
    none were an identity.
    """
    for name, kind, _ in _frozen(model, adaptable_modules(model)):
        if kind in _STAND_INS:
            module = model.get_submodule(name)
            module.forward = MethodType(_STAND_INS[kind], module)


def rows_to_rows(model: nn.Module) -> list[str]:
    """Names of those that give rows as wide as they get."""
    return [name for name, kind, _ in _frozen(model, adaptable_modules(model)) if kind != "sorted"]


def _frozen(model: nn.Module, adaptable: Iterable[str]) -> Iterator[tuple[str, Kind, dict[str, Tensor]]]:
    """With each parameter as [E, A, B]."""
    known = set(adaptable)
    for name, module in model.named_modules():
        asked = tuple(inspect.signature(type(module).forward).parameters)[1:]
        for kind, (inputs, names) in _KINDS.items():
            if inputs != asked or name in known:
                continue
            parameters = {each: _by_expert(module, each, kind) for each in names}
            if all(p is not None and p.ndim == 3 and len(p) > 1 for p in parameters.values()):
                yield name, kind, cast("dict[str, Tensor]", parameters)


def _by_expert(module: Any, name: str, kind: Kind) -> Tensor | None:
    """A parameter, of which `name` may be in a module within; None: there is no such."""
    path, _, own = name.rpartition(".")
    parameter = dict(module.named_modules()).get(path, nn.Module())._parameters.get(own)
    if parameter is None or kind != "in rows":
        return parameter
    count = getattr(module, "num_experts", 0)
    return parameter.view(count, -1, parameter.shape[-1]) if count else None


def _routed(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    slots = top_k_index.shape[-1]
    rows = torch.arange(len(hidden_states), device=hidden_states.device).repeat_interleave(slots)
    gate, up = nn.functional.linear(hidden_states[rows], module.gate_up_proj[0]).chunk(2, dim=-1)
    y_SH = nn.functional.linear(module.act_fn(gate) * up, module.down_proj[0])
    weighted_SH = y_SH * top_k_weights.reshape(-1, 1)
    return torch.zeros_like(hidden_states).index_add_(0, rows, weighted_SH.to(hidden_states.dtype))


def _in_rows(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """As `DbrxExperts.forward`, [B, T, H]."""
    rows = torch.arange(len(top_k_index), device=hidden_states.device).repeat_interleave(top_k_index.shape[-1])
    flat_TH, width = hidden_states.flatten(0, -2), len(module.mlp.w1) // module.num_experts
    y_SH = module.mlp(flat_TH[rows], module.mlp.w1[:width], module.mlp.v1[:width], module.mlp.w2[:width])
    return torch.zeros_like(flat_TH).index_add_(0, rows, y_SH * top_k_weights.reshape(-1, 1)).view(hidden_states.shape)


def _sorted(module: Any, inputs: Tensor, _expert_size: object) -> Tensor:
    return nn.functional.linear(inputs, module.weight[0])


_STAND_INS: dict[Kind, Callable[..., Tensor]] = {"routed": _routed, "in rows": _in_rows, "sorted": _sorted}
