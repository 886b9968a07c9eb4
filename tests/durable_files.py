"""Small checkpoints for the durable tests: three files whose bytes follow from a mark."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

FILES = ("adapter_model.safetensors", "optimizer.safetensors", "state.json")


def content(mark: str, name: str) -> bytes:
    return random.Random(f"{mark} {name}").randbytes(900 + len(name))


def writer(mark: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for name in FILES:
            (directory / name).write_bytes(content(mark, name))

    return write


def holds(directory: Path, mark: str) -> bool:
    return all((directory / name).read_bytes() == content(mark, name) for name in FILES)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
