"""Direct preference optimisation (Rafailov et al., 2023, arXiv:2305.18290, equation 7), the sigmoid loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from tlora.objectives.objective import TokenLogprobs, UnitLosses


@dataclass(frozen=True)
class Dpo:
    """-log sigmoid(margin) of a pair, where margin = reward(chosen) - reward(rejected) and reward = beta * (log p - log p_reference).

    log p is the sum over the answer's trained tokens; the reference is the job's start, or the bare base. Metrics, as TRL names them: the
    rewards of both answers, the margin, and the accuracy, 1 where the chosen answer has the larger reward.
    """

    beta: float = 0.1

    sequences = 2
    needs_reference = True
    statistic = None

    def summarise(self, means: Mapping[str, float]) -> Mapping[str, float]:
        return means

    def __call__(self, logprobs: TokenLogprobs) -> UnitLosses:
        assert logprobs.reference_N is not None, "DPO compares with a reference"
        ratios_S = logprobs.sum_by_sequence(logprobs.policy_N - logprobs.reference_N)
        chosen_U, rejected_U = self.beta * ratios_S[0::2], self.beta * ratios_S[1::2]
        margins_U = chosen_U - rejected_U
        metrics = {
            "rewards/chosen": chosen_U,
            "rewards/rejected": rejected_U,
            "rewards/margins": margins_U,
            "rewards/accuracies": (margins_U > 0).double(),
        }
        return UnitLosses(-logsigmoid(margins_U), metrics)
