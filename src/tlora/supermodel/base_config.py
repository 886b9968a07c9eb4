"""What a base's config says: how long a sample may be by its positions, values that differ from layer to layer, and which configs are
refused before transformers reads them: they would end in a traceback there, or in minutes without an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from tlora.errors import ModelError
from tlora.job import split_revision
from tlora.json_file import read_object
from tlora.shape.length_limits import LengthLimit
from tlora.supermodel.indexers import dense_tokens

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


def length_limits(model: Any, one_by_one: bool) -> tuple[LengthLimit, ...]:
    """All that hold for samples over `model`, packed or `one_by_one`."""
    found = (
        (learned_positions(model), "this base has {} learned positions"),
        (_safe_tokens(model), "this base's rotary embedding changes past {}"),
        (None if one_by_one else dense_tokens(model), "past {} this base's attention is sparse, which is not trained"),
    )
    return tuple(LengthLimit(most, why.format(most)) for most, why in found if most is not None)


def _safe_tokens(model: Any) -> int | None:
    """Tokens up to which a sequence's rotary embedding does not depend on the others in its batch; None where it never does.

    The dynamic and longrope kinds choose their frequencies by the longest sequence in the batch (transformers' `dynamic_rope_update`).
    """
    config = model.config.get_text_config()
    ropes = values_in_layers(config, "rope_parameters")
    kinds = [kind for rope in ropes for kind in (rope, *(value for value in rope.values() if isinstance(value, dict)))]
    lengths = [
        kind.get("original_max_position_embeddings")
        or min(values_in_layers(config, "original_max_position_embeddings") or values_in_layers(config, "max_position_embeddings"))
        for kind in kinds
        if kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(lengths, default=None)


def max_positions(model: Any) -> int | None:
    """The positions that the base is made for, of its layers the fewest; None where its config does not say."""
    return min(values_in_layers(model.config.get_text_config(), "max_position_embeddings"), default=None)


def learned_positions(model: Any) -> int | None:
    """Rows of the base's table of positions (OPT, GPT-Neo), past which there is nothing to look up; None where positions are computed."""
    most = max_positions(model)
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    # a table may have two rows more, for padding
    return most if most and any(most <= table.num_embeddings <= most + 2 for table in tables) else None


def values_in_layers(config: Any, key: str) -> list[Any]:
    """What `key` of a text config is in its layers where they may differ, each value once; else what it is in the whole. Without None.

    transformers refuses to read such a key from the whole config, with a RuntimeError.
    """
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    values: list[Any] = []
    for value in (getattr(layer, key, None) for layer in layers):
        if value is not None and value not in values:
            values.append(value)
    return values


def unreadable(base_model: str, error: Exception) -> ModelError:
    """The error for a base that a library cannot read, or not reach: the remedies of a directory and of a hub id differ."""
    why = f"cannot be read: {one_line(error).rstrip('.')}"
    if Path(split_revision(base_model)[0]).exists():
        return ModelError(f"base_model {base_model}: {why}. Is it a whole model directory?")
    return ModelError(
        f"base_model {base_model}: there is no such directory here, and as a hub id it {why}. Correct the path, or check the id and the "
        "connection (private ones need HF_TOKEN)"
    )


def package_missing(base_model: str, error: ImportError) -> ModelError:
    """The error for a base whose class needs a package that is not installed (timm, for the images of Gemma 3n): transformers names it."""
    return ModelError(f"base_model {base_model}: transformers makes no model of it without another package: {' '.join(str(error).split())}")


def one_line(error: Exception) -> str:
    """The whole of a library's message in one line; a bare KeyError says only its key."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
