"""Layers that scale their queries by position (Llama 4's temperature): packed samples have positions of their own.

Such a layer's code counts positions from the batch's first token. Told of packed samples, its forward hands on queries as they are, and
packed attention multiplies them by what the layer's formula gives at each token's place in its sample.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_SHORT = 3  # tokens, after which the proof at load sees the first scale; a real base has its first after 8,192


def count_in_samples(decoder: nn.Module) -> None:
    """Let the layers of `decoder` that scale queries count positions from each packed sample's first token."""
    modules = list(_scaling(decoder))
    for module in modules:
        unscaled = copy.copy(module)  # with the very same parameters and children, also those that take others' places later
        unscaled.attn_temperature_tuning = False
        module.forward = partial(_forward, module, unscaled)
    if modules:
        decoder.register_forward_pre_hook(_with_positions, with_kwargs=True)


def scales_queries(module: Any) -> bool:
    """Whether the code of an attention multiplies queries by its own count of positions; layers with rotary positions do not."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", False)


@contextmanager
def shown_in_short_samples(decoder: nn.Module) -> Iterator[None]:
    """Within it scales begin after a few tokens, so that a proof over short samples sees them."""
    modules = list(_scaling(decoder))
    before = [module.floor_scale for module in modules]
    try:
        for module in modules:
            module.floor_scale = _SHORT
        yield
    finally:
        for module, floor_scale in zip(modules, before, strict=True):
            module.floor_scale = floor_scale


def _scaling(decoder: nn.Module) -> Iterator[Any]:
    """Those whose formula is known: 1 + attn_scale * log(1 + floor((position + 1) / floor_scale))."""
    known = ("floor_scale", "attn_scale")
    return (module for module in decoder.modules() if scales_queries(module) and all(hasattr(module, key) for key in known))


def _with_positions(_decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    packed = "sequence_lengths" in kwargs or "pass_number" in kwargs
    return (args, {**kwargs, "sample_positions": kwargs["position_ids"]}) if packed else None


def _forward(module: Any, unscaled: Any, *args: Any, sample_positions: Tensor | None = None, **kwargs: Any) -> Any:
    own = type(module).forward
    if sample_positions is None:
        return own(module, *args, **kwargs)
    steps_T = torch.floor((sample_positions[0].float() + 1.0) / module.floor_scale)
    return own(unscaled, *args, query_scales=torch.log1p(steps_T) * module.attn_scale + 1.0, **kwargs)
