"""Seconds of a job on one device of which nothing was measured: its multiply-adds, and how many of them training makes in a second."""

from __future__ import annotations

from dataclasses import dataclass

# Multiply-adds per second, twice that in floating-point operations. On a GPU: an H200 trains 17,016 tokens/s of an 8B in bf16, samples of
# 2,048 (docs/benchmarks-history.md). Other GPUs are placed by the same figure: where all are of one kind, only the ratios of jobs matter.
_RATES = {"cuda": 17_016 * 2 * 8.0e9, "cpu": 2.0e10}
FP8_GAIN = 24_067 / 17_016  # with `base_precision: fp8`, whose products are in 8 bits (docs/benchmarks-history.md; one H200)


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
        """Of each token: the weights in forward and in backward (frozen weights have no gradient of their own), and of causal attention
        half the sample's length twice (scores, values) in forward and twice that in backward. Evaluations are forward only. `width`: of
        the hidden states of all layers.
        """
        trained = self.trained_tokens * (self.forwards * weights + 3 * width * self.mean_sample_tokens)
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
