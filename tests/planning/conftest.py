"""Runs of this package's tests start as those of the engine's."""

from __future__ import annotations

from tests.engine.conftest import forked, tokenize_once

__all__ = ["forked", "tokenize_once"]
