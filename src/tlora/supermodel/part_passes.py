"""The passes of what is computed at once: through the decoder and the losses, and back. Behind the first stage of a base in stages hidden
states come from the stage before, and their gradient goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from tlora.adapters.bank import AdapterBank
from tlora.kernels.frozen import BaseWeights
from tlora.objectives import UnitLoss
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.experts import Experts
from tlora.supermodel.load import Base
from tlora.supermodel.losses import JobLoss, Losses, token_logprobs
from tlora.supermodel.new_tokens import NewTokens, TokenPass
from tlora.supermodel.stage import Upstream, decode_from

Back = Callable[[Tensor], object]
"""Takes the gradient [T, H] of hidden states back."""
Decode = Callable[[PackedBatch, BaseWeights, AdapterBank | None, Mapping[str, float], bool], tuple[Tensor, Back | None]]
"""As `PlainPath.decode`: a batch through the decoder."""


def by_targets(fast: Decode, plain: Decode, experts: Experts) -> Decode:
    """`fast`, but `plain` for a batch with a job that adapts experts, which no pass of `fast` computes. They may be the same."""
    if fast == plain:
        return plain

    def decode(
        part: PackedBatch, weights: BaseWeights, bank: AdapterBank | None, dropout: Mapping[str, float], train: bool
    ) -> tuple[Tensor, Back | None]:
        if bank is None or not experts.adapted_by(bank, part):
            return fast(part, weights, bank, dropout, train)
        experts.take_over(True)
        try:
            return plain(part, weights, bank, dropout, train)
        finally:
            experts.take_over(False)

    return decode


class PartPasses:
    """Over `base` with the adapters of `bank`; objectives compare with those of `references`. `dropout_of`: by job, in training.

    `upstream`: of a stage behind the first, where hidden states come from. `computed_tokens`: of all passes that trained or evaluated,
    padding included; not of those that an objective compares with.
    """

    def __init__(
        self,
        base: Base,
        decode: Decode,
        weights: BaseWeights,
        bank: AdapterBank,
        references: AdapterBank,
        dropout_of: Callable[[str], float],
        new_tokens: NewTokens,
    ) -> None:
        self._base, self._decoded, self.weights, self._dropout_of = base, decode, weights, dropout_of
        self._bank, self._references, self._new_tokens = bank, references, new_tokens
        self.upstream: Upstream | None = None
        self.computed_tokens = 0

    def forward(
        self, part: PackedBatch, objectives: Mapping[str, UnitLoss], train: bool
    ) -> tuple[dict[str, JobLoss], Callable[[], object] | None]:
        """Losses of `part`, and what adds its gradients to the sums."""
        if train and self._bank.dtype == torch.float16:
            part = part.with_scaled_gradients()
        reference, sum_dtype = self._reference_logprobs(part, objectives), self._bank.sum_dtype if train else None
        tokens = self._new_tokens.begin(part, self._bank)
        hidden_TH, back = self.of_stage(part, train, tokens)
        self.computed_tokens += len(hidden_TH)
        losses, dhidden_TH = Losses(part, self._base.head, objectives, reference, sum_dtype, tokens).of(hidden_TH)
        if self.upstream is not None and train and dhidden_TH is None:
            dhidden_TH = torch.zeros_like(hidden_TH)  # the stages before wait for one
        return losses, None if back is None or dhidden_TH is None else partial(back, dhidden_TH)

    def of_stage(self, part: PackedBatch, train: bool, tokens: TokenPass | None = None) -> tuple[Tensor, Back | None]:
        """Hidden states [T, H] of `part`, and in training what adds its gradients to the sums of the adapters here. `tokens`: what it reads
        of trained rows.
        """
        dropout = {span.job_id: self._dropout_of(span.job_id) for span in part.spans if train and span.has_keys}
        with self._new_tokens.reading(tokens):
            hidden_TH, back = self._decode(part, self._bank, dropout, train)
        return hidden_TH, None if back is None else partial(self._go_back, part, back)

    def of_references(self, part: PackedBatch, job_ids: Collection[str]) -> tuple[Tensor, None]:
        """Hidden states of these jobs under what their objectives compare with."""
        bank = self._references_of(job_ids)
        own = part.only(job_ids)
        with self._new_tokens.reading(self._new_tokens.begin(own, bank)):
            return self._decode(own, bank, {}, train=False)[0], None

    def _references_of(self, job_ids: Collection[str]) -> AdapterBank | None:
        return self._references if any(job_id in self._references for job_id in job_ids) else None

    def _reference_logprobs(self, part: PackedBatch, objectives: Mapping[str, UnitLoss]) -> dict[str, Tensor]:
        """Log-probabilities [N] under each job's reference, for the jobs whose objective compares with it."""
        jobs = {s.job_id for s in part.spans if s.job_id in objectives and objectives[s.job_id].needs_reference}
        if not jobs:
            return {}
        own = part.only(jobs)
        tokens = self._new_tokens.begin(own, self._references_of(jobs))
        return token_logprobs(own, self.of_references(part, jobs)[0], self._base.head, tokens)

    def _decode(self, part: PackedBatch, bank: AdapterBank | None, dropout: Mapping[str, float], train: bool) -> tuple[Tensor, Back | None]:
        """Hidden states [T, H] and in training what takes their gradient back, behind the first stage from and to the stage before."""
        decode = partial(self._decoded, part, self.weights, bank, dropout, train)
        upstream = self.upstream
        if upstream is None:
            return decode()
        assert self._base.stage is not None, "a whole base has no stage before it"
        hidden_TH, back = decode_from(self._base.stage, upstream.receive(len(part.input_ids_T)), decode, train)
        return hidden_TH, None if back is None else lambda dhidden_TH: upstream.send_back(back(dhidden_TH))

    def _go_back(self, part: PackedBatch, back: Back, dhidden_TH: Tensor) -> None:
        """Add the gradients of `part` to the sums, in float16 as scaled as they come."""
        if self._bank.dtype == torch.float16:
            for span in part.spans:
                if span.job_id in self._bank:
                    self._bank.scale_sums(span.job_id, span.grad_scale)
        back(dhidden_TH)
