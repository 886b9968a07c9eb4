"""Names of torch's dtypes as a jobs file writes them. torch is not imported."""

from __future__ import annotations


def dtype_name(dtype: object) -> str:
    """ "bfloat16" of `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")
