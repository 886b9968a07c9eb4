"""What a job minimises: the log-probabilities of its trained tokens in, a loss for each unit out.

A unit is what is never torn apart: one sequence, or the chosen and the rejected answer of a pair. An objective knows no model, no
packing and no other job. Cross-entropy is not among them: its derivative is known beforehand, so `SuperModel` fuses it with the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

_STEPS = 2.0**28


def round_exact(values: Tensor) -> Tensor:
    """In fp64, as multiples of 2^-28: up to 2^25 their sum is exact, so it depends neither on order nor on what is packed together."""
    return values.detach().double().mul(_STEPS).round_().div_(_STEPS)


class _SumBySequence(torch.autograd.Function):
    """[S] sums of values [N], to 2^-57 a value and in any order: both parts of each, and so their sums, are on a grid.

    A sum that is rounded to 2^-28 a value, as those that are reported, would move the loss's slope by more than fp64 promises.
    """

    @staticmethod
    def forward(ctx: Any, values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
        ctx.save_for_backward(sequence_N)
        high_N = round_exact(values_N)
        low_N = (values_N - high_N).mul_(_STEPS**2).round_().div_(_STEPS**2)
        zeros_S = torch.zeros(num_sequences, dtype=torch.float64, device=values_N.device)
        return zeros_S.index_add(0, sequence_N, high_N) + zeros_S.index_add(0, sequence_N, low_N)

    @staticmethod
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (sequence_N,) = ctx.saved_tensors
        return grad_S[sequence_N], None, None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of the N trained tokens of one job in one micro-batch, natural logarithm, fp64.

    `reference_N` are those of the reference without dropout: a frozen adapter over the base, or the base alone. None where the objective
    does not ask for them.
    `weights_N` are the tokens' loss weights, `sequence_N` (int64, ascending) the sequence of each, of `num_sequences`.
    """

    policy_N: Tensor
    reference_N: Tensor | None
    weights_N: Tensor
    sequence_N: Tensor
    num_sequences: int

    def sum_by_sequence(self, values_N: Tensor) -> Tensor:
        """[S] sum of weight * value over the tokens of each sequence."""
        weighted_N = (values_N * self.weights_N).double()
        return _SumBySequence.apply(weighted_N, self.sequence_N, self.num_sequences)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class UnitLosses:
    """Of U units: the loss of each [U], and further figures worth a column in metrics [U] by name. All fp64."""

    losses_U: Tensor
    metrics: Mapping[str, Tensor]


@dataclass(frozen=True)
class Unit:
    """One row of a job's data: token ids [L] and loss weights [L]."""

    input_ids: np.ndarray
    loss_weights: np.ndarray


class UnitLoss(Protocol):
    """A loss over units, as `SuperModel` computes it."""

    @property
    def sequences(self) -> int:
        """Sequences of one unit; those of a unit follow one another."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether it reads `reference_N`."""
        ...

    def __call__(self, logprobs: TokenLogprobs) -> UnitLosses:
        """Losses that are differentiable in `policy_N`. A unit's must not depend on the other units."""
        ...


class BatchStatistic(UnitLoss, Protocol):
    """A number of a job's whole global batch that its losses depend on: the mean of this loss over other units, made from those of the
    batch. Measured by forward passes without gradients and dropout, before the batch's own.
    """

    def unit(self, own: Unit, before: Unit, most_tokens: int) -> Unit:
        """What is measured for the row `own`, which follows `before` in the batch (the last one stands before the first)."""
        ...

    def objective(self, value: Tensor) -> Objective:
        """The objective of the batch whose statistic is `value`, 0-d in fp64."""
        ...


class Objective(UnitLoss, Protocol):
    """What a job minimises: the mean loss over the units of its global batch."""

    @property
    def statistic(self) -> BatchStatistic | None:
        """What is measured of a global batch before its losses are asked for."""
        ...

    def summarise(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """What metrics show, of the means over the units of `UnitLosses.metrics`."""
        ...


def differentiate(objective: UnitLoss, logprobs: TokenLogprobs) -> tuple[UnitLosses, Tensor]:
    """The losses, and d(sum of losses) / d(policy log-probability) of each token [N]."""
    with torch.enable_grad():
        policy_N = logprobs.policy_N.detach().double().requires_grad_()
        losses = objective(TokenLogprobs(policy_N, logprobs.reference_N, logprobs.weights_N, logprobs.sequence_N, logprobs.num_sequences))
        (slope_N,) = torch.autograd.grad(losses.losses_U.sum(), policy_N)
    return UnitLosses(losses.losses_U.detach(), {name: values.detach() for name, values in losses.metrics.items()}), slope_N
