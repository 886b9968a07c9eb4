"""How long a sample may be, by a base's positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from tlora.supermodel.layer_values import values_in_layers


def longest_safe_sequence(model: Any) -> int | None:
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
