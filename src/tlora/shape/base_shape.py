"""A base's shape as those have it who plan without its layers: counted once by a process with torch, and kept as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tlora.adapter_shape import ExpertSize
from tlora.shape.base_parts import BaseParts, parse_parts
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

    def to_json(self) -> dict[str, Any]:
        memory = self.memory
        counted = memory.fixed_bytes, memory.token_bytes, memory.least_token_bytes, memory.streamed_bytes, memory.num_layers
        return {
            "linears": dict(self.linears),
            "modules": self.modules,
            "experts": self.experts,
            "bytes": self.bytes,
            "bytes_by_gpus": memory.bytes_by_gpus,
            "vocab_size": self.vocab_size,
            "limits": [(limit.tokens, limit.why) for limit in self.limits],
            "max_position_embeddings": self.max_position_embeddings,
            "memory": counted,
            "notes": self.notes,
            "parts": self.parts.to_json(),
            "embedding": self.embedding,
            "parameters": dict(self.parameters),
        }


def parse_shape(found: Mapping[str, Any]) -> BaseShape:
    """From `BaseShape.to_json`. Raises ValueError, KeyError, TypeError."""
    return BaseShape(
        {str(name): (int(inputs), int(outputs)) for name, (inputs, outputs) in dict(found["linears"]).items()},
        tuple(found["modules"]),
        tuple(found["experts"]),
        int(found["bytes"]),
        int(found["vocab_size"]),
        tuple(LengthLimit(int(tokens), str(why)) for tokens, why in found["limits"]),
        found["max_position_embeddings"],
        _memory(found),
        tuple(map(str, found["notes"])),
        parse_parts(found["parts"]),
        _embedding(found),
        {str(name): ExpertSize(*map(int, size[:4]), exchanged=any(size[4:])) for name, size in dict(found.get("parameters", {})).items()},
    )


def _embedding(found: Mapping[str, Any]) -> tuple[str, int, int]:
    """Unknown of one that an earlier commit of this version wrote."""
    name, rows, width = found.get("embedding", ("", 0, 0))
    return str(name), int(rows), int(width)


def _memory(found: Mapping[str, Any]) -> BaseMemory:
    """Of one that an earlier commit of this version wrote, how many layers there are is not known."""
    fixed, token, least, streamed, *layers = found["memory"]
    by_gpus = tuple(map(int, found["bytes_by_gpus"]))
    return BaseMemory(by_gpus, float(fixed), float(token), float(least), float(streamed), int(layers[0]) if layers else 0)
