"""Where a job starts from: the adapter that its `adapter_path` names, with its shape and its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from tlora import durable
from tlora.adapters.layout import AdapterLayout
from tlora.adapters.peft import adapted_modules, load_params, read_config
from tlora.adapters.state import AdapterState, fresh_state, init_state
from tlora.adapters.targets import adopted_values, in_indexer, outside_indexers, shape_warnings
from tlora.errors import ModelError
from tlora.job import JobSpec
from tlora.jobs_file import explain
from tlora.wording.numbers import are, quantity

PLACES = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern")


def find_start(spec: JobSpec, resumed: Path | None) -> Path | None:
    """The adapter whose shape a job with `adapter_path` has: its own newest checkpoint in the `resumed` run, or else that adapter."""
    if not spec.adapter_path:
        return None
    return (durable.find_verified(resumed / spec.name) if resumed else None) or Path(spec.adapter_path)


def adopt_adapter_config(spec: JobSpec, start: Path) -> tuple[JobSpec, list[str]]:
    """A job that starts from an adapter has that adapter's shape, with a warning where the jobs file says otherwise. Raises ModelError.

    Which modules both mean, their `PLACES`, is to be compared over the base.
    """
    config = read_config(start)
    targets = config.get("target_modules")
    if targets is None and config.get("target_parameters"):
        targets = []
    if not isinstance(targets, str) and not (isinstance(targets, list) and all(isinstance(name, str) for name in targets)):
        raise ModelError(f"{start}: target_modules must be a list of names, and is {targets!r}. List the layers' names there")
    adopted = adopted_values(config) | {key: None if config.get(key) in ([], "") else config.get(key) for key in PLACES}
    adopted["expert_rank"] = "same"  # the adapter's patterns say which
    adopted["target_modules"] = targets if isinstance(targets, str) else sorted(targets)
    warnings = shape_warnings(spec, config, start)
    try:
        adopting = JobSpec.model_validate(spec.model_dump() | adopted)
        adopting.model_dump_json()  # half a surrogate pair may stand in a name, and could not be written into job.json
    except ValidationError as error:
        raise ModelError(f"{start}: its adapter_config.json cannot be continued: {_one_line(explain(error))}") from None
    except PydanticSerializationError as error:
        raise ModelError(f"{start}: its adapter_config.json has a name that is no text ({error}). Correct it there") from None
    modules = adapted_modules(start)
    if count := sum(map(in_indexer, modules)):
        adopting = outside_indexers(adopting, modules)
        warnings.append(f"{quantity(count, 'layer')} of {start} {are(count)} in indexers, and left out: no gradient reaches one")
    return adopting, warnings


def fit_adapter(layout: Callable[[JobSpec], AdapterLayout], shape: JobSpec, start: Path, *, then: str) -> AdapterLayout:
    """`layout` of a shape that an adapter has. Raises ModelError where the base lacks what it is put at: no setting changes that, and
    `then` says what to do with the base into which the adapter was merged.
    """
    try:
        return layout(shape)
    except ModelError as error:
        problem = str(error).partition(". ")[0]  # what follows says how to choose other targets
        merge = f"merge it into that base (PEFT's merge_and_unload, save_pretrained), {then}"
        raise ModelError(f"{start}: {problem}. An adapter's layers are fixed: take the base that it was trained over, or {merge}") from None


def _one_line(problems: str) -> str:
    """A job's reason stands in a table: several problems follow each other instead of standing in a list."""
    return "; ".join(line.strip() for line in problems.splitlines() if not line.endswith("problems:"))


def start_state(spec: JobSpec, layout: AdapterLayout, dtype: torch.dtype) -> AdapterState:
    """On the host: the adapter that `adapter_path` names, with a fresh optimizer, or a new one."""
    if not spec.adapter_path:
        return init_state(layout, spec.seed, dtype)
    return fresh_state(layout, load_params(Path(spec.adapter_path), layout, dtype))
