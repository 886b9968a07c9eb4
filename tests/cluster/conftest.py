"""Runs and workers of this room start as those of the engine's; the list of fake workers starts empty."""

from __future__ import annotations

import pytest

from tests.cluster.fake_workers import STARTED
from tests.engine.conftest import forked, tokenize_once

__all__ = ["forked", "tokenize_once"]


@pytest.fixture(autouse=True)
def no_workers_of_other_tests() -> None:
    STARTED.clear()
