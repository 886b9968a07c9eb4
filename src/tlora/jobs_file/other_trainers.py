"""A training file of axolotl or LLaMA-Factory in the place of a jobs file: recognised, and answered with the jobs file that says the same.

Only what a jobs file has is taken over; the other keys are named. Each value that is written is one that `job.py` accepts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from tlora.job import JobSpec
from tlora.json_file import read_object
from tlora.registry import OBJECTIVES

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
        written = cast("dict[str, object]", tags).get(tag) if isinstance(tags, dict) else None
        if written is not None and written not in known:
            notes.append(f"rename {written!r} of each message to {known[0]!r}")
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
        f"rename column {written!r} to {ours!r}"
        for key, (default, ours) in (wanted | _OF_ANY).items()
        if (written := columns.get(key) or default) not in (None, ours) and not (ranked and key == "response")
    ]
    return "preference" if ranked else data_format, renamed


def _is_here(directory: Path, entry: Mapping[str, object]) -> bool:
    file = entry.get("file_name")
    return isinstance(file, str) and (directory / file).exists()


_SAME = (
    *("lora_alpha", "lora_dropout", "learning_rate", "lr_scheduler_type", "num_train_epochs", "max_steps", "warmup_steps", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed", "logging_steps", "eval_steps", "save_steps", "save_total_limit"),
)
_RENAMED = {
    "lora_r": "r",
    "lora_rank": "r",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "lora_target_modules": "target_modules",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "warmup_ratio": "warmup_steps",
    "pref_beta": "beta",
    "sample_packing": "packing",
    "packing": "packing",
    "neat_packing": "packing",
    "val_set_size": "eval_size",
    "val_size": "eval_size",
    "lora_target": "target_modules",
    "peft_use_rslora": "use_rslora",
    "use_rslora": "use_rslora",
    "rl_beta": "beta",
    "lora_model_dir": "adapter_path",
    "adapter_name_or_path": "adapter_path",
}
_DEFAULTS = {"axolotl": {}, "LLaMA-Factory": {"lora_rank": 8, "cutoff_len": 2048, "learning_rate": 5e-5, "num_train_epochs": 3.0}}
_BATCHES = {"axolotl": ("micro_batch_size", 1), "LLaMA-Factory": ("per_device_train_batch_size", 8)}
_FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "input_output": "segments", "completion": "text"}
_READ = (
    *("base_model", "model_name_or_path", "datasets", "dataset", "dataset_dir", "adapter", "finetuning_type", "output_dir"),
    *("stage", "rl", "gradient_accumulation_steps", "lora_target_linear", "train_on_inputs", "train_on_prompt", "do_train"),
)

Settings = Mapping[str, Any]


def trainer_of(root: Settings) -> str | None:
    """Which other trainer's file this is."""
    if "jobs" in root or "defaults" in root:
        return None
    if "finetuning_type" in root or ("model_name_or_path" in root and ("stage" in root or "dataset" in root)):
        return "LLaMA-Factory"
    has_sets = isinstance(root.get("datasets"), list) and any(isinstance(each, dict) for each in root["datasets"])
    return "axolotl" if has_sets or ("base_model" in root and "micro_batch_size" in root) else None


def explain_file(file: Path, root: Settings) -> str:
    """The answer to a file of another trainer; "" for any other."""
    trainer = trainer_of(root)
    if trainer is None:
        return ""
    job, notes = _job(root, trainer)
    objective = str((root.get("rl") if trainer == "axolotl" else root.get("stage")) or "sft")
    if objective not in OBJECTIVES:
        notes.append(f"{objective!r} is no objective here, so this is sft")
    elif objective != "sft":
        job["objective"] = objective
    data, of_data, name = _axolotl_data(root) if trainer == "axolotl" else _llama_factory_data(root)
    try:
        JobSpec.model_validate({"name": name, "data": data} | job)
    except ValidationError:  # of pairs, say, the format is always `preference`: `auto` finds it
        data.pop("format", None)
    spec: dict[str, object] = {"base_model": root.get("base_model") or root.get("model_name_or_path") or "path-or-hub-id"}
    spec |= {"output_dir": root["output_dir"]} if isinstance(root.get("output_dir"), str) else {}
    spec["jobs"] = [{"name": name, "data": data} | job]
    batch = _BATCHES[trainer][0]
    taken = {*_READ, *_SAME, *_RENAMED, batch}
    if left := [str(key) for key, value in root.items() if key not in taken and value is not None and value is not False]:
        notes.append(f"not taken over: {', '.join(left)}")
    text = yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=10**6)
    lines = [*(f"# {note}" for note in [*notes, *of_data]), *text.splitlines()]
    head = f"{file}: a training file of {trainer}, not a jobs file; write one such as this (batch_size is for one GPU there)"
    return "\n".join([f"{head}:", *(f"  {line}" for line in lines)])


