"""From hidden states to the loss of each job, and the way back: cross-entropy fused with the head, or a job's own objective.

`Pass` is one micro-batch as an object, whose forward and backward can be run apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlora.kernels.head import Head
from tlora.kernels.linear_cross_entropy import linear_cross_entropy
from tlora.objectives import TokenLogprobs, UnitLoss, differentiate, round_exact
from tlora.supermodel.batch import PackedBatch, TokenSpan
from tlora.supermodel.new_tokens import TokenPass


@dataclass(frozen=True)
class JobLoss:
    """One job's part of a batch, as 0-d tensors that the host does not wait for.

    Cross-entropy: the sum of weight * token loss, and the sum of weights. With an objective: the sum of its units' losses, and how many
    units there were; `metrics` are sums over the units by name, `logprobs_N` the log-probabilities of the trained tokens, in order.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    logprobs_N: Tensor | None = None

    @property
    def mean(self) -> float:
        """Mean loss per trained token, or per unit; NaN when there was none."""
        return float(self.loss_sum / self.weight_sum)

    def __add__(self, other: JobLoss) -> JobLoss:
        metrics = {name: value + other.metrics[name] for name, value in self.metrics.items()}
        logprobs = None if self.logprobs_N is None or other.logprobs_N is None else torch.cat([self.logprobs_N, other.logprobs_N])
        return JobLoss(self.loss_sum + other.loss_sum, self.weight_sum + other.weight_sum, metrics, logprobs)


def sum_losses(parts: Iterable[Mapping[str, JobLoss]]) -> dict[str, JobLoss]:
    """Each job's losses in all `parts` together."""
    total: dict[str, JobLoss] = {}
    for part in parts:
        for job_id, loss in part.items():
            total[job_id] = total[job_id] + loss if job_id in total else loss
    return total


