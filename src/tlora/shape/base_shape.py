"""A base's shape as those have it who plan without its layers: counted once by a process with torch, and kept as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tlora.adapter_shape import ExpertSize
from tlora.shape.base_parts import BaseParts
from tlora.shape.length_limits import LengthLimit
from tlora.shape.memory import BaseMemory


@dataclass(frozen=True, slots=True)
class BaseShape:
    """In and out features of its linears, names of its modules and of its blocks of experts, its bytes (of all weights, and in `memory`),
    its vocabulary, how long a sample may be, notes for those who train over it, what a plan cuts it by, its input embedding (name, rows and
    width), and the parameters of its experts that can be adapted.
    """

    linears: Mapping[str, tuple[int, int]]
    modules: tuple[str, ...]
    experts: tuple[str, ...]
    bytes: int
    vocab_size: int
    limits: tuple[LengthLimit, ...]
    max_position_embeddings: int | None
    memory: BaseMemory
    notes: tuple[str, ...]
    parts: BaseParts
    embedding: tuple[str, int, int] = ("", 0, 0)
    parameters: Mapping[str, ExpertSize] = field(default_factory=dict[str, ExpertSize])
