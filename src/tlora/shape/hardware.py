"""The constants of each type of GPU, read from files that say of each one where it was measured. Nothing is fitted here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import resources
from typing import Any, TypeVar

from tlora.errors import ConfigError
from tlora.shape.cost import BaseConstants, CostModel

EXTRAPOLATED = "extrapolated: "
LIVE_GPU = "h200-from-128"
"""Whose constants a live scheduler goes by until workers have measured its bases: fitted to small steps too, and to more bases."""
_NUMBERS = tuple(f.name for f in fields(BaseConstants) if f.name != "source")
_T = TypeVar("_T")


def load_constants() -> dict[str, dict[str, dict[str, BaseConstants]]]:
    """The constants that are shipped, by type of GPU, kernels ("tlora", "peft" or "trl") and base.

    A file is {GPU: {kernels: {base: {"fields": {field: {"value": number, "source": text}}}}}}; beside "fields" a base may keep the
    "points" that they were fitted to.
    """
    found: dict[str, dict[str, dict[str, BaseConstants]]] = {}
    for file in resources.files("tlora.shape").joinpath("constants").iterdir():
        for gpu, sets in json.loads(file.read_text(encoding="utf-8")).items():  # several files may have bases of one type of GPU
            for kernels, bases in sets.items():
                read = {base: _constants(entry["fields"]) for base, entry in bases.items()}
                found.setdefault(gpu, {}).setdefault(kernels, {}).update(read)
    return found


def _constants(given: Mapping[str, Mapping[str, Any]]) -> BaseConstants:
    source = {name: given[name]["source"] for name in _NUMBERS}
    return BaseConstants(source=source, **{name: float(given[name]["value"]) for name in _NUMBERS})


def cost_model(
    gpu: str = "h200", kernels: str = "tlora", bases: Mapping[str, str] | None = None, scale: Mapping[str, float] | None = None
) -> CostModel:
    """The cost model of a type of GPU, from the constants that are shipped.

    `bases` gives each base's name that jobs use the one whose constants it has, as for two bases of one shape; without it the measured
    bases go by their own names. `scale` multiplies fields, {"launch_seconds": 1.3}, to see what depends on them. Raises ConfigError for
    a GPU, kernels, a base or a field that there is not.
    """
    measured = _one_of(_one_of(load_constants(), gpu, "type of GPU"), kernels, f"set of kernels on {gpu}")
    names = bases if bases is not None else {name: name for name in measured}
    chosen = {name: _one_of(measured, base, f"base with measured constants for {kernels} on {gpu}") for name, base in names.items()}
    return CostModel({name: _scaled(constants, scale or {}) for name, constants in chosen.items()})


def nearest_base(base_bytes: float) -> str:
    """Of the bases with constants of `LIVE_GPU` the one that is nearest in size, by the ratio."""
    return nearest_of(cost_model(LIVE_GPU).constants, base_bytes)


def nearest_of(measured: Mapping[str, BaseConstants], base_bytes: float) -> str:
    """The same of the bases in `measured`."""
    assert base_bytes > 0, base_bytes
    return min(sorted(measured), key=lambda name: abs(math.log(measured[name].base_bytes / base_bytes)))


def extrapolated_fields(constants: BaseConstants) -> dict[str, str]:
    """The fields that nobody measured, each with what it was worked out from, for a report to say so."""
    return {name: text.removeprefix(EXTRAPOLATED) for name, text in constants.source.items() if text.startswith(EXTRAPOLATED)}


def _scaled(constants: BaseConstants, scale: Mapping[str, float]) -> BaseConstants:
    values: dict[str, float] = {}
    for name, factor in scale.items():
        if name not in _NUMBERS:
            raise ConfigError(f"scale of {name!r}: there is no such constant; scale one of {', '.join(_NUMBERS)}")
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"scale of {name}: {factor} must be a number above 0")
        values[name] = getattr(constants, name) * factor
    source = {name: f"{text}; scaled by {scale[name]:g}" if name in scale else text for name, text in constants.source.items()}
    return replace(constants, source=source, **values)


def _one_of(found: Mapping[str, _T], name: str, what: str) -> _T:
    if name not in found:
        raise ConfigError(f"{name!r}: there is no such {what}; name one of {', '.join(sorted(found))}")
    return found[name]
