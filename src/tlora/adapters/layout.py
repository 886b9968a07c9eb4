"""Which module's A and B lie where in an adapter's flat vector. No tensors: plans that load no torch count by it too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from tlora.adapter_shape import ExpertSize, LoraShape

_Tensor = TypeVar("_Tensor")


@dataclass(frozen=True)
class AdapterShape:
    """One adapted linear: its dotted name in the base, rank, in and out features, and scale (alpha/r or alpha/sqrt(r)).

    With `tokens` it is an embedding instead: these rows of it are A, one a rank, and B has no columns.
    Of a parameter of several `experts` it is each expert's; rows of one expert lie one after another.
    """

    module: str
    rank: int
    in_features: int
    out_features: int
    scale: float
    tokens: tuple[int, ...] = ()
    experts: int = 1

    @property
    def rows(self) -> int:
        """Of A, and of B transposed, of all experts."""
        return self.rank * self.experts

    @property
    def numel(self) -> int:
        """Trainable parameters, of A and B."""
        return self.rows * (self.in_features + self.out_features)


@dataclass(frozen=True)
class AdapterLayout:
    """The flat vector of an adapter: for each module A [r, K], then B transposed [r, N]; of experts [E r, K] and [E r, N].

    `names`: literal names that mean these modules and no others of the base (`targets.saved_names`); none where the base is not known.
    `transposed`: whether the base's own layers hold their weights so, as GPT-2's `Conv1D`; A and B are as over any linear.
    """

    shapes: tuple[AdapterShape, ...]
    names: tuple[str, ...] = field(default=(), compare=False)
    transposed: bool = field(default=False, compare=False)

    @property
    def numel(self) -> int:
        """Trainable parameters."""
        return self._numel

    @cached_property
    def _numel(self) -> int:
        return sum(s.numel for s in self.shapes)

    @cached_property
    def largest_rank(self) -> int:
        return max((s.rank for s in self.linears), default=0)

    @property
    def linears(self) -> tuple[AdapterShape, ...]:
        """Without embeddings."""
        return tuple(s for s in self.shapes if not s.tokens)

    @cached_property
    def adapts_experts(self) -> bool:
        return any(s.experts > 1 for s in self.shapes)

    def views(self, flat: _Tensor) -> Iterator[tuple[AdapterShape, _Tensor, _Tensor]]:
        """Each module's (shape, A [rows, K], B transposed [rows, N]) as views of the tensor `flat`."""
        at, numbers = 0, cast("Any", flat)
        for s in self.shapes:
            mid, end = at + s.rows * s.in_features, at + s.numel
            yield s, numbers[at:mid].view(s.rows, s.in_features), numbers[mid:end].view(s.rows, s.out_features)
            at = end


def make_layout(
    lora: LoraShape, targets: Mapping[str, tuple[int, int] | ExpertSize], names: tuple[str, ...] = (), transposed: bool = False
) -> AdapterLayout:
    """Layout of `lora` over `targets`: module name -> (in features, out features), in the model's order."""
    return AdapterLayout(tuple(_shape_at(lora, name, size) for name, size in targets.items()), names, transposed)


def _shape_at(lora: LoraShape, name: str, size: tuple[int, int] | ExpertSize) -> AdapterShape:
    experts, per_token = (size.experts, max(1, size.per_token)) if isinstance(size, ExpertSize) else (1, 1)
    return AdapterShape(name, lora.rank_of(name, per_token), size[0], size[1], lora.scale_of(name, per_token), experts=experts)
