"""What packing may do to a sample, where 16 bits blur its logits: let its neighbours reach it, or count its positions from theirs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tlora.supermodel.failed_proof import relative_difference

Run = Callable[[Tensor], Tensor]
"""Hidden states [T, H] of the tokens [T] of three packed samples."""
_OF_PLACE = {torch.bfloat16: 1e-2, torch.float16: 3e-3}
"""Relative difference of what the same kernels make of the same tokens, from which on it is none of rounding."""
_ROUNDINGS = 3  # times what other kernels' rounding makes of a sample


def neighbours_reach(base: Any, run: Run, ids: Sequence[Tensor]) -> bool:
    """Whether NaN in the first and last of three samples reaches the one between them.

    A short convolution mixes neighbours by less than rounding in bf16 (Lfm2: 4e-3 of the logits), but NaN gets through it whole.
    """
    mine = slice(len(ids[0]), len(ids[0]) + len(ids[1]))

    def spoil(_module: nn.Module, _args: object, embedded_1TH: Tensor) -> Tensor:
        spoilt = torch.full_like(embedded_1TH, torch.nan)
        spoilt[:, mine] = embedded_1TH[:, mine]
        return spoilt

    hook = base.model.get_input_embeddings().register_forward_hook(spoil)
    try:
        return not bool(run(torch.cat(tuple(ids)))[mine].isfinite().all())
    finally:
        hook.remove()


def change_by_place(run: Run, ids: Sequence[Tensor]) -> float:
    """Relative difference of one sample's hidden states as the first and the last of three, for 16 bits: in more its logits show it. The
    same kernels compute both, so that there is hardly any: none in 190 families on a CPU in bf16. Blenderbot small, whose positions
    go on from one sample to the next, changes its logits by 0.02 so, which is no more than rounding may.
    """
    found = run(torch.cat([ids[0], ids[1], ids[0]]))
    return relative_difference(found[-len(ids[0]) :], found[: len(ids[0])])


def depends_on_place(change: float, rounding: float, dtype: torch.dtype) -> bool:
    """Whether such a `change` is none of rounding. `rounding`: what is between the packed sample and the family's own eager attention."""
    return change > max(_OF_PLACE.get(dtype, 0.0), _ROUNDINGS * rounding)
