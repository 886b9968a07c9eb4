"""One micro-batch as tensors: samples one after another without padding between them, and whose tokens are whose."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tlora.kernels.device import to_device
from tlora.kernels.dropout import token_keys

_TOKEN_SCALE = 16.0
"""By which `grad_scale` scales the gradient of one token's loss, at most. float16 loses digits below 6e-5 and overflows above 65,504. For a
mean over 4,096 tokens it is the scale that GradScaler begins with, 65,536."""
LONGEST_PADDING = 512  # tokens of a piece: attention within longer ones would cost more than tokens do


@dataclass(frozen=True)
class BatchRow:
    """One unit of one job: a sample, or the sequences that an objective takes together (`tlora.objectives`).

    `input_ids` int [L]; `loss_weights` [L], the weight of each token as a target (the first is never one). The gradient of the
    unit's loss is divided by `normalizer`: the sum of weights of the job's whole global batch or, with an objective, its units.
    `dropout_key` is (job seed, optimizer step, sample): set it for training, leave it out for evaluation. `lengths` are the tokens
    of each sequence; none means one sequence.
    """

    job_id: str
    input_ids: np.ndarray
    loss_weights: np.ndarray
    normalizer: float = 1.0
    dropout_key: tuple[int, int, int] | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True)
class TokenSpan:
    """Tokens `t0:t1` belong to `job_id`, and `labelled[n0:n1]` of the batch are those of them that are trained.

    `lengths` are the tokens of each of its sequences, of which `sequences` make one unit. `has_keys` when its rows bring dropout keys.
    `grad_scale` is a power of two by which its gradients can be scaled where small numbers would be lost: it follows from the normalizer of
    its rows alone, and so from its global batch.
    """

    job_id: str
    t0: int
    lengths: tuple[int, ...]
    has_keys: bool = False
    sequences: int = 1
    n0: int = 0
    n1: int = 0
    grad_scale: float = 1.0

    @property
    def t1(self) -> int:
        return self.t0 + sum(self.lengths)


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of several samples. `labels_T` is the next token of the same sample; the position's weight is 0 where there is none.

    `grad_weights_T` are the weights divided by each job's normalizer. Tokens past the last span are padding: `lengths` has it in pieces of
    at most `LONGEST_PADDING`, all of it at position 0, which no base's embedding of positions lacks. The batch may be padded further, up
    to `most_tokens`, where that makes it faster; not where they are fewer than its own.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    labels_T: Tensor
    loss_weights_T: Tensor
    grad_weights_T: Tensor
    labelled: Tensor  # indices of positions with a weight
    lengths: tuple[int, ...]
    spans: tuple[TokenSpan, ...]
    keys_T: Tensor | None
    most_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].t1 if self.spans else 0

    def padded_lengths(self, total: int) -> tuple[int, ...]:
        """`lengths` of this batch with padding up to `total` tokens."""
        own = tuple(length for span in self.spans for length in span.lengths)
        return *own, *_pieces(total - self.num_tokens)

    def padded(self, total: int) -> PackedBatch:
        """This batch with padding up to `total` tokens, at least as many as it has. Does not wait for the device."""
        more = total - len(self.input_ids_T)
        ids_T, positions_T, labels_T, weights_T, grad_weights_T = (
            functional.pad(values_T, (0, more))
            for values_T in (self.input_ids_T, self.position_ids_T, self.labels_T, self.loss_weights_T, self.grad_weights_T)
        )
        return replace(
            self,
            input_ids_T=ids_T,
            position_ids_T=positions_T,
            labels_T=labels_T,
            loss_weights_T=weights_T,
            grad_weights_T=grad_weights_T,
            lengths=self.padded_lengths(total),
            keys_T=None if self.keys_T is None else functional.pad(self.keys_T, (0, more)),
        )

    def with_scaled_gradients(self) -> PackedBatch:
        """This batch with each job's gradients scaled by its `grad_scale`."""
        scaled_T = self.grad_weights_T.clone()
        for span in self.spans:
            scaled_T[span.t0 : span.t1] *= span.grad_scale
        return replace(self, grad_weights_T=scaled_T)

    def units(self) -> Iterator[PackedBatch]:
        """Each unit as a batch of its own, in order. Waits for the device."""
        return self._each(lambda span: span.sequences)

    def sequences(self) -> Iterator[PackedBatch]:
        """Each sequence of the units, likewise."""
        return self._each(lambda _: 1)

    def _each(self, count_of: Callable[[TokenSpan], int]) -> Iterator[PackedBatch]:
        for span in self.spans:
            start, count = span.t0, count_of(span)
            for first in range(0, len(span.lengths), count):
                lengths = span.lengths[first : first + count]
                cut = slice(start, start + sum(lengths))
                labelled = self.loss_weights_T[cut].nonzero().squeeze(1)
                own = replace(span, t0=0, lengths=lengths, n0=0, n1=len(labelled))
                yield self._cut([cut], labelled, lengths, (own,))
                start = cut.stop

    def only(self, job_ids: Collection[str]) -> PackedBatch:
        """The tokens of these jobs, without padding."""
        spans: list[TokenSpan] = []
        labelled: list[Tensor] = []
        end, last = 0, 0
        kept = [span for span in self.spans if span.job_id in job_ids]
        for span in kept:
            labelled.append(self.labelled[span.n0 : span.n1] + (end - span.t0))
            spans.append(replace(span, t0=end, n0=last, n1=last + span.n1 - span.n0))
            end, last = spans[-1].t1, spans[-1].n1
        lengths = tuple(length for span in kept for length in span.lengths)
        return self._cut([slice(span.t0, span.t1) for span in kept], torch.cat(labelled), lengths, tuple(spans))

    def _cut(self, cuts: list[slice], labelled: Tensor, lengths: tuple[int, ...], spans: tuple[TokenSpan, ...]) -> PackedBatch:
        return PackedBatch(
            input_ids_T=_join(self.input_ids_T, cuts),
            position_ids_T=_join(self.position_ids_T, cuts),
            labels_T=_join(self.labels_T, cuts),
            loss_weights_T=_join(self.loss_weights_T, cuts),
            grad_weights_T=_join(self.grad_weights_T, cuts),
            labelled=labelled,
            lengths=lengths,
            spans=spans,
            keys_T=None if self.keys_T is None else _join(self.keys_T, cuts),
        )


