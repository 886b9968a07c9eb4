"""The engine room's tiny base, data and token cache, for the promises at the level of `tlora.train`."""

from __future__ import annotations

from tests.engine.conftest import data, forked, tokenize_once, wide_base

__all__ = ["data", "forked", "tokenize_once", "wide_base"]
