"""One adapter as flat vectors: which module's A and B lie where, and the state that training carries from step to step.

Flat, because norm, clipping, AdamW, checkpoint and all-reduce of one job are then one operation each. No layers, no files here.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tlora.adapter_shape import ExpertSize
from tlora.job import LoraConfig

_LARGE, _DRAWERS = 1 << 22, 16  # parameters; one thread draws 50 million a second


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

    def views(self, flat: Tensor) -> Iterator[tuple[AdapterShape, Tensor, Tensor]]:
        """Each module's (shape, A [rows, K], B transposed [rows, N]) as views of `flat`."""
        at = 0
        for s in self.shapes:
            mid, end = at + s.rows * s.in_features, at + s.numel
            yield s, flat[at:mid].view(s.rows, s.in_features), flat[mid:end].view(s.rows, s.out_features)
            at = end


def make_layout(
    lora: LoraConfig, targets: Mapping[str, tuple[int, int] | ExpertSize], names: tuple[str, ...] = (), transposed: bool = False
) -> AdapterLayout:
    """Layout of `lora` over `targets`: module name -> (in features, out features), in the model's order."""
    return AdapterLayout(tuple(_shape_at(lora, name, size) for name, size in targets.items()), names, transposed)


def _shape_at(lora: LoraConfig, name: str, size: tuple[int, int] | ExpertSize) -> AdapterShape:
    experts, per_token = (size.experts, max(1, size.per_token)) if isinstance(size, ExpertSize) else (1, 1)
    return AdapterShape(name, lora.rank_of(name, per_token), size[0], size[1], lora.scale_of(name, per_token), experts=experts)


@dataclass
class AdapterState:
    """Weights and optimizer state of one adapter, in full precision and flat.

    `step` counts global batches (the schedule's position), `updates` the AdamW updates among them: a step whose gradient was not
    finite counts in the first only, and `skipped` counts how many of those came in a row.
    """

    layout: AdapterLayout
    params: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int = 0
    updates: int = 0
    skipped: int = 0

    def clone(self) -> AdapterState:
        return replace(self, params=self.params.clone(), exp_avg=self.exp_avg.clone(), exp_avg_sq=self.exp_avg_sq.clone())

    def to(self, device: torch.device) -> AdapterState:
        """This one where it is there already, else a copy. Moments that no update has changed yet are made there, not copied."""
        if self.params.device == device:
            return self
        params = self.params.to(device)
        if self.updates == 0:
            return replace(self, params=params, exp_avg=torch.zeros_like(params), exp_avg_sq=torch.zeros_like(params))
        return replace(self, params=params, exp_avg=self.exp_avg.to(device), exp_avg_sq=self.exp_avg_sq.to(device))

    def on_host(self, *, owned: bool = False) -> AdapterState:
        """In the host's memory: a copy, unless it is there already and `owned` by the caller alone. Waits for the device."""
        if owned and self.params.device.type == "cpu":
            return self
        params, exp_avg, exp_avg_sq = (_copy_to_host(t) for t in (self.params, self.exp_avg, self.exp_avg_sq))
        return replace(self, params=params, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)


def _copy_to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu")
    if tensor.device.type != "cpu":
        host.zero_()  # fresh pages are made by all threads; a copy from a device would make them by one
    return host.copy_(tensor)


def init_state(layout: AdapterLayout, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> AdapterState:
    """A fresh adapter as PEFT makes one: A uniform in ±1/sqrt(K) (Kaiming with a = sqrt 5), B zero.

    Each module draws from a generator of its own, keyed by seed and name: targets do not change each other's start, and a large adapter
    is drawn by several threads. Rows of an embedding are NaN until the base's own take their place (`supermodel/new_tokens.py`).
    """
    params = _zeros(layout.numel, dtype)

    def draw(module: tuple[AdapterShape, Tensor, Tensor]) -> None:
        shape, a_rK, _ = module
        if shape.tokens:
            a_rK.fill_(math.nan)
            return
        generator = torch.Generator().manual_seed(zlib.crc32(shape.module.encode(), seed))  # 32 bits are all that it takes in
        a_rK.copy_(torch.empty(a_rK.shape, dtype=torch.float32).uniform_(-1, 1, generator=generator).div_(math.sqrt(shape.in_features)))

    if layout.numel < _LARGE:
        for module in layout.views(params):
            draw(module)
    else:
        with ThreadPoolExecutor(_DRAWERS) as pool:
            list(pool.map(draw, layout.views(params)))
    return fresh_state(layout, params).to(torch.device(device))


def fresh_state(layout: AdapterLayout, params: Tensor) -> AdapterState:
    """An adapter on the host whose optimizer has not begun."""
    exp_avg, exp_avg_sq = (_zeros(layout.numel, params.dtype) for _ in range(2))
    return AdapterState(layout, params, exp_avg, exp_avg_sq)


def _zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Of the host, which takes memory where something else is written; torch.zeros writes its zeros, 12 bytes a parameter in all."""
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)
