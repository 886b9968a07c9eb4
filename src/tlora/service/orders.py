"""From what a tenant asks to orders: a sweep's combinations, and what is wrong with an order in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError

from tlora.api import OrderedData, OrderSpec, SweepOrder
from tlora.errors import ConfigError
from tlora.jobs_file import suggest
from tlora.jobs_file.located import Located, Problem, join_problems, plain
from tlora.jobs_file.sweep import expand

_SWEPT = tuple(key for key in OrderSpec.model_fields if key not in ("name", "base_model", "metadata"))
_SWEPT_DATA = tuple(key for key in OrderedData.model_fields if key not in ("file", "eval_file"))


def expand_sweep(order: SweepOrder, most: int) -> list[OrderSpec]:
    """One order for each combination. Raises ConfigError for keys and values that cannot be swept, and for more than `most` jobs."""
    problems: list[Problem] = []
    count = 1
    for values in order.sweep.values():
        count *= len(values)
    if count > most:
        raise ConfigError(f"sweep: {count} combinations, more than {most}; sweep fewer values")
    fields = _located(order.job.model_dump(exclude_unset=True, mode="json") | {"sweep": order.sweep})
    found = expand(fields.fields, (*_SWEPT, *_SWEPT_DATA), _SWEPT_DATA, problems)
    if problems:
        raise ConfigError(join_problems([problem.text for problem in problems]))
    orders: list[OrderSpec] = []
    for one in found:
        values = cast("dict[str, Any]", {key: plain(place) for key, place in one.items() if key != "sweep_of"})
        if "path" in values["data"]:  # `sweep: {data: [file-1, file-2]}`
            values["data"]["file"] = values["data"].pop("path")
        try:
            orders.append(OrderSpec.model_validate(values))
        except ValidationError as error:
            raise ConfigError(f"sweep: {values['name']}: {describe(error)}") from None
    return orders


def describe(error: ValidationError) -> str:
    """What is wrong with an order, one problem after the other."""
    found: dict[str, None] = {}
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = f"unknown key; {suggest(str(item['loc'][-1]), known_keys(OrderSpec, item['loc']))}"
        found[f"{where}: {text}" if where else text] = None
    return "; ".join(found)


def known_keys(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, ...]:
    """The keys that `model` has where pydantic's `loc` points: beside its last part."""
    found = model
    for part in loc[:-1]:
        field = found.model_fields.get(str(part))
        inner = _model_in(field.annotation) if field is not None else None
        found = inner or found
    return tuple(found.model_fields)


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model of an annotation, or within its union or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part)) is not None), None)


def _located(value: object) -> Located:
    """As the reader of jobs files has it, but without lines."""
    if isinstance(value, dict):
        return Located({str(key): _located(item) for key, item in cast("dict[Any, object]", value).items()}, 0, "body")
    if isinstance(value, list):
        return Located([_located(item) for item in cast("list[object]", value)], 0, "body")
    return Located(cast("Any", value), 0, "body")