def grad_scale(normalizer: float) -> float:
    """The largest power of two below or at `_TOKEN_SCALE` times `normalizer`."""
    return math.ldexp(_TOKEN_SCALE, math.frexp(normalizer)[1] - 1)


def _join(values_T: Tensor, cuts: list[slice]) -> Tensor:
    return torch.cat([values_T[cut] for cut in cuts])


def _pieces(padding: int) -> list[int]:
    """Lengths of the sequences that make up so many tokens of padding."""
    whole, rest = divmod(padding, LONGEST_PADDING)
    return [LONGEST_PADDING] * whole + [rest] * (rest > 0)


def collate(rows: Sequence[BatchRow], device: torch.device | str = "cpu", pad_to: int = 0, most_tokens: int = 0) -> PackedBatch:
    """Pack `rows` (a job's rows adjacent) into one batch of max(their tokens, `pad_to`) tokens on `device`. `most_tokens`: see
    `PackedBatch`.
    """
    lengths: list[int] = []
    used = sum(len(row.input_ids) for row in rows)
    total = max(used, pad_to)
    place = torch.device(device)
    ids, positions, labels = (np.zeros(total, np.int64) for _ in range(3))
    weights, grad_weights = np.zeros(total), np.zeros(total)
    keys = np.zeros(total, np.int32) if any(row.dropout_key for row in rows) else None
    spans: list[TokenSpan] = []
    start = 0
    for row in rows:
        length, own = len(row.input_ids), row.lengths or (len(row.input_ids),)
        assert min(own) > 0 and sum(own) == length and row.normalizer > 0, f"a row of {row.job_id}: {own} tokens, {row.normalizer=}"
        end, first = start + length, start
        for count in own:
            last = first + count
            positions[first:last] = np.arange(count)
            labels[first : last - 1] = row.input_ids[first - start + 1 : last - start]
            weights[first : last - 1] = row.loss_weights[first - start + 1 : last - start]
            first = last
        ids[start:end], grad_weights[start:end] = row.input_ids, weights[start:end] / row.normalizer
        lengths += own
        if keys is not None and row.dropout_key:
            keys[start:end] = token_keys(*row.dropout_key, length)
        has_keys = row.dropout_key is not None
        if spans and spans[-1].job_id == row.job_id:
            assert spans[-1].has_keys == has_keys, f"some rows of {row.job_id} have a dropout key and some have none"
            assert spans[-1].sequences == len(own), f"rows of {row.job_id} have {len(own)} sequences, and {spans[-1].sequences}"
            scale = min(spans[-1].grad_scale, grad_scale(row.normalizer))
            spans[-1] = replace(spans[-1], lengths=(*spans[-1].lengths, *own), grad_scale=scale)
        else:
            assert all(s.job_id != row.job_id for s in spans), f"rows of {row.job_id} are not adjacent"
            spans.append(TokenSpan(row.job_id, start, own, has_keys, len(own), grad_scale=grad_scale(row.normalizer)))
        start = end
    labelled = weights.nonzero()[0]
    spans = [replace(s, n0=int(np.searchsorted(labelled, s.t0)), n1=int(np.searchsorted(labelled, s.t1))) for s in spans]
    lengths += _pieces(total - used)
    return PackedBatch(
        input_ids_T=to_device(ids, place),
        position_ids_T=to_device(positions, place),
        labels_T=to_device(labels, place),
        loss_weights_T=to_device(weights, place),
        grad_weights_T=to_device(grad_weights, place),
        labelled=to_device(labelled, place),
        lengths=tuple(lengths),
        spans=tuple(spans),
        keys_T=None if keys is None else to_device(keys, place),
        most_tokens=most_tokens,
    )
