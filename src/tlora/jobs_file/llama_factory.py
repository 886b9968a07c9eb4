"""LLaMA-Factory's data folder, recognised by its `dataset_info.json`: what a jobs file says in its place, a job for each set.

It names a format and columns for each set; here the columns of the rows say it, so some are to be renamed. Reads no row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import cast

import yaml

from tlora.json_file import read_object

INFO = "dataset_info.json"
_PLACES = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_MOST_SETS = 20
# LLaMA-Factory's names of columns -> (the row's where `columns` is not given, what it must be called here). As its `DatasetAttr` has them.
_COLUMNS: dict[str, dict[str, tuple[str | None, str]]] = {
    "alpaca": {
        "prompt": ("instruction", "instruction"),
        "query": ("input", "input"),
        "response": ("output", "output"),
        "history": (None, "history"),
    },
    "sharegpt": {"messages": ("conversations", "conversations")},
}
_OF_ANY = {key: (None, key) for key in ("system", "tools", "chosen", "rejected", "kto_tag")}
_TAGS = {"role_tag": ("role", "from"), "content_tag": ("content", "value", "text")}  # what messages may call it here

Info = dict[str, dict[str, object]]


def read_folder(directory: Path) -> Info:
    """The sets that the folder names; empty if it is none of LLaMA-Factory's."""
    with suppress(OSError, ValueError):
        found = read_object(directory / INFO)
        if found and all(isinstance(each, dict) for each in found.values()):
            info = cast("Info", found)
            return info if any(place in each for each in info.values() for place in _PLACES) else {}
    return {}


def explain_folder(directory: Path) -> str:
    """What to write in place of a data folder, several lines; "" for any other directory."""
    info = read_folder(directory)
    if not info:
        return ""
    names = sorted(info, key=lambda name: not _is_here(directory, info[name]))
    lines = [f"  {line}" for name in names[:_MOST_SETS] for line in job_lines(directory, name, info[name])]
    more = [f"  and {len(names) - _MOST_SETS} more"] if len(names) > _MOST_SETS else []
    head = f"{directory}: a data folder of LLaMA-Factory ({INFO} names {len(names)} sets), and a job names its data itself; write"
    return "\n".join([f"{head} under `jobs:` the sets that you want:", *lines, *more])


def job_lines(directory: Path, name: str, entry: Mapping[str, object]) -> list[str]:
    """The job that trains on the set `name`: a comment for each thing to do first, and the job as a line of YAML."""
    data, job, notes = read_set(directory, entry)
    if not data:
        return [f"# {name}: {notes[0]}"]
    spelled = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:63].rstrip("-._") or "set"
    line = yaml.safe_dump({"name": spelled, "data": data, **job}, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
    return [*(f"# {name}: {note}" for note in notes), f"- {line.strip()}"]


def read_set(directory: Path, entry: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object], list[str]]:
    """Of a set: its `data`, other keys of a job that trains on it, and what to do first. Without `data`, why it cannot be read."""
    file, hub = entry.get("file_name"), entry.get("hf_hub_url")
    data: dict[str, object] = {}
    if isinstance(file, str):
        data["path"] = str((directory / file).absolute())
    elif isinstance(hub, str):
        data["path"] = hub
        data |= {ours: entry[key] for key, ours in (("subset", "name"), ("split", "split")) if isinstance(entry.get(key), str)}
    else:
        return {}, {}, ["it is made by a script or lies in another hub; save it with `datasets`' save_to_disk and name that directory"]
    formatting, given = str(entry.get("formatting", "alpaca")), entry.get("columns")
    if formatting not in _COLUMNS:
        return {}, {}, [f"formatting {formatting!r} is not read; rename its columns to those of a format of docs/reference/jobs-file.md"]
    columns = cast("dict[str, object]", given) if isinstance(given, dict) else {}
    data_format, notes = _format_of(formatting, columns, isinstance(given, dict), bool(entry.get("ranking")))
    job: dict[str, object] = {"objective": "dpo"} if entry.get("ranking") else {"objective": "kto"} if "kto_tag" in columns else {}
    tags = entry.get("tags")
    for tag, known in _TAGS.items():
        called = cast("dict[str, object]", tags).get(tag) if isinstance(tags, dict) else None
        if called is not None and called not in known:
            notes.append(f"rename {called!r} of each message to {known[0]!r}")
    notes += [f"{key} are not read (column {columns[key]!r})" for key in ("images", "videos", "audios") if columns.get(key)]
    return data | {"format": data_format}, job, notes


def _format_of(formatting: str, columns: Mapping[str, object], are_given: bool, ranked: bool) -> tuple[str, list[str]]:
    """The format here, and which columns are to be renamed."""
    if formatting == "sharegpt" and columns.get("messages") == "messages":
        wanted, data_format = {"messages": (None, "messages")}, "chat"
    elif formatting == "alpaca" and are_given and "response" not in columns and not ranked:  # texts to be continued
        wanted, data_format = {"prompt": (None, "text")}, "text"
    else:
        wanted, data_format = _COLUMNS[formatting], formatting
    renamed = [
        f"rename column {called!r} to {ours!r}"
        for key, (default, ours) in (wanted | _OF_ANY).items()
        if (called := columns.get(key) or default) not in (None, ours) and not (ranked and key == "response")
    ]
    return "preference" if ranked else data_format, renamed


def _is_here(directory: Path, entry: Mapping[str, object]) -> bool:
    file = entry.get("file_name")
    return isinstance(file, str) and (directory / file).exists()
