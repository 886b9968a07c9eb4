"""Expands a job with a `sweep` into one job for each combination of values, named after them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import PurePath

from tlora.jobs_file.located import Located, Problem
from tlora.jobs_file.spelling import suggest

MAX_COMBINATIONS = 1_000
MOST_NAME = 63  # characters, as `NAME_PATTERN` has it
SHORT_NAMES = {
    "learning_rate": "lr",
    "lora_alpha": "alpha",
    "lora_dropout": "drop",
    "target_modules": "modules",
    "use_rslora": "rslora",
    "adapter_path": "from",
    "lr_scheduler_type": "sched",
    "min_lr_rate": "minlr",
    "warmup_steps": "warmup",
    "weight_decay": "wd",
    "adam_beta1": "b1",
    "adam_beta2": "b2",
    "adam_epsilon": "eps",
    "max_grad_norm": "clip",
    "batch_size": "bs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "max_length": "len",
    "train_on": "on",
    "eval_size": "eval",
    "eval_seed": "evalseed",
    "early_stopping_patience": "patience",
}

Fields = dict[str, Located]


def expand(job: Fields, known: Sequence[str], data_keys: Sequence[str], problems: list[Problem]) -> list[Fields]:
    """The jobs of `job`: itself without `sweep`, else one for each combination, in the order of the file."""
    fields = dict(job)
    sweep = fields.pop("sweep", None)
    if sweep is None:
        return [fields]
    axes = _axes(sweep, fields, known, data_keys, problems)
    if axes is None:
        return []
    name = fields.get("name")
    base = name.value if name and isinstance(name.value, str) else ""
    jobs: list[Fields] = []
    for values in itertools.product(*axes.values()):
        combination = dict(zip(axes, values, strict=True))
        one = dict(fields)
        for key, value in combination.items():
            _set(one, key, value, data_keys)
        if name is not None:
            one["name"], one["sweep_of"] = name.with_value(title_of(base, combination)), name
        jobs.append(one)
    longest = max((str(one["name"].value) for one in jobs), key=len) if name is not None else ""
    if len(base) <= MOST_NAME < len(longest):
        over = len(longest) - MOST_NAME
        remedy = f"shorten `name` {base!r} by {over}" if over < len(base) else "write its jobs one by one, each with a name"
        problems.append(sweep.problem(f"sweep: makes the job name {longest!r} of {len(longest)} characters, {MOST_NAME} at most; {remedy}"))
        return []
    return jobs


def title_of(name: str, values: Fields) -> str:
    """The name of a job that differs from the job `name` in these values: sql-lr1e-4-r8."""
    return "-".join([name, *(f"{SHORT_NAMES.get(key, key)}{_brief(value)}" for key, value in values.items())])


def _axes(
    sweep: Located, job: Fields, known: Sequence[str], data_keys: Sequence[str], problems: list[Problem]
) -> dict[str, list[Located]] | None:
    if not isinstance(sweep.value, dict) or not sweep.value:
        problems.append(sweep.problem("sweep: must be a mapping of keys to lists; write `sweep: {r: [8, 32]}`"))
        return None
    axes: dict[str, list[Located]] = {}
    for key, listed in sweep.value.items():
        if key not in known:
            problems.append(listed.problem(f"sweep.{key}: unknown key; {suggest(key, known)}"))
        elif not isinstance(listed.value, list) or not listed.value:
            problems.append(listed.problem(f"sweep.{key}: must be a list of values; write `{key}: [...]` with at least one"))
        elif repeated := _repeated(listed.value):
            problems.append(listed.problem(f"sweep.{key}: two values give the same job name, {repeated}; keep one of them"))
        else:
            axes[key] = listed.value
    combinations = math.prod(len(values) for values in axes.values())
    if combinations > MAX_COMBINATIONS:
        problems.append(sweep.problem(f"sweep: {combinations} combinations, more than {MAX_COMBINATIONS}; sweep fewer values"))
        return None
    return axes if len(axes) == len(sweep.value) else None


def _repeated(values: list[Located]) -> str:
    names = [_brief(value) for value in values]
    return next((name for index, name in enumerate(names) if name in names[:index]), "")


def _set(job: Fields, key: str, value: Located, data_keys: Sequence[str]) -> None:
    if key != "data" and key not in data_keys:
        job[key] = value
        return
    data = job.get("data")
    inner = data.fields if data else {}
    added = value.value if key == "data" and isinstance(value.value, dict) else {"path" if key == "data" else key: value}
    job["data"] = value.with_value(inner | added)


def _brief(place: Located) -> str:
    """A value as part of a name: 1e-4, 0.05, true, q_proj_v_proj."""
    value = place.value
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _brief_number(value)
    if isinstance(value, str):
        return re.sub(r"[^A-Za-z0-9._-]+", "_", PurePath(value).stem)
    return "_".join(_brief(item) for item in (value if isinstance(value, list) else value.values()))


def _brief_number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    exponent = f"{Decimal(repr(value)).normalize():e}".replace("e+", "e")
    return min(repr(value), exponent, key=len)
