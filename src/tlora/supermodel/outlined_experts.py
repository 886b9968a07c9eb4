"""Experts of a base on the meta device, where torch's grouped product takes bf16 alone and the run itself takes any precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GROUPED = getattr(torch, "_grouped_mm", None)


class OutlinedExperts(TorchFunctionMode):
    """Within it a grouped product of tensors without numbers is an ordinary one with its first expert: it has the same output and keeps
    the same bytes for backward. Transformers' experts run it as `torch.nn.functional.grouped_mm`.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _GROUPED and args[0].is_meta:
            return args[0] @ args[1][0]
        return func(*args, **(kwargs or {}))
