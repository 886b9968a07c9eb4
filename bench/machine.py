"""Where and when a figure was measured, and the file that it is kept in."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "transformers", "peft", "liger-kernel")


def interpret_all_precisions() -> None:
    """Where kernels are interpreted (TRITON_INTERPRET=1): let Triton's own interpreter, which multiplies alike in all of them, take one
    precision of `tl.dot` that it does not know by name (3.6).
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

        known: Any = (*InterpreterOptions.allowed_dot_input_precisions, "bf16x6")
        interpreter_builder.options = InterpreterOptions(allowed_dot_input_precisions=known)


def device_name(device: torch.device) -> str:
    """As its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor() or "CPU")


def facts(device: torch.device, commit: str | None) -> dict[str, Any]:
    """What every result names: device, versions, commit (`commit` where there is no git), the command, and whether libraries have their
    bytecode: without it each process compiles their source as it starts.
    """
    return {
        "device": device_name(device),
        "versions": versions(*PACKAGES) | {"cuda": torch.version.cuda, "python": platform.python_version()},
        "commit": commit or _commit(),
        "command": f"python {_program()} {shlex.join(sys.argv[1:])}".rstrip(),
        "bytecode": Path(importlib.util.cache_from_source(torch.__file__)).is_file(),
    }


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"-m {spec.name}" if spec else sys.argv[0]


def versions(*packages: str) -> dict[str, str | None]:
    """None for those that are not installed."""
    return {name: _version(name) for name in packages}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit("this copy has no git: say which commit it is with --commit") from None
    return found


def write(path: Path | None, found: dict[str, Any]) -> None:
    """Keep what has been measured so far: a run that is cut off leaves what it had."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")


def median_milliseconds(step: Callable[[], object], warmup: int = 25, rep: int = 100) -> float:
    """Of `step` on a GPU, called for about `warmup` and then for `rep` ms."""
    from triton.testing import do_bench  # a CPU needs no triton

    found = do_bench(step, warmup=warmup, rep=rep, return_mode="median")
    assert isinstance(found, float), found
    return found


def wait(device: torch.device) -> None:
    """Until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
