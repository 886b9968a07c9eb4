"""Runs and workers of this room start as those of the engine's."""

from __future__ import annotations

from tests.engine.conftest import forked

__all__ = ["forked"]
