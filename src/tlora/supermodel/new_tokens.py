"""Rows of the input embedding that jobs train, each its own: PEFT's `trainable_token_indices` over one frozen embedding.

A job's rows lie in the bank like the A of a linear whose B has no columns. They take the place of the base's rows, in the embedding and,
where that is tied to it, in the output head, as in PEFT's `TrainableTokensLayer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tlora.adapters.bank import AdapterBank
from tlora.adapters.layout import AdapterLayout, AdapterShape
from tlora.adapters.state import AdapterState
from tlora.adapters.targets import token_rows
from tlora.errors import ConfigError, ModelError
from tlora.job import LoraConfig
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.head import Head
from tlora.supermodel.batch import PackedBatch, TokenSpan
from tlora.supermodel.load import Base
from tlora.supermodel.lora_linear import Context
from tlora.supermodel.text_model import output_embeddings


class NewTokens:
    """The trained rows of all jobs over one base. A forward hook of its embedding puts them in."""

    def __init__(self, base: Base, context: Context) -> None:
        self._model, self._module = base.model, base.model.get_input_embeddings()
        self._head, self._staged, self._context = base.head, base.stage is not None, context
        self.name, self._weight = find_embedding(base.model)
        self.is_tied = self._weight is not None and self._weight is output_embeddings(base.model).weight
        self._anchor = torch.zeros((), device=base.head.weight_VH.device, requires_grad=True)
        self._module.register_forward_hook(self._replace)

    @property
    def size(self) -> tuple[int, int]:
        """Rows and width of the embedding; zeros where it is no plain one."""
        return (0, 0) if self._weight is None else (self._weight.shape[0], self._weight.shape[1])

    def shape(self, lora: LoraConfig) -> tuple[AdapterShape, ...]:
        """What `lora` trains here, as the last part of its layout. Raises ModelError for ids that the embedding lacks, and ConfigError for
        a base in stages.
        """
        if self._staged and lora.trainable_token_indices:
            raise ConfigError(
                "trainable_token_indices needs the embedding and the head in one place, and this base is in stages. Set layout: shared"
            )
        shapes = row_shapes(self._model, lora)
        if not shapes:
            return ()
        if self._weight is not None and self._weight.device.type != "meta":
            self._check_lookup(shapes[0].tokens)
        return shapes

    @torch.no_grad()
    def _check_lookup(self, tokens: tuple[int, ...]) -> None:
        ids = torch.tensor(tokens, device=self._anchor.device)
        if not torch.equal(self._module(ids[None])[0], self._scaled(self._base_rows(ids))):
            raise ModelError(
                f"{type(self._module).__name__} does more than look rows up, so trainable_token_indices has no meaning for this base. "
                "Take it out"
            )

    def _base_rows(self, ids: Tensor) -> Tensor:
        assert self._weight is not None
        return self._weight.detach().index_select(0, ids)

    def _scaled(self, rows_H: Tensor) -> Tensor:
        scale = getattr(self._module, "embed_scale", None)
        return rows_H if scale is None else rows_H * torch.as_tensor(scale).to(rows_H)

    def fill(self, state: AdapterState) -> None:
        """Start a fresh adapter from the base's rows: `init_state` has left NaN in their place."""
        for shape, rows_nH, _ in state.layout.views(state.params):
            if shape.tokens and bool(rows_nH.isnan().all()):
                rows_nH.copy_(self._base_rows(torch.tensor(shape.tokens, device=self._anchor.device)))

    def begin(self, part: PackedBatch, bank: AdapterBank | None) -> TokenPass | None:
        """What a pass over `part` replaces; None where no job of it trains rows."""
        if bank is None:
            return None
        shapes = {span.job_id: bank.shape_at(span.job_id, self.name) for span in part.spans}
        found = {job_id: self._rows(bank, job_id, shape) for job_id, shape in shapes.items() if shape is not None}
        return TokenPass(self, found, part.spans) if found else None

    def _rows(self, bank: AdapterBank, job_id: str, shape: AdapterShape) -> TokenRows:
        linear, slot = bank.linear(self.name), bank.slot(job_id, self.name)
        assert slot is not None
        own = slice(slot[0].start, slot[0].stop)
        ids, order = torch.tensor(shape.tokens, device=self._anchor.device).sort()
        return TokenRows(ids, order, linear.a_RK[own], linear.da_RK[own])

    @contextmanager
    def reading(self, tokens: TokenPass | None) -> Iterator[None]:
        """Let the embedding read the rows of `tokens`."""
        before, self._context.tokens = self._context.tokens, tokens
        try:
            yield
        finally:
            self._context.tokens = before

    def _replace(self, _module: object, args: tuple[Any, ...], embedded: Tensor) -> Tensor | None:
        tokens = self._context.tokens
        if not isinstance(tokens, TokenPass):
            return None
        return _Replaced.apply(embedded, args[0], self._anchor, tokens)  # type: ignore[no-any-return]

    @contextmanager
    def in_head(self, rows: TokenRows | None) -> Iterator[None]:
        """Put `rows` into the head that is tied to the embedding, in place: a copy of it with them would take as much memory again."""
        if rows is None or not self.is_tied:
            yield
            return
        assert self._weight is not None
        with rows_in(self._weight, rows.tokens, rows.rows_nH):
            yield

    def row_slopes(self, rows: TokenRows, hidden_tH: Tensor, losses_t: Tensor, labels_t: Tensor, weights_t: Tensor) -> Tensor:
        """d(sum of weights * losses)/d(logits of the rows before scale and cap) [t, n], while they are in the head."""
        head, ids = self._head, rows.tokens
        z_tn = Head(lambda: FrozenLinear(PlainWeight(rows.rows_nH), None), head.scale, head.softcap).logits(hidden_tH)
        target_t = (hidden_tH * self._base_rows(labels_t)).sum(1, dtype=z_tn.dtype)
        target_t = target_t.to(hidden_tH.dtype).to(z_tn.dtype) * head.scale
        target_t = torch.tanh(target_t / head.softcap) * head.softcap if head.softcap else target_t
        slopes_tn = (z_tn - (losses_t.to(z_tn.dtype) + target_t)[:, None]).exp() - (labels_t[:, None] == ids[None, :]).to(z_tn.dtype)
        if head.softcap:
            slopes_tn *= 1 - (z_tn / head.softcap).square()
        return slopes_tn * (weights_t * head.scale)[:, None]


