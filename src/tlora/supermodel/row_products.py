"""Whether a processor's products keep rows apart: oneDNN's in bfloat16 with AMX read past a row's end into the next one where a row is no
multiple of 32 numbers, and multiply what they read by 0, which a NaN there survives.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

_ROWS, _COLUMNS = 33, 8


@torch.no_grad()
def width_that_mixes(widths: Iterable[int], dtype: torch.dtype, device: torch.device) -> int | None:
    """The first of `widths`, numbers of a row of x [T, K], at which a NaN in one row gets into another of y; None where it never does."""
    for width in sorted(set(widths)):
        x_TK, w_NK = (torch.ones(rows, width, dtype=dtype, device=device) for rows in (_ROWS, _COLUMNS))
        x_TK[1::2] = torch.nan
        if not bool(F.linear(x_TK, w_NK)[::2].isfinite().all()):
            return width
    return None
