"""All objectives: ORPO against TRL, slopes against finite differences, and units that know no other."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close
from tlora.objectives import Objective, Orpo, TokenLogprobs, differentiate
from tlora.registry import OBJECTIVES

NAMES = [name for name, entry in OBJECTIVES.items() if entry.place]
LENGTHS = (3, 5, 1, 7, 4, 2)


def _logprobs(seed: int = 0, reference: bool = False) -> TokenLogprobs:
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    policy, other = (torch.rand(count, generator=generator, dtype=torch.float64) * -3 - 0.1 for _ in range(2))
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return TokenLogprobs(policy, other if reference else None, torch.ones(count, dtype=torch.float64), sequence, len(LENGTHS))


def _case(name: str, seed: int, beta: float) -> tuple[Objective, TokenLogprobs]:
    """With a batch's statistic of 0.7, where it asks for one; every other answer is unwanted, where units have one."""
    objective: Objective = OBJECTIVES[name].load()(beta)
    logprobs = _logprobs(seed, objective.needs_reference)
    if objective.sequences == 1:
        logprobs = replace(logprobs, weights_N=1 - 2.0 * (logprobs.sequence_N % 2))
    if objective.statistic is not None:
        objective = objective.statistic.objective(torch.tensor(0.7, dtype=torch.float64))
    return objective, logprobs


def test_its_odds_ratio_is_trls() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, about themselves
        from trl.experimental.orpo import ORPOTrainer
    logprobs = _logprobs()
    means = torch.stack([part.mean() for part in logprobs.policy_N.split(LENGTHS)])
    trainer = SimpleNamespace(beta=0.3, accelerator=SimpleNamespace(device="cpu"))
    ratios, chosen, rejected, log_odds_ratio, _ = ORPOTrainer.odds_ratio_loss(trainer, means[0::2], means[1::2])  # type: ignore[arg-type]
    units, _ = differentiate(Orpo(0.3), logprobs)
    assert torch.allclose(units.losses_U, -means[0::2] - ratios, rtol=1e-5)
    assert torch.allclose(units.metrics["rewards/chosen"], chosen.double(), rtol=1e-5)
    assert torch.allclose(units.metrics["rewards/rejected"], rejected.double(), rtol=1e-5)
    assert float(units.metrics["log_odds_ratio"].mean()) == pytest.approx(float(log_odds_ratio), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_those_of_finite_differences(name: str) -> None:
    objective, logprobs = _case(name, 1, 0.4)
    _, slope_N = differentiate(objective, logprobs)

    def total(shift: Tensor) -> float:
        moved = TokenLogprobs(logprobs.policy_N + shift, logprobs.reference_N, logprobs.weights_N, logprobs.sequence_N, len(LENGTHS))
        return float(objective(moved).losses_U.sum())

    for token in range(len(slope_N)):
        step = torch.zeros_like(slope_N)
        step[token] = 2.0**-10
        assert float(slope_N[token]) == pytest.approx((total(step) - total(-step)) * 2.0**9, rel=1e-4, abs=1e-5)


def _long_answers(name: str) -> tuple[Objective, TokenLogprobs]:
    """Of 2,000 tokens each, under a policy that is near its reference: no loss is saturated."""
    draw, lengths = torch.Generator().manual_seed(3), (2000,) * len(LENGTHS)
    objective, short = _case(name, 0, 1.0)
    sequence_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    policy_N = torch.rand(len(sequence_N), generator=draw, dtype=torch.float64) * -3 - 0.1
    reference_N = policy_N + 1e-3 * torch.randn(len(sequence_N), generator=draw, dtype=torch.float64)
    signs_N = 1 - 2.0 * (sequence_N % 2) if objective.sequences == 1 else torch.ones_like(policy_N)
    return objective, TokenLogprobs(policy_N, reference_N if short.reference_N is not None else None, signs_N, sequence_N, len(lengths))


@pytest.mark.parametrize("name", NAMES)
def test_slopes_are_those_of_sums_that_are_not_rounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within what fp64 promises of training, for answers of thousands of tokens; and in bits whatever the order of the tokens."""
    objective, logprobs = _long_answers(name)
    units, slope_N = differentiate(objective, logprobs)
    order = torch.cat(
        [start + torch.randperm(2000, generator=torch.Generator().manual_seed(start)) for start in range(0, len(slope_N), 2000)]
    )
    reference_N = None if logprobs.reference_N is None else logprobs.reference_N[order]
    shuffled = replace(logprobs, policy_N=logprobs.policy_N[order], reference_N=reference_N)
    again, slope_again_N = differentiate(objective, shuffled)
    assert torch.equal(units.losses_U, again.losses_U) and torch.equal(slope_N[order], slope_again_N)

    def plain(self: TokenLogprobs, values_N: Tensor) -> Tensor:
        return torch.zeros(self.num_sequences, dtype=torch.float64).index_add(0, self.sequence_N, values_N * self.weights_N)

    monkeypatch.setattr(TokenLogprobs, "sum_by_sequence", plain)
    _, expected_N = differentiate(objective, logprobs)
    assert_close(slope_N, expected_N, 1e-12, "slopes")


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_knows_no_other(name: str) -> None:
    """Each unit alone has the loss and the slopes that it has among others, to the bit."""
    objective, logprobs = _case(name, 2, 0.1)
    units, slope_N = differentiate(objective, logprobs)
    size = objective.sequences
    ends = torch.tensor((0, *LENGTHS)).cumsum(0)[::size].tolist()
    for unit, (start, end) in enumerate(pairwise(ends)):
        own, reference = slice(start, end), logprobs.reference_N
        alone = TokenLogprobs(
            logprobs.policy_N[own], None if reference is None else reference[own], logprobs.weights_N[own],
            logprobs.sequence_N[own] - size * unit, size,
        )  # fmt: skip
        found, slopes = differentiate(objective, alone)
        assert torch.equal(found.losses_U[0], units.losses_U[unit]) and torch.equal(slopes, slope_N[own])
