"""A stage: a base of which one process has a stretch of the decoder's layers. Hidden states come from the stage before and go to the next.

The model keeps all of its modules and their names, so that adapters do not know stages. Layers of other stages hand on what they are given;
before the first layer of its own a stage puts in what came from the stage before; before the last stage there is no norm and no head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tlora.adapters.state import AdapterLayout, AdapterShape
from tlora.shape.stages import LayerRange


class StageInput:
    """Where a stage's first layer takes its x from: what `holding` has, else what the decoder hands it."""

    def __init__(self) -> None:
        self._x_TH: Tensor | None = None

    @contextmanager
    def holding(self, x_TH: Tensor | None) -> Iterator[None]:
        before, self._x_TH = self._x_TH, x_TH
        try:
            yield
        finally:
            self._x_TH = before

    def put_in(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward pre-hook of the first layer: x is its first argument, [1, T, H]."""
        if self._x_TH is None:
            return None
        if args:
            return (self._x_TH[None], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._x_TH[None]}


@dataclass(frozen=True)
class Stage:
    """What a process has of a base: `layers`, whose dotted names are `names`, and where x comes in."""

    layers: LayerRange
    names: tuple[str, ...]
    input: StageInput

    def own(self, layout: AdapterLayout) -> AdapterLayout:
        """The part of an adapter's layout that lies at this stage's layers."""
        return AdapterLayout(tuple(shape for shape in layout.shapes if self._has(shape)))

    def places(self, layout: AdapterLayout) -> list[slice]:
        """Where that part lies in the flat vector [P] of the whole adapter: stretches in its order."""
        places: list[slice] = []
        end = 0
        for shape in layout.shapes:
            start, end = end, end + shape.rank * (shape.in_features + shape.out_features)
            if self._has(shape):
                if places and places[-1].stop == start:
                    start = places.pop().start
                places.append(slice(start, end))
        return places

    def _has(self, shape: AdapterShape) -> bool:
        return shape.module.startswith(tuple(f"{name}." for name in self.names))


class StandInEmbedding(nn.Module):
    """Behind the first stage: numbers by token that only the checks at load read. It holds no weight."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        place = torch.arange(1, self._width + 1, device=input_ids.device)
        return torch.sin((input_ids[..., None] + 1) * place).to(self._dtype)


class Upstream(Protocol):
    """The stage before, as this one sees it: passes come and go back in one order."""

    def receive(self, tokens: int) -> Tensor:
        """Hidden states [T, H] of the next pass."""
        ...

    def send_back(self, gradient_TH: Tensor) -> None:
        """Their gradient, of the earliest pass that has none yet."""
        ...


Decode = Callable[[], tuple[Tensor, Callable[[Tensor], object] | None]]


@dataclass(frozen=True)
class StagePass:
    """A pass through a stage. `run` gives hidden states [T, H], and in training what takes their gradient back, where the stage has
    something for it; whether the next stage sends one is said by `goes_back`.
    """

    run: Decode
    goes_back: bool


def decode_from(stage: Stage, x_TH: Tensor, decode: Decode, train: bool) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """A pass of `stage` whose first layer reads x [T, H]: what `decode` gives, and in training what takes a gradient back to x's."""
    x_TH = x_TH.detach().requires_grad_(train)
    with stage.input.holding(x_TH):
        hidden_TH, backward = decode()
    if backward is None:
        return hidden_TH, None

    def go_back(dhidden_TH: Tensor) -> Tensor:
        backward(dhidden_TH)
        assert x_TH.grad is not None, "no gradient came back to the stage before"
        gradient_TH, x_TH.grad = x_TH.grad, None
        return gradient_TH

    return hidden_TH, go_back


def stage_of(decoder_layers: Sequence[nn.Module], model: nn.Module, layers: LayerRange) -> Stage:
    """The stage that has `layers` of a model's `decoder_layers`."""
    names = {module: dotted for dotted, module in model.named_modules()}
    return Stage(layers, tuple(names[decoder_layers[number]] for number in range(layers.first, layers.stop)), StageInput())
