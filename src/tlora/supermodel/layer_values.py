"""Values of a transformers config that may differ from layer to layer."""

from __future__ import annotations

from typing import Any


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
