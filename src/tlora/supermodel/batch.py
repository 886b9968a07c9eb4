"""One micro-batch as tensors: samples one after another without padding between them, and whose tokens are whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tlora.kernels.device import to_device
from tlora.kernels.dropout import token_keys


@dataclass(frozen=True)
class BatchRow:
    """One sample of one job.

    `input_ids` int [L]; `loss_weights` [L], the weight of each token as a target (the first is never one). The gradient of the
    sample's summed loss is divided by `normalizer`, the job's weight over its whole global batch. `dropout_key` is
    (job seed, optimizer step, sample): set it for training, leave it out for evaluation.
    """

    job_id: str
    input_ids: np.ndarray
    loss_weights: np.ndarray
    normalizer: float = 1.0
    dropout_key: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Span:
    """Tokens `t0:t1` belong to `job_id`; `has_keys` when its rows bring dropout keys."""

    job_id: str
    t0: int
    t1: int
    has_keys: bool = False


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of several samples. `labels_T` is the next token of the same sample; the position's weight is 0 where there is none.

    `grad_weights_T` are the weights divided by each job's normalizer. Tokens past the last span are padding.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    labels_T: Tensor
    loss_weights_T: Tensor
    grad_weights_T: Tensor
    labelled: Tensor  # indices of positions with a weight
    lengths: tuple[int, ...]
    spans: tuple[Span, ...]
    keys_T: Tensor | None

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].t1 if self.spans else 0

    def rows(self) -> Iterator[PackedBatch]:
        """Each sample as a batch of its own, in order."""
        start, span = 0, 0
        for length in self.lengths:
            if start >= self.num_tokens:
                return
            while self.spans[span].t1 <= start:
                span += 1
            cut = slice(start, start + length)
            weights = self.loss_weights_T[cut].clone()
            yield PackedBatch(
                input_ids_T=self.input_ids_T[cut].clone(),
                position_ids_T=self.position_ids_T[cut].clone(),
                labels_T=self.labels_T[cut].clone(),
                loss_weights_T=weights,
                grad_weights_T=self.grad_weights_T[cut].clone(),
                labelled=weights.nonzero().squeeze(1),
                lengths=(length,),
                spans=(replace(self.spans[span], t0=0, t1=length),),
                keys_T=None if self.keys_T is None else self.keys_T[cut].clone(),
            )
            start += length


def collate(rows: Sequence[BatchRow], device: torch.device | str = "cpu", pad_to: int = 0) -> PackedBatch:
    """Pack `rows` (a job's rows adjacent) into one batch of max(their tokens, `pad_to`) tokens on `device`."""
    lengths = [len(row.input_ids) for row in rows]
    used = sum(lengths)
    total = max(used, pad_to)
    place = torch.device(device)
    ids, positions, labels = (np.zeros(total, np.int64) for _ in range(3))
    weights, grad_weights = np.zeros(total), np.zeros(total)
    keys = np.zeros(total, np.int32) if any(row.dropout_key for row in rows) else None
    spans: list[Span] = []
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        assert length > 0 and row.normalizer > 0, f"a row of {row.job_id} has {length} tokens and normalizer {row.normalizer}"
        end = start + length
        ids[start:end], positions[start:end] = row.input_ids, np.arange(length)
        labels[start : end - 1], weights[start : end - 1] = row.input_ids[1:], row.loss_weights[1:]
        grad_weights[start:end] = weights[start:end] / row.normalizer
        if keys is not None and row.dropout_key:
            keys[start:end] = token_keys(*row.dropout_key, length)
        has_keys = row.dropout_key is not None
        if spans and spans[-1].job_id == row.job_id:
            assert spans[-1].has_keys == has_keys, f"some rows of {row.job_id} have a dropout key and some have none"
            spans[-1] = replace(spans[-1], t1=end)
        else:
            assert all(s.job_id != row.job_id for s in spans), f"rows of {row.job_id} are not adjacent"
            spans.append(Span(row.job_id, start, end, has_keys))
        start = end
    if total > used:
        lengths.append(total - used)
        positions[used:] = np.arange(total - used)
    return PackedBatch(
        input_ids_T=to_device(ids, place),
        position_ids_T=to_device(positions, place),
        labels_T=to_device(labels, place),
        loss_weights_T=to_device(weights, place),
        grad_weights_T=to_device(grad_weights, place),
        labelled=to_device(weights.nonzero()[0], place),
        lengths=tuple(lengths),
        spans=tuple(spans),
        keys_T=None if keys is None else to_device(keys, place),
    )
