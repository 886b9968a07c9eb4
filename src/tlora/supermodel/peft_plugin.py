"""The fused linear inside an ordinary PEFT model, for users of other trainers: the model, its parameters and its files stay PEFT's.

Only the forward of each LoRA linear is replaced. What the kernels do not compute is left to PEFT, and reported.
"""

from __future__ import annotations

import types
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import Tensor, nn

from tlora.errors import ModelError
from tlora.kernels.single_lora import single_lora_linear

_HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (nn.Parameter, Tensor)  # the latter where FSDP lends a layer views of its flat parameter
FEWEST_PRODUCTS = 13 * 10**10  # tokens x in features x out features, on a GPU: below, launching our kernels takes longer than PEFT's work


@dataclass(frozen=True)
class Acceleration:
    """What `accelerate_peft` did: names of the accelerated linears, and of the LoRA layers that stay PEFT's own, with the reason.

    `under_autocast` are those of `accelerated` whose adapter has another dtype than its base (PEFT's default over a 16-bit base).
    They take the kernels under `torch.autocast` only; without it PEFT computes the adapter in the adapter's dtype, and goes on to.
    """

    accelerated: tuple[str, ...]
    left: dict[str, str]
    under_autocast: tuple[str, ...]
    _layers: tuple[Linear, ...] = field(repr=False)

    def undo(self) -> None:
        """Every accelerated layer is PEFT's own again, its weights as they are now. Twice is as good as once."""
        for layer in self._layers:
            if _is_accelerated(layer):
                _restore(layer)

    def __str__(self) -> str:
        lines = [f"{len(self.accelerated)} LoRA linears accelerated, {len(self.left)} left to PEFT"]
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        lines += [f"  {len(names)} left, such as {names[0]}: {reason}" for reason, names in reasons.items()]
        if self.under_autocast:
            lines.append(f"  {len(self.under_autocast)} of them under torch.autocast only: their adapters have another dtype than the base")
        return "\n".join(lines)


def accelerate_peft(model: nn.Module) -> Acceleration:
    """Let each LoRA linear of a PEFT model run as one fused operation, forward and backward, with the same gradients up to rounding.

    y = W x + b + scale * B A dropout(x). `lora_A.weight` and `lora_B.weight` get their `.grad` from autograd as before, so any optimizer,
    trainer, gradient accumulation, checkpointing, autocast, DDP and `torch.compile` (after this call) work as before, and so do saving,
    merging and `disable_adapter()`. Gradients of gradients do not. Dropout is the layer's own nn.Dropout: the same seed drops the same.

    A layer is accelerated that is a `peft.tuners.lora.Linear` over a frozen, unquantised `nn.Linear` with one active adapter without
    bias or variant (DoRA and the like), and whose features are multiples of 16. `Acceleration.left` names all others, with
    the reason. A call that the kernels cannot take (merged or disabled adapters, dtypes that differ without autocast) or that is too
    small for them (on a GPU; 8,192 tokens are enough for a linear of 4096 x 4096) goes PEFT's own way. On a GPU the kernels are Triton's;
    elsewhere plain torch, right and not faster.

    Call it again after changing adapters. Raises ModelError if the model has no LoRA layer.
    """
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    if not layers:
        raise ModelError(
            f"this {type(model).__name__} has no LoRA layer to accelerate. Give it one first: peft.get_peft_model(model, config)"
        )
    left = {name: reason for name, layer in layers.items() if (reason := _foreign_forward(layer) or _obstacle(layer))}
    fit: dict[str, Linear] = {name: layer for name, layer in layers.items() if name not in left}
    for name, layer in layers.items():
        if name in fit:
            layer.forward = types.MethodType(forward, layer)
        elif _is_accelerated(layer):  # by an earlier call
            _restore(layer)
    mixed = tuple(name for name, layer in fit.items() if len({weight.dtype for weight in _weights(layer, *_active(layer))}) > 1)
    return Acceleration(tuple(fit), left, mixed, tuple(fit.values()))


