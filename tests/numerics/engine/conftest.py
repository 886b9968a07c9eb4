"""Runs start as those of the engine's tests, for the promises at the level of `tlora.train`."""

from __future__ import annotations

from tests.engine.conftest import forked, tokenize_once

__all__ = ["forked", "tokenize_once"]
