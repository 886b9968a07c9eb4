"""Which dtype `auto` means on a CPU: products in 16 bits that its instructions do not have take tens of times those of float32."""

from __future__ import annotations

import platform
from collections.abc import Collection

import torch

from tlora.job import DType
from tlora.supermodel.load import load_config, pick_dtype
from tlora.wording.dtypes import dtype_name

_ASKED = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_X86 = ("x86_64", "amd64", "i386", "i686")


def is_slow(dtype: torch.dtype, device: torch.device | str) -> bool:
    """Whether `device` is an x86 CPU for which oneDNN has no products in `dtype`: torch then computes each number by itself.

    On AVX2 alone, a product of 512 x 1,024 x 1,024 took 22 ms in float32, 1,400 in bfloat16 and 1,480 in float16. Other processors have
    not been measured, and keep what the files hold.
    """
    if not _is_cpu(device) or dtype not in _ASKED or platform.machine().lower() not in _X86:
        return False
    asked = getattr(torch.ops.mkldnn, _ASKED[dtype], None) if torch.backends.mkldnn.is_available() else None
    return asked is not None and not asked()


def slow_dtypes() -> tuple[str, ...]:
    """Names of those for which this CPU has no instructions."""
    return tuple(dtype_name(dtype) for dtype in _ASKED if is_slow(dtype, "cpu"))


def settle_dtype(
    base_model: str, dtype: DType, device: torch.device | str | None, slow: Collection[str] | None = None
) -> tuple[DType, str]:
    """What `dtype` means on `device` (None: the GPU if there is one), and a line where `auto` is not what the base's files hold. `slow`:
    dtypes for which a group of CPUs has no instructions, where this is one of them: all compute in the same. Raises ModelError.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype != "auto" or not _is_cpu(device):
        return dtype, ""
    picked = pick_dtype(load_config(base_model), dtype, base_model)
    name = dtype_name(picked)
    if name not in slow if slow is not None else not is_slow(picked, device):
        return dtype, ""
    return "float32", (
        f"{base_model} is in {name}, for which this CPU has no instructions: dtype auto computes in float32, many times faster, and holds "
        f"the base in twice the bytes of its files. To keep its own, set dtype: {name}"
    )


def _is_cpu(device: torch.device | str) -> bool:
    return str(device).partition(":")[0] == "cpu"
