"""A base's config.json before transformers reads it: what would end in a traceback there, or in minutes without an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tlora.errors import ModelError
from tlora.json_file import read_object

MOST_LAYERS = 4096  # the deepest model known has 1,000 or so; each layer of an outline takes a millisecond and more
_COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)


def refuse_strange_config(path: Path, base_model: str) -> None:
    """Raise ModelError for a file that holds no JSON object, and for counts of layers or experts beyond any model's."""
    try:
        raw = read_object(path)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"base_model {base_model}: its config.json cannot be read: {error}. Copy the model again") from None
    for key, value in _counts(raw):
        if isinstance(value, int | float) and value > MOST_LAYERS:
            raise ModelError(
                f"base_model {base_model}: its config.json has {key} {value}, and at most {MOST_LAYERS} are taken. "
                "Compare it with the original's"
            )


def _counts(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Also those of a text model inside."""
    for key, value in raw.items():
        if key in _COUNTS:
            yield key, value
        elif isinstance(value, dict) and key.endswith("config"):
            yield from _counts(value)
