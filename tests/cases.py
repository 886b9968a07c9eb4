"""Which cases of a test are in every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_every_run(cases: Iterable[Any], *kept: int) -> list[Any]:
    """Parameters of a test: the cases at the places `kept` are in `make test`, the others, of the same promise, in `make test-slow`.

    A tuple is the values of several parameters, as in `pytest.mark.parametrize` of several.
    """
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=() if at in kept else pytest.mark.slow) for at, value in enumerate(values)]
