"""Experts that take all tokens at once, each multiplied by its router's score, which is zero where the token does not go (Llama 4).

They do not ask transformers' `ExpertsInterface`. Here they get what modules have that do, and their block a forward that computes each
token at its expert alone, scaled likewise, in passes with a job that adapts them. Other passes are the family's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

SEVERAL = "they take tokens multiplied by their routers' scores, of more than one expert a token"
Compute = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""Of a module of experts, x [T, H], each token's experts [T, k] and their weights [T, k]: [T, H]."""


def adopt(model: nn.Module, is_ours: Callable[[Any], bool], compute: Compute) -> None:
    """Make `compute` what such blocks of `model` run where `is_ours` says so of their experts."""
    for block in _blocks(model):
        experts = block.experts
        if block.top_k != 1 or hasattr(experts, "tlora_scaled"):
            continue
        config: Any = model.config
        experts.has_gate, experts.has_bias, experts.is_transposed, experts.config = True, False, True, config.get_text_config()
        experts._apply_gate, experts.tlora_scaled = MethodType(_gate, experts), True
        block.forward = _forward_of(block, is_ours, compute)


def why_left(model: nn.Module) -> str | None:
    """Why experts of `model` that do not ask the interface are left as they are, where that is known."""
    for block in _blocks(model):
        if block.top_k != 1:
            return f"{type(block.experts).__name__}: {SEVERAL}"
    for experts in model.modules():
        first, second = (cast(Any, getattr(experts, name, None)) for name in ("gate_up_proj", "down_proj"))
        fused = all(isinstance(each, nn.Parameter) and each.ndim == 3 for each in (first, second))
        if fused and len(first) != len(second):  # LongCat-Flash
            name, beyond = type(experts).__name__, "the others give a token back as it is"
            return f"{name}: gate_up_proj is of {len(first)} experts and down_proj of {len(second)}: {beyond}"
    return None


def is_scaled(experts: Any) -> bool:
    return getattr(experts, "tlora_scaled", False)


def all_tokens(experts: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, H] as the family's own block makes it of its `experts`."""
    count, (tokens, width) = experts.gate_up_proj.shape[0], x_TH.shape
    scores_ET = x_TH.new_zeros(count, tokens).scatter_(0, experts_TK.t(), weights_TK.t())
    return experts(x_TH.repeat(count, 1) * scores_ET.reshape(-1, 1)).view(count, tokens, width).sum(0)


def _blocks(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        experts = getattr(module, "experts", None)
        if all(hasattr(module, key) for key in ("router", "shared_expert", "top_k")) and _takes_all_tokens(experts):
            yield module


def _takes_all_tokens(experts: Any) -> bool:
    named = isinstance(experts, nn.Module) and all(hasattr(experts, key) for key in ("gate_up_proj", "down_proj", "act_fn"))
    return named and list(inspect.signature(type(experts).forward).parameters) == ["self", "hidden_states"]


def _gate(experts: Any, y_SN: Tensor) -> Tensor:
    gate, up = y_SN.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _forward_of(block: Any, is_ours: Callable[[Any], bool], compute: Compute) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    own = block.forward

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        if not is_ours(block.experts):
            return own(hidden_states)
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores_TE, logits_TE = block.router(x_TH)
        experts_TK = torch.topk(scores_TE, block.top_k, dim=1).indices  # as the router chose: all other scores are 0
        routed_TH = compute(block.experts, x_TH, experts_TK, scores_TE.gather(1, experts_TK))
        return block.shared_expert(x_TH) + routed_TH, logits_TE

    return forward
