"""Kahneman-Tversky optimisation (Ethayarajh et al., 2024, arXiv:2402.01306, equations 7 and 8): answers labelled as wanted or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tlora.objectives.objective import BatchStatistic, TokenLogprobs, Unit, UnitLosses


@dataclass(frozen=True)
class Kto:
    """weight * (1 - sigmoid(v)), v = beta * (ratio - kl) of a wanted answer and beta * (kl - ratio) of an unwanted one.

    ratio = log p - log p_reference, summed over the answer's trained tokens; the loss weights of an unwanted answer are negative. `kl` is
    the mean ratio, at least 0, of the global batch's prompts with the answer of the row before (the first takes the last one's), measured
    without gradients. Metrics as TRL names them; the means of either kind of answer are over the answers of that kind.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    kl: Tensor | None = None  # 0-d, fp64

    sequences = 1
    needs_reference = True

    @property
    def statistic(self) -> BatchStatistic:
        return MeanRatio(self)

    def __call__(self, logprobs: TokenLogprobs) -> UnitLosses:
        assert self.kl is not None, "KTO compares with the KL of its batch"
        signs_U = torch.sign(logprobs.sum_by_sequence(torch.ones_like(logprobs.policy_N)))
        ratios_U = signs_U * _ratios(logprobs)
        wanted_U, kl = (signs_U > 0).double(), self.kl.to(ratios_U.device)
        weights_U = self.desirable_weight * wanted_U + self.undesirable_weight * (1 - wanted_U)
        rewards_U = self.beta * ratios_U
        metrics = {
            "wanted": wanted_U,
            "rewards/chosen": rewards_U * wanted_U,
            "rewards/rejected": rewards_U * (1 - wanted_U),
            "kl": kl.expand_as(ratios_U),
        }
        return UnitLosses(weights_U * (1 - torch.sigmoid(self.beta * signs_U * (ratios_U - kl))), metrics)

    def summarise(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """Of sums over all answers, means over those of either kind; what there is none of is left out."""
        wanted = means["wanted"]
        summary = {"kl": means["kl"]}
        shares = {"rewards/chosen": wanted, "rewards/rejected": 1 - wanted}
        summary |= {name: means[name] / share for name, share in shares.items() if share > 0}
        if len(summary) == 3:
            summary["rewards/margins"] = summary["rewards/chosen"] - summary["rewards/rejected"]
        return summary


@dataclass(frozen=True)
class MeanRatio:
    """The mean over a batch of log p - log p_reference of each prompt with another row's answer."""

    kto: Kto

    sequences = 1
    needs_reference = True

    def unit(self, own: Unit, before: Unit, most_tokens: int) -> Unit:
        """The prompt of `own`, the answer of `before`; cut at the end, as samples are."""
        prompt, answer = _answer_start(own), _answer_start(before)
        ids_L = np.concatenate([own.input_ids[:prompt], before.input_ids[answer:]])
        weights_L = np.concatenate([np.zeros(prompt, np.float32), np.abs(before.loss_weights[answer:])])
        return Unit(ids_L[:most_tokens], weights_L[:most_tokens])

    def objective(self, value: Tensor) -> Kto:
        return replace(self.kto, kl=value.clamp(min=0))

    def __call__(self, logprobs: TokenLogprobs) -> UnitLosses:
        return UnitLosses(_ratios(logprobs), {})


def _ratios(logprobs: TokenLogprobs) -> Tensor:
    assert logprobs.reference_N is not None, "KTO compares with a reference"
    return logprobs.sum_by_sequence(logprobs.policy_N - logprobs.reference_N)


def _answer_start(unit: Unit) -> int:
    """The first trained token."""
    return int((unit.loss_weights != 0).argmax())
