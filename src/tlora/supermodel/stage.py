"""A stage: a base of which one process has a stretch of the decoder's layers. Hidden states come from the stage before and go to the next.

The model keeps all of its modules and their names, so that adapters do not know stages. Layers of other stages hand on what they are given;
before the first layer of its own a stage puts in what came from the stage before; before the last stage there is no norm and no head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from tlora.adapters.layout import AdapterLayout, AdapterShape
from tlora.adapters.state import AdapterState
from tlora.shape.stages import LayerRange


def pad_to(x_TH: Tensor, tokens: int) -> Tensor:
    """Zeros behind x, up to `tokens`."""
    return x_TH if len(x_TH) == tokens else functional.pad(x_TH, (0, 0, 0, tokens - len(x_TH)))


class StageInput:
    """Where a stage's first layer takes its x from: what `holding` has, else what the decoder hands it."""

    def __init__(self) -> None:
        self.x_TH: Tensor | None = None

    @contextmanager
    def holding(self, x_TH: Tensor | None) -> Iterator[None]:
        before, self.x_TH = self.x_TH, x_TH
        try:
            yield
        finally:
            self.x_TH = before

    def put_in(self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward pre-hook of the first layer: x is its first argument, [1, T, H], with zeros where the pass has padding of its own."""
        if self.x_TH is None:
            return None
        tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]
        x_1TH = pad_to(self.x_TH, tokens)[None]
        return ((x_1TH, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x_1TH})


Columns = Callable[[AdapterShape], int]


def numel_of(shape: AdapterShape) -> int:
    return shape.numel


@dataclass(frozen=True)
class Stage:
    """What a process has of a base: `layers`, whose dotted names are `names`, and where x comes in."""

    layers: LayerRange
    names: tuple[str, ...]
    input: StageInput

    def own(self, layout: AdapterLayout) -> AdapterLayout:
        """The part of an adapter's layout that lies at this stage's layers."""
        return AdapterLayout(tuple(shape for shape in layout.shapes if self.has(shape)))

    def has(self, shape: AdapterShape) -> bool:
        return shape.module.startswith(tuple(f"{name}." for name in self.names))


class AdapterCut:
    """The parts of an adapter of `layout` at `stages`, all of a base; what lies in no layer is the last one's. A tensor of the whole has in
    its last dimension so many columns for each module, in the order of the layout: `columns` says how many.
    """

    def __init__(self, layout: AdapterLayout, stages: Sequence[Stage]) -> None:
        last = len(stages) - 1
        self.layout = layout
        self._owners = [next((rank for rank in range(last) if stages[rank].has(shape)), last) for shape in layout.shapes]
        self.parts = tuple(
            AdapterLayout(tuple(shape for shape, owner in zip(layout.shapes, self._owners, strict=True) if owner == rank))
            for rank in range(len(stages))
        )

    def take(self, rank: int, whole: Tensor, columns: Columns = numel_of) -> Tensor:
        """The part of one stage: a copy."""
        pieces = whole.split([columns(shape) for shape in self.layout.shapes], dim=-1)
        own = [piece for piece, owner in zip(pieces, self._owners, strict=True) if owner == rank]
        return torch.cat(own, dim=-1) if own else whole[..., :0].clone()

    def places(self, rank: int) -> list[slice]:
        """Where the part of one stage lies in a flat vector [P] of the whole: stretches in its order."""
        places: list[slice] = []
        end = 0
        for shape, owner in zip(self.layout.shapes, self._owners, strict=True):
            start, end = end, end + shape.numel
            if owner == rank:
                if places and places[-1].stop == start:
                    start = places.pop().start
                places.append(slice(start, end))
        return places

    def put_together(self, parts: Sequence[Tensor], columns: Columns = numel_of) -> Tensor:
        """The whole of all stages' parts."""
        ends = [0] * len(parts)
        pieces: list[Tensor] = []
        for shape, owner in zip(self.layout.shapes, self._owners, strict=True):
            start, ends[owner] = ends[owner], ends[owner] + columns(shape)
            pieces.append(parts[owner][..., start : ends[owner]])
        return torch.cat(pieces, dim=-1) if pieces else parts[0]

    def state(self, rank: int, whole: AdapterState) -> AdapterState:
        """The part of one stage of an adapter and its moments."""
        params, exp_avg, exp_avg_sq = (self.take(rank, values) for values in (whole.params, whole.exp_avg, whole.exp_avg_sq))
        return replace(whole, layout=self.parts[rank], params=params, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


class StandInEmbedding(nn.Module):
    """Behind the first stage: numbers by token that only the checks at load read. Families ask its weight, the first of a model's, for the
    device; it has the memory of one number.
    """

    def __init__(self, weight_VH: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VH, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        place = torch.arange(1, self.weight.shape[1] + 1, device=input_ids.device)
        return torch.sin((input_ids[..., None] + 1) * place).to(self.weight.dtype)


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


def without_padding(decode: Decode, tokens: int) -> tuple[Tensor, Callable[[Tensor], object] | None]:
    """What `decode` gives of a micro-batch of `tokens`, for a neighbour that does not know how many more this stage has computed."""
    hidden_TH, back = decode()
    computed = len(hidden_TH)
    if computed == tokens or back is None:
        return hidden_TH[:tokens], back
    return hidden_TH[:tokens], lambda dhidden_TH: back(pad_to(dhidden_TH, computed))


def stage_of(decoder_layers: Sequence[nn.Module], model: nn.Module, layers: LayerRange) -> Stage:
    """The stage that has `layers` of a model's `decoder_layers`."""
    names = {module: dotted for dotted, module in model.named_modules()}
    return Stage(layers, tuple(names[decoder_layers[number]] for number in range(layers.first, layers.stop)), StageInput())
