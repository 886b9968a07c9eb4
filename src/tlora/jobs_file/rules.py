"""The rule of each key in words, made from the models of `job.py`, and pydantic's errors in those words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from tlora.adapter_shape import OneOf, Words
from tlora.errors import cut
from tlora.job import DataConfig, JobSpec, LoraConfig, RunSpec, TrainConfig
from tlora.jobs_file.located import Located, Problem, join_problems, plain
from tlora.jobs_file.spelling import suggest


def rule_of(field: FieldInfo) -> str:
    """What the field allows: "a whole number from 1 to 256"."""
    return _rule(field.annotation, field.metadata)


def _rule(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [item for extra in arguments[1:] for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
        return _rule(arguments[0], [*metadata, *inner])
    given = next((item.text for item in metadata if isinstance(item, Words)), None)
    if given is not None:
        return given
    if origin in (Union, UnionType):
        words = [_rule(item) for item in arguments if item is not NoneType]
        return " or ".join([*words, "null"] if NoneType in arguments else words)
    chosen = next((tuple(item.table) for item in metadata if isinstance(item, OneOf)), arguments if origin is Literal else None)
    if chosen is not None:
        names = [repr(item) for item in chosen]
        return f"one of {', '.join(names)}" if len(names) > 2 else " or ".join(names)
    if origin is list:
        return "a list of names" if arguments[0] is str else f"a list, each {_rule(arguments[0])}"
    if origin is tuple:
        return f"a list, each {_rule(arguments[0])}"
    if origin is dict:
        return f"a mapping of {'module names' if arguments[0] is str else 'names'}, each to {_rule(arguments[1])}"
    if annotation is JobSpec:
        return "a mapping with name and data"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        required_first = sorted(annotation.model_fields, key=lambda key: not annotation.model_fields[key].is_required())
        return f"a path, or a mapping of {', '.join(required_first)}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[annotation]
    return words + _bounds(metadata)


def _bounds(metadata: Iterable[Any]) -> str:
    found = {name: getattr(item, name) for item in metadata for name in ("ge", "gt", "le", "lt") if getattr(item, name, None) is not None}
    if "ge" in found:
        high = f"to {_number(found['le'])}" if "le" in found else f"to below {_number(found['lt'])}" if "lt" in found else "up"
        return f" from {_number(found['ge'])} {high}"
    if "gt" in found:
        return f" above {_number(found['gt'])}" + (f", at most {_number(found['le'])}" if "le" in found else "")
    return ""


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and abs(value) < 1e16 and value == int(value) else str(value)


def shown(value: object) -> str:
    """A value as YAML writes it, cut to 80 characters."""
    return cut({True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else repr(value))


def default_of(field: FieldInfo) -> str | None:
    """The default as YAML writes it; None when the key must be given."""
    if field.default is PydanticUndefined:
        return None
    default = _number(field.default) if isinstance(field.default, float) and (field.default >= 1e-3 or not field.default) else field.default
    return default if isinstance(default, str) else shown(default)


def translate(errors: Iterable[ErrorDetails], run: Located) -> list[Problem]:
    """One problem per key. pydantic reports one for each branch of a union and each item of a list."""
    found: dict[tuple[int, str, str], Problem] = {}
    for error in errors:
        keys, field, place, holder = _follow(error["loc"], run)
        key = ".".join(keys)
        if error["type"] == "missing":
            problem = holder.problem(_missing(key, field))
        elif error["type"] == "value_error":
            problem = _together(error["msg"].removeprefix("Value error, "), place)
        else:
            problem = place.problem(_broken(key, plain(place), field))
        found.setdefault((problem.line, problem.where, key), problem)
    return list(found.values())


_MODELS: dict[str, type[BaseModel]] = {model.__name__: model for model in (RunSpec, JobSpec, LoraConfig, TrainConfig, DataConfig)}


def explain(error: ValidationError) -> str:
    """What is wrong with a spec made in Python, in the words used for a file, one problem per key."""
    found: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        job, keys, model, field, whole = _locate(item["loc"], _MODELS[error.title])
        key = ".".join(keys)
        if item["type"] == "extra_forbidden" and field is None:
            text = f"{key}: unknown key; {_meant(keys[-1], model)}"
        elif item["type"] == "missing":
            text = _missing(key, field)
        elif item["type"] == "value_error":
            text = item["msg"].removeprefix("Value error, ")
        elif whole or field is None:
            text = _broken(key, item["input"], field)
        else:
            text = f"{key}: contains {shown(item['input'])}; it must be {rule_of(field)}"
        found.setdefault(job + (key or text), job + text)
    return join_problems(list(found.values()))


def _locate(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[str, list[str], type[BaseModel], FieldInfo | None, bool]:
    """Where an error is: "job 2: ", the keys down to the field, the field's model, the field, and whether the error concerns the whole
    value rather than an item inside it.
    """
    job, keys, field, inside = "", list[str](), None, list[int | str]()
    for at, part in enumerate(loc):
        if field is not None and field.annotation is DataConfig:
            model, field = DataConfig, None
        elif keys == ["jobs"] and isinstance(part, int):
            job, keys, model, field = f"job {part + 1}: ", [], JobSpec, None
            continue
        if field is not None:
            inside = [*loc[at:]]
            break
        keys.append(str(part))
        field = model.model_fields.get(str(part))
    within_list = any(isinstance(part, int) for part in inside)
    within_mapping = field is not None and get_origin(field.annotation) is dict and bool(inside)
    return job, keys, model, field, not (within_list or within_mapping)


def _meant(key: str, model: type[BaseModel]) -> str:
    """The key of `model` that was meant, or the model that has this key."""
    of_data = [name for name in DataConfig.model_fields if name != "path"] if model is JobSpec else []
    homes = (RunSpec, JobSpec, DataConfig)
    if exact := [home.__name__ for home in homes if key in home.model_fields]:
        return f"it belongs to {exact[0]}"
    sentence = suggest(key, [*model.model_fields, *of_data])
    if not sentence.startswith("did"):
        for home in homes:
            if (elsewhere := suggest(key, home.model_fields)).startswith("did"):
                return f"{elsewhere[:-1]} of {home.__name__}?"
    return sentence


def find_booleans(fields: Mapping[str, Located], model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """Booleans given for fields of another type: pydantic would read true as 1."""
    return [
        place.problem(_broken(prefix + key, place.value, field))
        for key, place in fields.items()
        if isinstance(place.value, bool) and (field := model.model_fields.get(key)) and field.annotation is not bool
    ]


def _follow(loc: tuple[int | str, ...], run: Located) -> tuple[list[str], FieldInfo | None, Located, Located]:
    """The keys from the job (or the run) down to an error's field, the field, its value, and the mapping that holds it."""
    keys: list[str] = []
    model, field, place, holder = RunSpec, None, run, run
    for part in loc:
        if isinstance(part, int):
            items = place.value
            if keys != ["jobs"] or not isinstance(items, list):
                break
            keys, model, field, place = [f"job {part + 1}"], JobSpec, None, items[part]
            continue
        if model is None or part not in model.model_fields:
            break
        holder, field = place, model.model_fields[part]
        keys = [*[key for key in keys if not key.startswith("job ")], part]
        place = place.fields.get(part, place)
        model = DataConfig if part == "data" else RunSpec if part == "jobs" else None
    return keys, field, place, holder


def _missing(key: str, field: FieldInfo | None) -> str:
    key = "data" if key == "data.path" else key
    rule = rule_of(JobSpec.model_fields["data"]) if key == "data" else rule_of(field) if field else ""
    return f"{key}: missing; it must be {rule}; add `{key}: ...`"


def _together(message: str, place: Located) -> Problem:
    """The message of a rule between keys begins with one of them: the problem is at that key's line."""
    first = message.split()[0]
    return place.fields.get(first, place).problem(message)


def _broken(key: str, value: object, field: FieldInfo | None) -> str:
    if field is None:
        return f"{key or 'jobs'}: {shown(value)} is not a mapping such as {{name: polite, data: polite.jsonl}}"
    text = f"{key}: {shown(value)} is not {rule_of(field)}"
    if isinstance(value, str) and "a list of names" in text:  # a list of anything else would not hold it either
        return f"{text}; write `{key}: [{value}]`"
    if isinstance(value, (int, float)) and field.annotation is str:
        return f"{text}; YAML reads it as a number or a truth value: write it in quotes"
    default = default_of(field)
    return f"{text}; the default is {default}" if default is not None else text
