"""The constants of each type of GPU, read from files that say of each one where it was measured. Nothing is fitted here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, cast

from tlora.errors import ConfigError
from tlora.shape.cost import BaseConstants, CostModel

EXTRAPOLATED = "extrapolated: "
LIVE_GPU = "h200-from-128"
"""Whose constants a live scheduler goes by until workers have measured its bases: fitted to small steps too, and to more bases."""
_NUMBERS = tuple(f.name for f in fields(BaseConstants) if f.name != "source")
_ABOVE_ZERO = ("tokens_per_second", "base_bytes", "gpu_bytes")
_T = TypeVar("_T")


def load_constants(path: Path | None = None) -> dict[str, dict[str, dict[str, BaseConstants]]]:
    """The constants by type of GPU, kernels ("tlora", "peft" or "trl") and base: those in the file `path`, or else all that are shipped.

    A file is {GPU: {kernels: {base: {"fields": {field: {"value": number, "source": text}}}}}}; beside "fields" a base may keep the
    "points" that they were fitted to. Raises ConfigError for a file that cannot be read, and for a field that is missing or wrong.
    """
    if path is not None:
        return _loaded(path)
    found: dict[str, dict[str, dict[str, BaseConstants]]] = {}
    for file in resources.files("tlora.shape").joinpath("constants").iterdir():
        for gpu, sets in _loaded(file).items():  # several files may have bases of one type of GPU
            for kernels, bases in sets.items():
                found.setdefault(gpu, {}).setdefault(kernels, {}).update(bases)
    return found


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


def _loaded(file: Path | Traversable) -> dict[str, dict[str, dict[str, BaseConstants]]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: constants must be a JSON file that can be read ({error})") from error
    found: dict[str, dict[str, dict[str, BaseConstants]]] = {}
    for gpu, sets in _mapping(content, str(file)).items():
        for kernels, bases in _mapping(sets, f"{file}: {gpu}").items():
            for base, entry in _mapping(bases, f"{file}: {gpu}: {kernels}").items():
                where = f"{file}: {gpu}: {kernels}: {base}"
                given = _mapping(_mapping(entry, where).get("fields"), f"{where}: fields")
                found.setdefault(gpu, {}).setdefault(kernels, {})[base] = _constants(given, where)
    return found


def _constants(given: Mapping[str, Any], where: str) -> BaseConstants:
    wrong = sorted(set(given) ^ set(_NUMBERS))
    if wrong:
        state = "is no field of it" if wrong[0] in given else "is missing"
        raise ConfigError(f"{where}: {wrong[0]} {state}; give each of {', '.join(_NUMBERS)} and nothing else")
    values: dict[str, float] = {}
    source: dict[str, str] = {}
    for name in _NUMBERS:
        field = _mapping(given[name], f"{where}: {name}")
        value, text = field.get("value"), field.get("source")
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value < 0
            or (not value and name in _ABOVE_ZERO)
        ):
            least = "above 0" if name in _ABOVE_ZERO else "from 0"
            raise ConfigError(f'{where}: {name}: "value" is {value!r}, and must be a number {least}')
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(
                f'{where}: {name}: "source" is {text!r}, and must say where it was measured, or "{EXTRAPOLATED}" and from what'
            )
        values[name], source[name] = float(value), text
    return BaseConstants(source=source, **values)


def _mapping(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: {found!r} must be a JSON object; load_constants tells what a file holds")
    return cast("dict[str, Any]", found)
