"""Runs of tokens that belong to one adapter, and where that adapter's rows lie in the bank. Plain integers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `t0:t1` use rank rows `r0:r1` with `scale`; `dropout` is the probability that an input is dropped."""

    t0: int
    t1: int
    r0: int
    r1: int
    scale: float
    dropout: float = 0.0


Segments = tuple[Segment, ...]
"""One micro-batch as a linear sees it, in token order; tokens of no segment have no adapter there."""


def check_segments(segments: Segments, num_tokens: int, num_rows: int) -> None:
    """Assert that token runs are ordered and disjoint and that all pointers lie inside the tensors."""
    end = 0
    for s in segments:
        assert end <= s.t0 <= s.t1 <= num_tokens, f"segment tokens {s.t0}:{s.t1} overlap, or leave 0:{num_tokens}"
        assert 0 <= s.r0 <= s.r1 <= num_rows, f"segment rows {s.r0}:{s.r1} leave 0:{num_rows}"
        end = s.t1
