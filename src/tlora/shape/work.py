"""Seconds of a job on one device of which nothing was measured: its multiply-adds, and how many of them training makes in a second."""

from __future__ import annotations

from dataclasses import dataclass

# Norms, activations, adapters and their gradients are bound by a GPU's memory: for each feature that goes into a linear or out of it they
# take as long as so many weights, whatever the linear's size. From how much longer 8,192 tokens take than 512 (half an 8B's layers) and
# than 2,048 (0.6B), on one H200 (bench/results/h200_f960408_plan_measurements_a.json and _b.json). About 40 combinations of constants were
# compared on all measured points before this one was taken (docs/reference/layouts.md).
FEATURE_WEIGHTS = 574
# Multiply-adds per second, twice that in floating-point operations. On a GPU: an H200 trains 17,016 tokens/s of an 8B in bf16, samples of
# 2,048 (docs/benchmarks-history.md), of 2.75e6 features. Other GPUs are placed by the same figure: where all are of one kind, only the
# ratios of jobs matter.
_RATES = {"cuda": 17_016 * 2 * (8.0e9 + FEATURE_WEIGHTS * 2.75e6), "cpu": 2.0e10}
LAYER_OF_8B = 218_000_000, 81_920  # weights and features
WITH_FEATURES = 1 + FEATURE_WEIGHTS * LAYER_OF_8B[1] / LAYER_OF_8B[0]  # a layer of an 8B with its features over its weights alone
FP8_GAIN = 24_067 / 17_016  # with `base_precision: fp8`, whose products are in 8 bits (docs/benchmarks-history.md; one H200)


@dataclass(frozen=True, slots=True)
class SampleWork:
    """Multiply-adds of a job's sample of n tokens: n * (per_token + n * per_square)."""

    per_token: float
    per_square: float

    def of(self, tokens: float) -> float:
        return tokens * (self.per_token + self.per_square * tokens)


def sample_work(weights: int, width: int, forwards: int, adapter: int = 0) -> SampleWork:
    """Each token is multiplied with the weights in forward and in backward (frozen weights have no gradient of their own), and with the
    `adapter`'s, which have one, once more; causal attention takes half the sample's length twice (scores, values) in forward and twice that
    in backward. `width`: of the hidden states of all layers; `forwards`: those and the backward, of what the job's objective computes.
    """
    return SampleWork(forwards * weights + (forwards + 1) * adapter, 3 * width)


@dataclass(frozen=True, slots=True)
class JobWork:
    """Tokens that a job trains on, and on average those of the sample that a token is in; forwards of each, with those beside the one that
    trains; and tokens of all its evaluations.
    """

    trained_tokens: int
    mean_sample_tokens: float
    forwards: int
    evaluated_tokens: float

    def multiply_adds(self, weights: int, width: int) -> float:
        """As `sample_work`, without the adapter. Evaluations are forward only."""
        each = sample_work(weights, width, self.forwards)
        trained = self.trained_tokens * (each.per_token + each.per_square * self.mean_sample_tokens)
        return trained + self.evaluated_tokens * weights


@dataclass(frozen=True, slots=True)
class TrainingRate:
    """`flops`: what training makes of a GPU's floating-point operations a second, with weights in 16 bits; None: those of an H200.
    `gain_in_8_bits`: how many times as many with weights in 8 bits.
    """

    flops: float | None = None
    gain_in_8_bits: float = FP8_GAIN

    def multiply_adds_per_second(self, device_type: str, in_8_bits: bool) -> float:
        """That are predicted with."""
        if device_type != "cuda":
            return _RATES["cpu"]
        return (self.flops / 2 if self.flops else _RATES["cuda"]) * (self.gain_in_8_bits if in_8_bits else 1.0)
