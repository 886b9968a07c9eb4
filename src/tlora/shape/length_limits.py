"""How many tokens a sample may have over a base, and why no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tlora.errors import DataError


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """`why` is a clause: "this base has 32 learned positions"."""

    tokens: int
    why: str


def check_length(limits: Iterable[LengthLimit], tokens: int) -> None:
    """Of the longest sequence of a job. Raises DataError for one that the base cannot take."""
    for limit in limits:
        if tokens > limit.tokens:
            raise DataError(f"a sample has {tokens} tokens, and {limit.why}. Set max_length: {limit.tokens}")
