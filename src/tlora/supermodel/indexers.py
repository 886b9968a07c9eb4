"""Sparse attention whose indexer chooses the tokens that a query sees (DeepSeek-V3.2, GLM-5, MiniMax-M3).

A sample that has no more tokens than an indexer may choose is seen whole: there attention is dense, and packed attention is right. So
samples are held to that length (`length_limits` of `base_config.py`), and indexers are not asked in passes of packed samples. They choose
without gradients: PEFT's adapters at their linears stay as they began, and here these linears are no targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

_COUNTS = (("index_topk",), ("topk_blocks", "block_size"))
"""Attributes of an indexer whose product is how many tokens it may choose."""


def find_indexers(model: nn.Module) -> dict[str, nn.Module]:
    """By dotted name."""
    return {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == "indexer" and _counts_of(module)}


def dense_tokens(model: nn.Module) -> int | None:
    """Of the longest sample in which each indexer of `model` chooses all tokens; None: it has no indexers."""
    return min((prod(getattr(module, key) for key in _counts_of(module)) for module in find_indexers(model).values()), default=None)


def choose_all(decoder: Any, packed: Sequence[str]) -> None:
    """Let the indexers of `decoder` choose nothing, which leaves all tokens seen, where its attention is one of those named `packed`. With
    other attention they are as they were.
    """
    config = decoder.config

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation in packed:
            return hidden_states.new_empty((1, 0), dtype=torch.int32)
        return type(self).forward(self, hidden_states, *args, **kwargs)

    for module in find_indexers(decoder).values():
        module.forward = MethodType(forward, module)


@contextmanager
def at_their_limit(model: nn.Module, tokens: int) -> Iterator[None]:
    """Within it each indexer may choose `tokens`, so that a proof over samples of so many holds for the longest ones that are taken."""
    before = [(module, {key: getattr(module, key) for key in _counts_of(module)}) for module in find_indexers(model).values()]
    try:
        for module, counts in before:
            vars(module).update(dict.fromkeys(counts, 1) | {next(iter(counts)): tokens})
        yield
    finally:
        for module, counts in before:
            vars(module).update(counts)


def _counts_of(module: nn.Module) -> tuple[str, ...]:
    return next((keys for keys in _COUNTS if all(isinstance(getattr(module, key, None), int) for key in keys)), ())
