"""Passes over a base without kernels of our own: what a CPU runs, and every GPU that the fused kernels do not serve (`fast_path.py`).

On a CPU, and wherever bits must repeat, adapters and attention go run by run, as `kernels/reference.py` specifies them. On a GPU all
of them are grouped: the tokens are laid out in chunks of one job each (`kernels/grouped_lora.py`), and attention takes all samples in
one call (`kernels/library_attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tlora.adapters.bank import AdapterBank
from tlora.kernels.device import to_device
from tlora.kernels.frozen import BaseWeights
from tlora.kernels.grouped_lora import ChunkedJobs, chunk_jobs
from tlora.kernels.library_attention import lay_out_samples
from tlora.supermodel.batch import PackedBatch, TokenSpan
from tlora.supermodel.load import Base, hidden_states
from tlora.supermodel.lora_linear import ActiveBatch, Context


def groups_on(device: torch.device, deterministic: bool) -> bool:
    """Whether passes on `device` are grouped. A deterministic one has a unit of one job at a time: there is nothing to group."""
    return device.type != "cpu" and not deterministic


class PlainPath:
    """The passes of one base. With `grouped` the number of operator calls does not depend on jobs or samples. In a stage they are not: they
    would lay tokens out anew, which hidden states of another stage do not.
    """

    def __init__(self, base: Base, context: Context, deterministic: bool) -> None:
        self._base, self._context = base, context
        device = base.head.weight_VH.device
        self.grouped = base.stage is None and not base.why_one_by_one and groups_on(device, deterministic)
        self._repeatable = deterministic and device.type == "cuda"
        self._anchor = torch.zeros((), device=device, requires_grad=True)

    def decode(
        self, batch: PackedBatch, weights: BaseWeights, bank: AdapterBank | None, dropout: Mapping[str, float], train: bool
    ) -> tuple[Tensor, Callable[[Tensor], object] | None]:
        """Hidden states [T, H] of `batch`, without its padding where passes are grouped, and in training what takes their gradient back."""
        if self._base.why_one_by_one and len(batch.lengths) > 1:
            return _joined([self.decode(each, weights, bank, dropout, train) for each in batch.sequences()])
        chunked = chunk(batch, batch.input_ids_T.device) if self.grouped else None
        active = ActiveBatch(chunked.batch if chunked else batch, weights, bank, dropout, self._anchor, chunked and chunked.jobs)
        packed_batch = active.batch
        if self._context.tokens is not None:
            self._context.tokens.spans = packed_batch.spans
        samples = lay_out_samples(packed_batch.lengths, packed_batch.input_ids_T.device) if chunked else packed_batch.lengths
        with self._context.enter(active), self._repeatable_attention(), torch.set_grad_enabled(train):
            hidden_TH = hidden_states(self._base, packed_batch.input_ids_T, packed_batch.position_ids_T, samples)
        backward = hidden_TH.backward if hidden_TH.requires_grad else None
        if chunked is None or (places := chunked.places) is None:
            return hidden_TH.detach(), backward
        own_TH = hidden_TH.detach().index_select(0, places)

        def backward_of_own(dhidden_TH: Tensor) -> None:
            hidden_TH.backward(torch.zeros_like(hidden_TH).index_copy_(0, places, dhidden_TH))

        return own_TH, None if backward is None else backward_of_own

    def _repeatable_attention(self) -> AbstractContextManager[object]:
        """On a GPU the library's kernels sum dQ in any order, and bits differ from run to run: deterministic mode takes the plain one."""
        return sdpa_kernel(SDPBackend.MATH) if self._repeatable else nullcontext()


def _joined(passes: Sequence[tuple[Tensor, Callable[[Tensor], object] | None]]) -> tuple[Tensor, Callable[[Tensor], object] | None]:
    """Several passes as one over the tokens of all."""
    hidden_TH = torch.cat([each_TH for each_TH, _ in passes])

    def backward(dhidden_TH: Tensor) -> None:
        for part_TH, (_, back) in zip(dhidden_TH.split([len(each_TH) for each_TH, _ in passes]), passes, strict=True):
            if back is not None:
                back(part_TH)

    return hidden_TH, backward if any(back for _, back in passes) else None


@dataclass(frozen=True)
class ChunkedBatch:
    """A batch whose jobs' tokens are whole chunks. `places` int64 [T]: where the tokens of the batch before lie; None: where they were."""

    batch: PackedBatch
    jobs: ChunkedJobs
    places: Tensor | None


def chunk(batch: PackedBatch, device: torch.device) -> ChunkedBatch:
    """`batch` without its padding, and each job filled up to whole chunks by its own first tokens over again: nothing is computed there
    that the job's own tokens do not compute. Does not wait for the device.
    """
    tokens = [span.t1 - span.t0 for span in batch.spans]
    jobs = chunk_jobs(tokens)
    sizes = [count * jobs.size for count in jobs.counts]
    starts = [0, *accumulate(sizes)][:-1]
    spans = tuple(
        replace(span, t0=start, lengths=_filled(span.lengths, size)) for span, start, size in zip(batch.spans, starts, sizes, strict=True)
    )
    if sizes == tokens:
        return ChunkedBatch(_selected(batch, spans, None), jobs, None)
    source = np.concatenate([span.t0 + np.arange(size) % count for span, size, count in zip(batch.spans, sizes, tokens, strict=True)])
    places = np.concatenate([start + np.arange(count) for start, count in zip(starts, tokens, strict=True)])
    return ChunkedBatch(_selected(batch, spans, to_device(source, device)), jobs, to_device(places, device))


def _filled(lengths: tuple[int, ...], size: int) -> tuple[int, ...]:
    """`lengths` and the first of them again, the last one cut, up to `size` tokens."""
    filled, missing, i = list(lengths), size - sum(lengths), 0
    while missing > 0:
        filled.append(min(lengths[i % len(lengths)], missing))
        missing, i = missing - filled[-1], i + 1
    return tuple(filled)


def _selected(batch: PackedBatch, spans: tuple[TokenSpan, ...], source: Tensor | None) -> PackedBatch:
    """What layers read of the tokens `source` (None: the first), in `spans`."""
    ids_T, positions_T, keys_T = (
        None if values_T is None else values_T[: batch.num_tokens] if source is None else values_T.index_select(0, source)
        for values_T in (batch.input_ids_T, batch.position_ids_T, batch.keys_T)
    )
    assert ids_T is not None and positions_T is not None
    lengths = tuple(length for span in spans for length in span.lengths)
    return replace(batch, input_ids_T=ids_T, position_ids_T=positions_T, keys_T=keys_T, lengths=lengths, spans=spans)