def _job(root: Settings, trainer: str) -> tuple[dict[str, object], list[str]]:
    """The keys of a job, each tried by `JobSpec`, and which values it does not take."""
    settings = {**_DEFAULTS[trainer], **{key: value for key, value in root.items() if value is not None}}
    asked = {key: settings[key] for key in _SAME if key in settings}
    asked |= {ours: settings[key] for key, ours in _RENAMED.items() if key in settings}
    per_device, default = _BATCHES[trainer]
    sizes = settings.get(per_device, default), settings.get("gradient_accumulation_steps", 1)
    if all(isinstance(size, int) for size in sizes):
        asked["batch_size"] = sizes[0] * sizes[1]
    if trainer == "LLaMA-Factory" and "r" in asked and "lora_alpha" not in asked:
        asked["lora_alpha"] = asked["r"] * 2 if isinstance(asked["r"], int) else asked["r"]
    target = asked.get("target_modules")
    if settings.get("lora_target_linear") or target == "all":
        asked["target_modules"] = "all-linear"
    elif trainer == "LLaMA-Factory" and isinstance(target, str):
        asked["target_modules"] = [name.strip() for name in target.split(",")]
    if settings.get("train_on_inputs") or settings.get("train_on_prompt"):
        asked["train_on"] = "all"
    taken: dict[str, object] = {}
    notes: list[str] = []
    for key, value in asked.items():
        number = _number(value)
        try:
            JobSpec.model_validate({"name": "job", "data": "x.jsonl", key: number})
            taken[key] = number
        except ValidationError:
            notes.append(f"{key} {value!r} has no counterpart here")
    return taken, notes


def _number(value: object) -> object:
    """`1e-4` is text to YAML 1.1."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _axolotl_data(root: Settings) -> tuple[dict[str, object], list[str], str]:
    """The job's data, what to do first, and a name for it."""
    sets = [cast("dict[str, Any]", each) for each in _list(root.get("datasets")) if isinstance(each, dict)]
    sources: list[dict[str, object]] = []
    formats: set[str | None] = set()
    notes: list[str] = []
    for each in sets:
        files = each.get("data_files")
        given = cast("list[object]", files if isinstance(files, list) else [files or each.get("path", "data.jsonl")])
        options: dict[str, object] = (
            {key: each[key] for key in ("name", "split", "revision") if isinstance(each.get(key), str)} if not files else {}
        )
        sources += [{"path": _path(str(path)), **options} for path in given]
        kind = str(each.get("type", ""))
        messages = each.get("field_messages", "messages")
        of_chat = "chat" if messages == "messages" else "sharegpt" if messages == "conversations" else None
        formats.add(of_chat if kind == "chat_template" else _FORMATS.get(kind.split(".")[0].split(":")[0]))
        if kind == "chat_template" and of_chat is None:
            notes.append(f"rename column {messages!r} to 'messages'")
        if kind == "completion" and each.get("field", "text") != "text":
            notes.append(f"rename column {each['field']!r} to 'text'")
    data: dict[str, object] = {"path": sources or "data.jsonl"}
    known = formats.pop() if len(formats) == 1 else None
    return data | ({"format": known} if known else {}), notes, "adapter"


def _llama_factory_data(root: Settings) -> tuple[dict[str, object], list[str], str]:
    directory = Path(str(root.get("dataset_dir") or "data"))
    given = root.get("dataset")
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else [str(name) for name in _list(given)]
    info = read_folder(directory)
    sources: list[dict[str, object]] = []
    formats: set[object] = set()
    notes: list[str] = []
    for name in names:
        data, _, first = read_set(directory, info[name]) if name in info else ({}, {}, [f"not found in {directory}/dataset_info.json"])
        notes += [f"{name}: {note}" for note in first]
        formats.add(data.pop("format", None))
        sources.append(data or {"path": f"{name}.json"})
    known = formats.pop() if len(formats) == 1 else None
    return {"path": sources or "data.jsonl"} | ({"format": known} if known else {}), notes, "adapter"


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _path(path: str) -> str:
    """Absolute where it lies in the current directory, against which other trainers read it."""
    return str(Path(path).absolute()) if Path(path).exists() else path