@dataclass(frozen=True)
class TokenRows:
    """A job's rows [n, H] in the bank with the sums of their gradients, and whose they are: `ids` sorted, `order` by id."""

    ids: Tensor
    order: Tensor
    rows_nH: Tensor
    sums_nH: Tensor

    @property
    def tokens(self) -> Tensor:
        """Ids [n] in the order of the rows."""
        return torch.empty_like(self.ids).index_copy_(0, self.order, self.ids)

    def find(self, ids_t: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each token, and whether it has one. Does not wait for the device."""
        place_t = torch.searchsorted(self.ids, ids_t).clamp_(max=len(self.ids) - 1)
        return self.order[place_t], self.ids[place_t] == ids_t


@dataclass
class TokenPass:
    """The rows that a pass reads, by job. `spans`: of the batch as it is laid out where the embedding sees it. `head_grads`: by job, the
    gradient of its rows in the head, unit by unit, for backward to add.
    """

    owner: NewTokens
    rows: dict[str, TokenRows]
    spans: Sequence[TokenSpan]
    head_grads: dict[str, list[Tensor]] = field(default_factory=dict)

    def changes_head(self, job_id: str) -> bool:
        """Whether the head of `job_id` is another one than the base's."""
        return self.owner.is_tied and job_id in self.rows

    def in_head(self, job_id: str) -> Any:
        """See `NewTokens.in_head`."""
        return self.owner.in_head(self.rows.get(job_id))

    def note_head(self, span: TokenSpan, part: PackedBatch, hidden_nH: Tensor, losses_n: Tensor, weights_n: Tensor) -> None:
        """Take the gradient of the head's rows at the labelled tokens of `span`, while they are in it. Each unit is summed by itself, so
        that bits do not depend on how a global batch is cut. Waits for the device.
        """
        rows, labelled = self.rows[span.job_id], part.labelled[span.n0 : span.n1]
        slopes_tn = self.owner.row_slopes(rows, hidden_nH, losses_n, part.labels_T[labelled], weights_n)
        ends = torch.tensor([stop for _, stop in _units(span)], device=labelled.device)
        counts = torch.searchsorted(labelled, ends).diff(prepend=torch.zeros_like(ends[:1])).tolist()
        sums_dtype, grads = rows.sums_nH.dtype, list[Tensor]()
        for slopes_un, hidden_uH in zip(slopes_tn.split(counts), hidden_nH.split(counts), strict=True):
            grads.append(slopes_un.to(sums_dtype).t() @ hidden_uH.to(sums_dtype))
        self.head_grads[span.job_id] = grads

    def add_gradients(self, ids_T: Tensor, spans: Sequence[TokenSpan], grad_TH: Tensor) -> None:
        """Add to each job's sums, unit by unit: what the head gave, then the tokens' gradients [T, H] one after another. `spans`: as the
        embedding saw them.
        """
        padding_idx = getattr(self.owner._module, "padding_idx", None)
        for span in spans:
            rows = self.rows.get(span.job_id)
            if rows is None:
                continue
            own, heads = slice(span.t0, span.t1), self.head_grads.pop(span.job_id, [])
            row_t, hit_t = rows.find(ids_T[own])
            if padding_idx is not None:
                hit_t = hit_t & (ids_T[own] != padding_idx)  # torch gives this row no gradient
            grad_tH = torch.where(hit_t[:, None], self.owner._scaled(grad_TH[own]), 0).to(rows.sums_nH.dtype)
            for number, (start, stop) in enumerate(_units(span)):
                if number < len(heads):
                    rows.sums_nH.add_(heads[number])
                unit = slice(start - span.t0, stop - span.t0)
                _add_rows(rows.sums_nH, row_t[unit], grad_tH[unit])


def _units(span: TokenSpan) -> list[tuple[int, int]]:
    """Where the tokens of each unit begin and end."""
    units: list[tuple[int, int]] = []
    start = span.t0
    for first in range(0, len(span.lengths), span.sequences):
        stop = start + sum(span.lengths[first : first + span.sequences])
        units.append((start, stop))
        start = stop
    return units


def _add_rows(sums_nH: Tensor, row_t: Tensor, grad_tH: Tensor) -> None:
    """sums[row[t]] += grad[t], in the order of t: index_add_ is sequential on a CPU and atomic on a GPU, where index_put_ sorts."""
    if sums_nH.device.type == "cuda":
        sums_nH.index_put_((row_t,), grad_tH, accumulate=True)
    else:
        sums_nH.index_add_(0, row_t, grad_tH)


class _Replaced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embedded: Tensor, ids: Tensor, anchor: Tensor, tokens: TokenPass) -> Tensor:
        del anchor  # it lets backward come here, though nothing before needs a gradient
        ctx.tokens, ctx.ids_T, ctx.spans = tokens, ids.reshape(-1), tokens.spans
        out = embedded.clone()
        flat_TH = out.view(-1, out.shape[-1])
        for span in tokens.spans:
            rows = tokens.rows.get(span.job_id)
            if rows is not None:
                row_t, hit_t = rows.find(ctx.ids_T[span.t0 : span.t1])
                own_tH = tokens.owner._scaled(rows.rows_nH)[row_t]
                flat_TH[span.t0 : span.t1] = torch.where(hit_t[:, None], own_tH, flat_TH[span.t0 : span.t1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.tokens.add_gradients(ctx.ids_T, ctx.spans, grad.reshape(-1, grad.shape[-1]))
        return None, None, None, None


def find_embedding(model: Any) -> tuple[str, Tensor | None]:
    """The dotted name of a model's input embedding, and its weight [V, H]; None where it is no plain one."""
    embedding = model.get_input_embeddings()
    weight = getattr(embedding, "weight", None)
    name = next(name for name, module in model.named_modules() if module is embedding)
    return name, weight if isinstance(weight, Tensor) and weight.ndim == 2 else None


def row_shapes(model: Any, lora: LoraConfig) -> tuple[AdapterShape, ...]:
    """The rows of a model's input embedding that `lora` trains, as one shape, or none. Raises ModelError."""
    name, weight = find_embedding(model)
    tokens = token_rows(lora, name, 0 if weight is None else weight.shape[0])
    if tokens and weight is None:
        raise ModelError(f"trainable_token_indices: {name} is no plain embedding, whose rows could be trained. Take it out")
    head = output_embeddings(model)
    if tokens and head is not None and head.weight is weight and getattr(head, "bias", None) is not None:
        raise ModelError(
            "trainable_token_indices: this base's head is tied to the embedding and has a bias, which PEFT leaves out where rows of a tied "
            "head are trained, so the adapter would answer otherwise there. Take it out"
        )
    return (AdapterShape(name, len(tokens), weight.shape[1], 0, 1.0, tokens),) if tokens and weight is not None else ()


@contextmanager
def rows_in(weight_VH: Tensor, ids_n: Tensor, rows_nH: Tensor) -> Iterator[None]:
    """Let the frozen weight have other rows meanwhile."""
    weight_VH = weight_VH.data
    before_nH = weight_VH.index_select(0, ids_n)
    weight_VH.index_copy_(0, ids_n, rows_nH.to(weight_VH))
    try:
        yield
    finally:
        weight_VH.index_copy_(0, ids_n, before_nH)


def with_rows(layout: AdapterLayout, rows: tuple[AdapterShape, ...]) -> AdapterLayout:
    """`layout` with trained rows behind its linears."""
    return replace(layout, shapes=(*layout.shapes, *rows))