@dataclass(frozen=True)
class Losses:
    """What the jobs of `part` minimise. `reference`: by job, for the objectives that ask; `sum_dtype` of gradients, None in evaluation;
    `tokens`: of jobs whose head has rows of their own.
    """

    part: PackedBatch
    head: Head
    objectives: Mapping[str, UnitLoss]
    reference: Mapping[str, Tensor]
    sum_dtype: torch.dtype | None
    tokens: TokenPass | None = None

    def of(self, hidden_TH: Tensor) -> tuple[dict[str, JobLoss], Tensor | None]:
        """Losses of the hidden states [T, H], and their gradient [T, H]: None in evaluation, and where nothing is trained."""
        part = self.part
        grad_weights_N = part.grad_weights_T[part.labelled] if self.sum_dtype is not None else None
        losses: dict[str, JobLoss] = {}
        for span in part.spans:
            if span.job_id in self.objectives:
                losses[span.job_id] = self._ask(span, hidden_TH, grad_weights_N)
        plain = [span for span in part.spans if span.job_id not in self.objectives]
        if grad_weights_N is None:
            losses |= self._evaluate(plain, hidden_TH)
            return {span.job_id: losses[span.job_id] for span in part.spans}, None
        rows, weights_N = part.labelled, part.loss_weights_T[part.labelled]
        losses_N, dh = self._entropy(hidden_TH[rows], part.spans, rows, grad_weights_N.to(self.sum_dtype))
        dhidden_TH = None
        if dh is not None and len(rows):
            dhidden_TH = torch.zeros_like(hidden_TH)
            dhidden_TH[rows] = dh
            del dh
        weighted_N = round_exact(losses_N.double() * weights_N)
        for span in plain:
            own = slice(span.n0, span.n1)
            losses[span.job_id] = JobLoss(weighted_N[own].sum(), weights_N[own].sum())
        return {span.job_id: losses[span.job_id] for span in part.spans}, dhidden_TH

    def _entropy(
        self, hidden_NH: Tensor, spans: Sequence[TokenSpan], rows_N: Tensor, grad_weights_N: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`linear_cross_entropy` at `rows_N`, the labelled tokens of `spans`: at once, but for jobs with a head of their own."""
        tokens, labels_N = self.tokens, self.part.labels_T[rows_N]
        if tokens is None or not any(tokens.changes_head(span.job_id) for span in spans):
            return linear_cross_entropy(hidden_NH, self.head, labels_N, grad_weights_N)
        found: list[tuple[Tensor, Tensor | None]] = []
        start = 0
        for span in spans:
            own = slice(start, start + span.n1 - span.n0)
            start, weights_n = own.stop, None if grad_weights_N is None else grad_weights_N[own]
            with tokens.in_head(span.job_id):
                losses_n, dh_nH = linear_cross_entropy(hidden_NH[own], self.head, labels_N[own], weights_n)
                if weights_n is not None and tokens.changes_head(span.job_id):
                    tokens.note_head(span, self.part, hidden_NH[own], losses_n, weights_n)
            found.append((losses_n, dh_nH))
        gradients = [dh for _, dh in found if dh is not None]
        return torch.cat([losses_n for losses_n, _ in found]), torch.cat(gradients) if gradients else None

    def _evaluate(self, spans: Sequence[TokenSpan], hidden_TH: Tensor) -> dict[str, JobLoss]:
        """Cross-entropy of these spans alone."""
        if not spans:
            return {}
        rows = torch.cat([self.part.labelled[span.n0 : span.n1] for span in spans])
        losses_N, _ = self._entropy(hidden_TH[rows], spans, rows, None)
        weights_N = self.part.loss_weights_T[rows]
        sizes = [span.n1 - span.n0 for span in spans]
        parts = zip(spans, round_exact(losses_N.double() * weights_N).split(sizes), weights_N.split(sizes), strict=True)
        return {span.job_id: JobLoss(losses_n.sum(), weights_n.sum()) for span, losses_n, weights_n in parts}

    def _ask(self, span: TokenSpan, hidden_TH: Tensor, grad_weights_N: Tensor | None) -> JobLoss:
        """The objective's losses of `span`. Its derivatives become the weights with which cross-entropy's gradient is taken."""
        own, part = slice(span.n0, span.n1), self.part
        weights_N = part.loss_weights_T[part.labelled[own]]
        logprobs_N = _logprobs(part, span, hidden_TH, self.head, self.tokens)
        sequence_N = ((part.position_ids_T[span.t0 : span.t1] == 0).cumsum(0) - 1)[part.labelled[own] - span.t0]
        scored = TokenLogprobs(logprobs_N, self.reference.get(span.job_id), weights_N, sequence_N, len(span.lengths))
        units, slope_N = differentiate(self.objectives[span.job_id], scored)
        if grad_weights_N is not None:
            grad_weights_N[own] *= -slope_N / weights_N
        count = torch.full((), len(units.losses_U), dtype=torch.float64, device=weights_N.device)
        metrics = {name: round_exact(values_U).sum() for name, values_U in units.metrics.items()}
        return JobLoss(round_exact(units.losses_U).sum(), count, metrics, logprobs_N)


def token_logprobs(part: PackedBatch, hidden_TH: Tensor, head: Head, tokens: TokenPass | None = None) -> dict[str, Tensor]:
    """Log-probabilities [N] of each job's trained tokens, fp64. `tokens`: of jobs whose head has rows of their own."""
    return {span.job_id: _logprobs(part, span, hidden_TH, head, tokens) for span in part.spans}


def _logprobs(part: PackedBatch, span: TokenSpan, hidden_TH: Tensor, head: Head, tokens: TokenPass | None) -> Tensor:
    rows = part.labelled[span.n0 : span.n1]
    with nullcontext() if tokens is None else tokens.in_head(span.job_id):
        return -linear_cross_entropy(hidden_TH[rows], head, part.labels_T[rows])[0].double()


Forward = Callable[[], tuple[dict[str, JobLoss], Callable[[], object] | None]]
"""Runs a part of a micro-batch: each job's loss, and what adds its gradients to the jobs' sums (None where there are none)."""


class Pass:
    """A micro-batch's forward and its backward, each once. Several may be between the two at a time, and go back in any order.

    Its parts run in the order of `forwards`, in backward too. `adapters` tells whether those that the pass reads are what they were.
    """

    def __init__(self, forwards: Sequence[Forward], adapters: Callable[[], Hashable]) -> None:
        self._forwards: Sequence[Forward] | None = forwards
        self._adapters = adapters
        self._before: Hashable = None
        self._backwards: list[Callable[[], object]] = []

    def forward(self) -> dict[str, JobLoss]:
        """Each job's loss. RuntimeError the second time; a forward that raised may be called again."""
        if self._forwards is None:
            raise RuntimeError("this pass has run its forward already. Begin another one")
        before = self._adapters()
        results = [forward() for forward in self._forwards]
        self._forwards, self._before = None, before
        self._backwards = [backward for _, backward in results if backward is not None]
        return sum_losses(losses for losses, _ in results)

    def backward(self) -> None:
        """Add each job's gradients to its sums. Does nothing the second time, in evaluation, and where no token is trained.

        RuntimeError before `forward`, and where adapters of the pass have stepped, joined or moved since: nothing is added then.
        """
        if self._forwards is not None:
            raise RuntimeError("this pass has not run its forward yet. Call forward first")
        backwards, self._backwards = self._backwards, []
        if backwards and self._before != self._adapters():
            raise RuntimeError("adapters have stepped, joined or moved since this pass's forward. Go back before they do")
        while backwards:
            backwards.pop(0)()
