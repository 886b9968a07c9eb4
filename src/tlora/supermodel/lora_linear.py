"""The linear that replaces each `nn.Linear` of the base, and the context through which it learns whose tokens it sees."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from tlora.adapters.bank import AdapterBank
from tlora.kernels.frozen import BaseWeights, FrozenLinear, FrozenWeight, PlainWeight, frozen_linear
from tlora.kernels.grouped_lora import ChunkedJobs, ChunkSlots, grouped_lora_linear, make_slots
from tlora.kernels.multi_lora import LoraWeights, multi_lora_linear
from tlora.kernels.reference import Segment, Segments
from tlora.sharing.layer_stream import LayerStream
from tlora.supermodel.batch import PackedBatch, TokenSpan
from tlora.supermodel.held_linear import HeldLinear

if TYPE_CHECKING:
    from tlora.kernels.expert_kernels import ExpertBatch  # brings triton, which not every CPU install has


def look_up_streamed(form: FrozenWeight, name: str, stream: LayerStream) -> FrozenWeight:
    """The weight `name`, of which `form` has no numbers, as it lies now."""
    shapes = form.tensors
    tensors = {key: tensor.view(shapes[key].shape) for key, tensor in stream.tensors(name).items()}
    return replace(form, **tensors)  # type: ignore[type-var]


class StreamedLinear(nn.Module):
    """The frozen linear `name`, whose weight is looked up each time it is read. The bias is held here.

    `form` is the weight on the meta device, and so are the parameters: shapes and dtypes alone.
    """

    def __init__(self, name: str, form: FrozenWeight, bias: Tensor | None, stream: LayerStream) -> None:
        super().__init__()
        for key, tensor in form.tensors.items():
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.out_features, self.in_features = form.shape
        self.form, self._name, self._stream = form, name, stream

    def look_up(self) -> FrozenLinear:
        """The linear as it lies now."""
        return FrozenLinear(look_up_streamed(self.form, self._name, self._stream), self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return frozen_linear(x, self.look_up)


BaseLinear = nn.Linear | HeldLinear | StreamedLinear
"""A linear of a base before it is adapted."""


@dataclass(frozen=True)
class ActiveBatch:
    """A batch in its forward: its tokens' owners, the base's weights, the bank (None: the base alone), and each job's dropout (empty in
    evaluation). `jobs`: their chunks, where adapters are grouped.
    """

    batch: PackedBatch
    weights: BaseWeights
    bank: AdapterBank | None
    dropout: Mapping[str, float]
    anchor: Tensor
    jobs: ChunkedJobs | None = None
    _slots: dict[Segments, ChunkSlots] = field(default_factory=dict)
    expert_batches: list[ExpertBatch] = field(default_factory=list)  # one, once a layer of experts on kernels has run

    def segments(self, module: str) -> Segments:
        """The batch as the linear `module` sees it; jobs that do not adapt it have no segment."""
        row_segments: list[Segment] = []
        for span in self.batch.spans if self.bank is not None else ():
            slot = self.bank.slot(span.job_id, module)  # type: ignore[union-attr]
            if slot is not None:
                rows, scale = slot
                row_segments.append(Segment(span.t0, span.t1, rows.start, rows.stop, scale, self.dropout.get(span.job_id, 0.0)))
        return tuple(row_segments)

    def slots(self, module: str, bank: AdapterBank) -> ChunkSlots | None:
        """The same of a grouped batch; None where no job adapts `module`. Most linears have their adapters at the same rows: one table."""
        assert self.jobs is not None, "the batch is not in chunks"
        segments: list[Segment] = []
        for span in self.batch.spans:
            rows, scale = bank.slot(span.job_id, module) or (range(0), 0.0)
            segments.append(Segment(span.t0, span.t1, rows.start, rows.stop, scale, self.dropout.get(span.job_id, 0.0) if rows else 0.0))
        if not any(segment.r1 for segment in segments):
            return None
        key = tuple(segments)
        if key not in self._slots:
            self._slots[key] = make_slots(self.jobs, key, bank.sum_dtype, self.batch.input_ids_T.device)
        return self._slots[key]


class ReadsTokens(Protocol):
    """Trained rows of the embedding (`new_tokens.TokenPass`), as the paths see them: they say how tokens are laid out."""

    spans: Sequence[TokenSpan]


class Context:
    """Whose forward or backward runs now, for all linears of one super-model: a batch on the plain path, or the number of a pass that
    runs on the kernels (`kernels/pass_operations.py`). With neither, a linear is the base's own.
    """

    def __init__(self) -> None:
        self.active: ActiveBatch | None = None
        self.pass_number: Tensor | None = None
        self.tokens: ReadsTokens | None = None

    @contextmanager
    def enter(self, active: ActiveBatch) -> Iterator[None]:
        before, self.active = self.active, active
        try:
            yield
        finally:
            self.active = before

    @contextmanager
    def enter_pass(self, number: Tensor) -> Iterator[None]:
        before, self.pass_number = self.pass_number, number
        try:
            yield
        finally:
            self.pass_number = before


class LinearsOfOneInput:
    """Linears that read the same x, as one product: the first one called computes for all, the others take their part.

    torch.compile sees one operation, and no part outlives the layer.
    """

    def __init__(self, widths: list[int], number: int) -> None:
        self.widths, self.number = widths, torch.tensor(number)
        self._parts: tuple[Tensor, ...] | None = None

    def part(self, x: Tensor, place: int, pass_number: Tensor) -> Tensor:
        if place == 0:
            x_TK = x.reshape(-1, x.shape[-1])
            parts = torch.ops.tlora.multi_lora_group(x_TK, self.widths, self.number, pass_number)
            self._parts = tuple(y_TN.view(*x.shape[:-1], -1) for y_TN in parts)
        assert self._parts is not None, "the linears that share an input were called in another order than when they were found"
        part = self._parts[place]
        if place == len(self.widths) - 1:
            self._parts = None
        return part


class LoraLinear(nn.Module):
    """A frozen linear plus the adapters of the batch whose pass runs now."""

    def __init__(self, linear: BaseLinear, name: str, context: Context) -> None:
        super().__init__()
        self.weight: nn.Parameter
        self.bias = linear.bias
        for key, parameter in linear.named_parameters(recurse=False):
            self.register_parameter(key, parameter)
        self._look_up, self._form = (None, None) if isinstance(linear, nn.Linear) else (linear.look_up, linear.form)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.name, self.module_key, self._context = name, zlib.crc32(name.encode()) & 0x7FFFFFFF, context
        self.shared: LinearsOfOneInput | None = None
        self.place = 0

    @property
    def frozen(self) -> FrozenLinear:
        """The base's linear as this module holds it, or as a shared base has it now."""
        return self._look_up() if self._look_up is not None else FrozenLinear(PlainWeight(self.weight), self.bias)

    @property
    def form(self) -> FrozenWeight:
        """The weight's form: shapes and dtypes, and where a shared base has it, no numbers."""
        return PlainWeight(self.weight) if self._form is None else self._form

    def forward(self, x: Tensor) -> Tensor:
        if self._context.pass_number is not None and self.shared is not None:
            return self.shared.part(x, self.place, self._context.pass_number)
        active = self._context.active
        if active is None:
            return nn.functional.linear(x, self.frozen.dense(x.dtype), self.bias)
        base = partial(active.weights, self.name)
        if active.bank is None:
            return frozen_linear(x, base)
        x_TK, keys_T, anchor = x.reshape(-1, self.in_features), active.batch.keys_T, active.anchor if torch.is_grad_enabled() else None
        if active.jobs is not None:
            slots = active.slots(self.name, active.bank)
            if slots is None:
                return frozen_linear(x, base)
            y_TN = grouped_lora_linear(x_TK, base, self._weights_in(active.bank), slots, keys_T, anchor)
        else:
            segments = active.segments(self.name)
            if not segments or self._sees_zeros(x_TK, active):
                return frozen_linear(x, base)
            y_TN = multi_lora_linear(x_TK, base, self._weights_in(active.bank), segments, keys_T, anchor)
        return y_TN.view(*x.shape[:-1], self.out_features)

    def _sees_zeros(self, x_TK: Tensor, active: ActiveBatch) -> bool:
        """Whether these are rows beside those of tokens, for which adapters give zeros (`one_by_one.py`)."""
        return len(x_TK) != len(active.batch.input_ids_T) and (x_TK.is_meta or not bool(x_TK.any()))

    def _weights_in(self, bank: AdapterBank) -> LoraWeights:
        rows = bank.linear(self.name)
        return LoraWeights(rows.a_RK, rows.b_RN, rows.da_RK, rows.db_RN, self.module_key)


def base_weights(linears: Mapping[str, LoraLinear]) -> BaseWeights:
    """Each linear's weights where the model's modules hold or find them."""
    return lambda name: linears[name].frozen
