"""Odds-ratio preference optimisation (Hong et al., 2024, arXiv:2403.07691, equations 6 and 7): no reference, one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tlora.objectives.objective import TokenLogprobs, UnitLosses


@dataclass(frozen=True)
class Orpo:
    """-l(chosen) - beta * log sigmoid(log odds(chosen) - log odds(rejected)) of a pair.

    l is the mean log-probability of an answer's trained tokens, odds = p / (1 - p) with p = exp(l). `beta` is the paper's lambda. TRL
    takes its first term over the prompts too, and over all tokens of a batch at once; the second is the same. Metrics as TRL names them.
    """

    beta: float = 0.1

    sequences = 2
    needs_reference = False
    statistic = None

    def summarise(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return means

    def __call__(self, logprobs: TokenLogprobs) -> UnitLosses:
        counts_S = logprobs.sum_by_sequence(torch.ones_like(logprobs.policy_N))
        means_S = logprobs.sum_by_sequence(logprobs.policy_N) / counts_S
        chosen_U, rejected_U = means_S[0::2], means_S[1::2]
        odds_U = (chosen_U - rejected_U) - (_log_of_rest(chosen_U) - _log_of_rest(rejected_U))
        rewards_U = self.beta * (chosen_U - rejected_U)
        metrics = {
            "rewards/chosen": self.beta * chosen_U,
            "rewards/rejected": self.beta * rejected_U,
            "rewards/margins": rewards_U,
            "rewards/accuracies": (rewards_U > 0).double(),
            "nll_loss": -chosen_U,
            "log_odds_ratio": logsigmoid(odds_U),
        }
        return UnitLosses(-chosen_U - self.beta * logsigmoid(odds_U), metrics)


def _log_of_rest(log_p: Tensor) -> Tensor:
    """log(1 - p)."""
    return torch.log(-torch.expm1(log_p))
