"""The location of the user's caches. Each module owns the files that it puts there; all can be made again."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

_COMPILED = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def cache_dir() -> Path:
    """Where tokenized data, tables of tiles and compiled kernels are kept: $TLORA_CACHE, or tlora in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("TLORA_CACHE") or Path(home) / "tlora").expanduser()


def gpu_file_name(gpu: str) -> str:
    """Of a file about a GPU: NVIDIA H200 -> nvidia-h200.json."""
    return f"{re.sub('[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def share_compiled_kernels() -> None:
    """Make Triton and Inductor keep what they compile in this program's cache, for all processes and GPUs; call it before they compile.

    Otherwise Inductor gives Triton a directory per GPU index from the first layer that it compiles, without the kernels that other
    processes or GPUs have compiled. A variable that the user has set stays unchanged.
    """
    for variable, name in _COMPILED.items():
        os.environ.setdefault(variable, str(_compiled_dir(variable, name)))


def _compiled_dir(variable: str, name: str) -> Path:
    home = os.environ.get("TRITON_HOME")
    return Path(home) / ".triton" / "cache" if home and variable == "TRITON_CACHE_DIR" else cache_dir() / name


def open_caches(note: Callable[[str], object]) -> None:
    """`share_compiled_kernels`; if the cache directory cannot be written, use a temporary one and note that."""
    wanted = cache_dir()
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(wanted, os.W_OK | os.X_OK) else "Permission denied"
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        own = {name: str(_compiled_dir(name, directory)) for name, directory in _COMPILED.items()}
        for variable in (name for name, path in own.items() if os.environ.get(name) == path):
            del os.environ[variable]
        os.environ["TLORA_CACHE"] = tempfile.mkdtemp(prefix="tlora-cache-")
        note(
            f"the cache directory {wanted} cannot be written ({why}): the caches of this launch are in {os.environ['TLORA_CACHE']}. "
            "To keep them, set TLORA_CACHE to a directory that can be written"
        )
    share_compiled_kernels()
