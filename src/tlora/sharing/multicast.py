"""NVLink multicast stays off: a program that uses it can put all GPUs of a host out of service. For every process that may use GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

NO_MULTICAST: Mapping[str, str] = MappingProxyType({"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"})
"""Environment variables. NCCL and torch read them when they first need them, so they may also be set after torch's import."""


def turn_multicast_off() -> None:
    """Turn NVLink multicast off in this process and those that it starts from now on, overriding the environment."""
    os.environ.update(NO_MULTICAST)