def forward(layer: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An accelerated layer's forward. It bears the name of the method that it stands for, by which pickle finds PEFT's own."""
    plain = not args and not any(value is not None for value in kwargs.values()) and not layer.disable_adapters and not layer.merged
    if not plain or _obstacle(layer) is not None:
        return Linear.forward(layer, x, *args, **kwargs)
    dtype, (adapter,) = _compute_dtype(x), _active(layer)
    weight_NK, a_RK, b_NR = _weights(layer, adapter)
    if not _takes((weight_NK, a_RK, b_NR), x, dtype):
        return Linear.forward(layer, x, *args, **kwargs)
    bias = layer.base_layer.bias
    x_TK, bias_N = x.to(dtype).reshape(-1, x.shape[-1]), None if bias is None else bias.to(dtype)
    dropout, dropped_TK = layer.lora_dropout[adapter], None
    if _drops(dropout):  # in the dtype in which PEFT drops, since the random numbers may hang on it
        dropped_TK = dropout(layer._cast_input_dtype(x, a_RK.dtype)).to(dtype).reshape(x_TK.shape)
    y_TN = single_lora_linear(x_TK, weight_NK.to(dtype), bias_N, a_RK, b_NR, float(layer.scaling[adapter]), dropped_TK)
    return y_TN.view(*x.shape[:-1], y_TN.shape[1])


def _drops(dropout: nn.Module) -> bool:
    """Whether it does anything to its input just now."""
    return type(dropout) is nn.Dropout and dropout.training and dropout.p > 0


def _is_accelerated(layer: nn.Module) -> bool:
    return getattr(layer.__dict__.get("forward"), "__func__", None) is forward


def _restore(layer: nn.Module) -> None:
    """What is on the instance goes, and what is on its class shows again."""
    object.__delattr__(layer, "forward")


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _weights(layer: Any, adapter: str) -> tuple[Tensor, Tensor, Tensor]:
    """Of the base, A and B."""
    return layer.base_layer.weight, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Of a linear's product, by torch's rule: autocast's, which leaves fp64 alone, or else x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if x.dtype in _HALF_OR_SINGLE and torch.is_autocast_enabled(kind) else x.dtype


def _takes(weights: tuple[Tensor, Tensor, Tensor], x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the operation computes this call in `dtype` as PEFT would: no cast but autocast's, all on one device, and enough of it."""
    few = x.is_cuda and x.numel() * len(weights[0]) < FEWEST_PRODUCTS
    if few or any(weight.device != x.device for weight in weights):
        return False
    if dtype in _HALF_OR_SINGLE and torch.is_autocast_enabled(x.device.type):
        return all(weight.dtype in _HALF_OR_SINGLE for weight in weights)
    return all(weight.dtype == dtype for weight in weights)


def _foreign_forward(layer: Any) -> str | None:
    return "its forward was replaced by someone else" if "forward" in layer.__dict__ and not _is_accelerated(layer) else None


def _obstacle(layer: Any) -> str | None:
    """Why PEFT keeps this layer for every input, whether or not its adapters are merged or disabled just now; None if it does not.

    Asked at each call, and so traced by torch.compile.
    """
    if type(layer) is not Linear:
        return f"it is a {type(layer).__module__.removeprefix('peft.tuners.')}.{type(layer).__qualname__}, not a plain LoRA linear"
    active, base = _active(layer), layer.base_layer
    if len(active) != 1:
        return f"{len(active)} adapters are active, and the kernel is for one"
    if type(base) is not nn.Linear or layer.fan_in_fan_out:
        return f"its base layer is a {type(base).__name__}, not a plain nn.Linear"
    if base.in_features % 16 or base.out_features % 16:
        return f"its features, {base.in_features} to {base.out_features}, are not multiples of 16"
    halves = layer.lora_A[active[0]], layer.lora_B[active[0]]
    return _obstacle_of_base(base) or _obstacle_of_adapter(layer, active[0], halves) or _obstacle_of_hooks((base, *halves))


def _obstacle_of_base(base: nn.Linear) -> str | None:
    weight, bias = base.weight, base.bias
    if type(weight) not in _PLAIN or weight.dtype not in (*_HALF_OR_SINGLE, torch.float64):
        return f"its base weight is a {type(weight).__name__} of {weight.dtype}: quantised or sharded"
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return "its base weight or bias is trained too"
    return None


def _obstacle_of_adapter(layer: Any, adapter: str, halves: tuple[nn.Module, nn.Module]) -> str | None:
    if adapter in layer.lora_variant:
        return f"its adapter is a variant of LoRA: {type(layer.lora_variant[adapter]).__name__}"
    dropout = layer.lora_dropout[adapter]
    if type(dropout) not in (nn.Identity, nn.Dropout):
        return f"its dropout is a {type(dropout).__name__}, not a plain nn.Dropout"
    if not isinstance(layer.scaling[adapter], int | float):
        return "its scaling is a tensor, as for hot-swapping"
    if any(type(half) is not nn.Linear or half.bias is not None or type(half.weight) not in _PLAIN for half in halves):
        return "its adapter has a bias, or is no pair of plain nn.Linear"
    return None


def _obstacle_of_hooks(modules: tuple[nn.Module, ...]) -> str | None:
    """Why hooks on these modules (offloading, sharding, users' own) forbid the operation, which would skip them; None if none do."""
    for module in modules:
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            return "hooks are on the linears inside it, which would not be called"
        if "forward" in module.__dict__:
            return "a linear inside it had its forward replaced, as by accelerate's offloading"
    return None
