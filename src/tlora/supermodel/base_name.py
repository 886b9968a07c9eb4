"""The name under which others can get a base: what an adapter's files call it, instead of a path of the machine it was trained on."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tlora.job import split_revision

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+")
_CACHED = re.compile(r"models--(.+?)--(.+)")  # a model's directory in the hub's cache


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form org/name and is no directory here."""
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).exists()


def public_name(base_model: str, copy: Path | None = None) -> str:
    """The hub id of `base_model`, where it is one, lies in the hub's cache or has one in its config's `_name_or_path`; else itself.
    `copy`: where its files lie on this host, if `base_model` is a directory of another.
    """
    path, there = Path(base_model), copy or Path(base_model)
    if not there.is_dir():
        return base_model
    for parent in path.absolute().parents:
        if parent.name == "snapshots" and (repository := _CACHED.fullmatch(parent.parent.name)):
            return f"{repository[1]}/{repository[2]}"
    return _named_by_config(there) or base_model


def naming_warning(base_model: str) -> str | None:
    """Where its config alone says what `base_model` is called: a fine-tuned model often keeps the name of the one it was made from."""
    name = _named_by_config(Path(base_model))
    if name is None or public_name(base_model) != name:
        return None
    return (
        f"adapters will name their base {name}, as _name_or_path in the config.json of {base_model} says. "
        "If that is the model which it was fine-tuned from, remove _name_or_path there"
    )


def _named_by_config(directory: Path) -> str | None:
    try:
        named = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None
    return named if isinstance(named, str) and is_hub_id(named) else None


def same_base(named: str, base_model: str) -> bool:
    """Whether an adapter that names `named` as its base means `base_model`, as far as names tell."""
    named, base_model = split_revision(named)[0], split_revision(base_model)[0]
    if named in (base_model, public_name(base_model)):
        return True
    return Path(named).is_dir() and Path(base_model).is_dir() and Path(named).samefile(base_model)
