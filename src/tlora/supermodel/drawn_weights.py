"""A base's outline with drawn numbers for its weights, so that the proof of a load can be made before there are any.

What mixes samples is the family's own code around its linears: positions, masks, recurrences. That runs here as it is. Linears and experts,
which see each token by itself, have stand-ins without weights, and any other weight takes as much memory as its longest sides.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tlora.supermodel.experts import adaptable_modules
from tlora.supermodel.failed_proof import UnpackedError
from tlora.supermodel.frozen_experts import rows_to_rows
from tlora.supermodel.inject import find_linears
from tlora.supermodel.text_model import output_embeddings

_HEAD_ROWS = 128
_LEAST_LAYERS = 2
_PLAIN_NUMBERS = 1 << 22  # of a weight, that are drawn each by itself: as products of those in memory of their own are fast
_SETTINGS = (bool, int, float, str, type(None))


def why_not_packed_drawn(base: Any, prove: Callable[[Any, str], object]) -> str:
    """Why `prove`, the load's proof, raises UnpackedError for `base`, on the meta device, with drawn weights. "": it does not, or the
    family's code does not run with these; what it raises whatever the numbers is known without them (`one_by_one.why_not_together`).
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # a load's, of the real weights, are shown
            prove(draw(base.model, base.decoder), base.name)
    except UnpackedError as error:
        return "" if error.__cause__ else str(error).removeprefix(f"base_model {base.name}: ")
    except Exception:  # a library's border: what its code does with weights that are no real ones tells nothing
        return ""
    return ""


def draw(model: Any, decoder: Any) -> Any:
    """A copy of `model` in fp32 with the first layers of `decoder`, as many as have one of each kind, and the first rows of its head."""
    count = getattr(decoder.config, "num_hidden_layers", None)
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    left_out = {id(layer): None for layers in lists for layer in list(layers)[_all_kinds(decoder, layers) :]}
    drawn = copy.deepcopy(model, left_out)  # a copy that is known already is taken as it is
    for module in list(drawn.modules()):
        vars(module).pop("forward", None)  # the outline's own stand-ins, which know its modules; `prove` makes what it needs anew
        if isinstance(module, nn.ModuleList):
            kept = [child for child in module._modules.values() if child is not None]
            module._modules = {str(number): child for number, child in enumerate(kept)}
    generator = torch.Generator().manual_seed(0)
    head = output_embeddings(drawn)
    rows = min(_HEAD_ROWS, head.out_features)
    head.weight = nn.Parameter(torch.empty(rows, head.in_features, device="meta"))  # a tied embedding keeps all of its own
    head.bias = None if head.bias is None else nn.Parameter(torch.empty(rows, device="meta"))
    _draw_weights(drawn, generator)
    for experts in (*adaptable_modules(drawn), *rows_to_rows(drawn)):
        drawn.get_submodule(experts).forward = _as_given
    for linear in find_linears(drawn).values():
        linear.forward = _Mixture(linear.in_features, linear.out_features, generator)  # type: ignore[assignment]
    return drawn.eval()


def _all_kinds(decoder: Any, layers: nn.ModuleList) -> int:
    """How many of the first of `layers` have one of each kind among them: as many modules with the same settings, but for their place."""
    settings = [tuple(_settings(layer)) for layer in layers]
    by_layer = [value for value in vars(decoder.config).values() if isinstance(value, list | tuple) and len(value) == len(layers)]
    kinds = [repr((own, [value[number] for value in by_layer])) for number, own in enumerate(settings)]
    return max(_LEAST_LAYERS, *(kinds.index(kind) + 1 for kind in kinds))


def _settings(layer: nn.Module) -> Iterator[object]:
    for name, module in layer.named_modules():
        own = {key: value for key, value in vars(module).items() if isinstance(value, _SETTINGS) and "idx" not in key}
        yield name, type(module), own, [(key, tuple(each.shape)) for key, each in module.named_parameters(recurse=False)]


def _draw_weights(drawn: Any, generator: torch.Generator) -> None:
    """Parameters are drawn, and buffers are what the family's own code makes of them as a checkpoint is loaded."""
    known: dict[int, nn.Parameter] = {}
    for module in drawn.modules():
        buffers = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        module._is_hf_initialized = not buffers  # of towers, which have none, nothing is left to make
        for key, weight in module._parameters.items():
            if weight is not None:
                own = known.setdefault(id(weight), nn.Parameter(_drawn(weight, key, generator), requires_grad=False))
                own._is_hf_initialized = True  # type: ignore[attr-defined]
                module._parameters[key] = own
        for key in buffers:
            buffer = module._buffers[key]
            module._buffers[key] = torch.zeros(buffer.shape, dtype=torch.float32 if buffer.is_floating_point() else buffer.dtype)
    drawn.initialize_weights()


def _drawn(weight: Tensor, key: str, generator: torch.Generator) -> Tensor:
    """In a large one each row is the row before it, a number further on."""
    if weight.ndim < 2:
        return float(key == "weight") + 0.1 * torch.randn(weight.shape, generator=generator)
    large = weight.numel() > _PLAIN_NUMBERS
    numbers = torch.randn(sum(weight.shape) if large else weight.shape, generator=generator) * (0.3 / math.sqrt(weight.shape[-1]))
    return numbers.as_strided(weight.shape, (1,) * weight.ndim) if large else numbers


class _Mixture:
    """In the place of a linear's forward: each output is one of the inputs, or its negative."""

    def __init__(self, inputs: int, outputs: int, generator: torch.Generator) -> None:
        self._chosen_N = torch.randint(0, inputs, (outputs,), generator=generator)
        self._signs_N = torch.randint(0, 2, (outputs,), generator=generator) * 2.0 - 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x[..., self._chosen_N] * self._signs_N


def _as_given(hidden_states: Tensor, *_: object, **__: object) -> Tensor:
    return hidden_states
