"""The model card of an adapter: README.md as the hub reads it, small and true."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tlora.adapters.pattern_warnings import other_readers
from tlora.job import SCHEDULED, DataSource, JobSpec
from tlora.objectives import compares_with_start
from tlora.store.serving import read_prompt
from tlora.supermodel.base_name import is_hub_id
from tlora.version import __version__
from tlora.wording.card_seal import seal, unsealed

_NOT_TOLD = {
    "name",
    "data",
    "sweep_of",
    "adapter_path",
    "reference",
    "weight",
    "logging_steps",
    "save_steps",
    "save_total_limit",
    *SCHEDULED,
}
_DATA_TOLD = ("max_length", "packing", "train_on", "chat_template_kwargs")


def model_card(spec: JobSpec, base_model: str, report: dict[str, Any], result: dict[str, Any], directory: Path) -> str:
    """`report` is that of the training set, `result` the job's; `directory` holds its `prompt.json`. Contains file names, never paths."""
    public = is_hub_id(base_model)
    shown = base_model if public else Path(base_model).name
    head: dict[str, Any] = {"base_model": base_model} if public else {}
    head |= {"library_name": "peft", "pipeline_tag": "text-generation"}
    head["tags"] = ["lora", "peft", "tlora", "transformers", *([f"base_model:adapter:{base_model}"] if public else [])]
    origin = "" if public else ", a model without a public name"
    prompt = read_prompt(directory)
    asked = f"Prompts in training: {prompt}." if prompt else "How prompts were made is in `job.json`."
    lines = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n",
        f"# {spec.name}\n",
        f"A LoRA adapter for `{shown}`{origin}, in PEFT's format. {asked} The tokenizer and its chat template are beside it.\n",
        *(f"{line}.\n" for line in other_readers(spec, (*spec.rank_pattern, *spec.alpha_pattern))),
        f"## Data\n\n{_data(spec, report)}\n",
        f"## Settings\n\n{_table(_settings(spec))}\n",
        f"## Result\n\n{_table(_result(result))}\n",
        f"Trained with tlora {__version__}, {' and '.join(f'{name} {of}' for name, of in library_versions().items())}.\n",
    ]
    return seal("\n".join(lines) + "\n")


@cache
def library_versions() -> dict[str, str]:
    """Of torch and transformers, as they are installed."""
    return {name: version(name) for name in ("torch", "transformers")}


def is_unedited(path: Path) -> bool:
    """Whether a card is as `model_card` made it. One of an earlier version does not tell, and counts as edited."""
    try:
        return unsealed(path.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _data(spec: JobSpec, report: dict[str, Any]) -> str:
    sources = {"Trained on": spec.data.sources, "evaluated on": spec.data.eval_sources}
    told = [f"{what} {', '.join(map(_source, found))}" for what, found in sources.items() if found]
    if spec.data.eval_size:
        told.append(f"evaluated on {spec.data.eval_size:g} {'of its rows' if spec.data.eval_size < 1 else 'rows of it'}")
    counts = f"{report['rows']:,} rows of format {report['format']}, {report['tokens']:,} tokens"
    return f"{', '.join(told)}: {counts}, {report['trained_tokens']:,} of them trained on."


def _source(source: DataSource) -> str:
    """A file's name; of a data set of the hub all that it takes to load it again."""
    if source.revision is None:
        shown = f"`{Path(source.path).name}`"
    else:
        shown = f"`{source.path}` (revision {source.revision})"
    told = [f"{key} {value}" for key in ("name", "split") if (value := getattr(source, key))]
    weight = f"weight {source.weight:g}" if source.weight is not None else ""
    return shown + (f" ({', '.join([*told, *filter(None, [weight])])})" if told or weight else "")


def _settings(spec: JobSpec) -> dict[str, Any]:
    found = {key: value for key, value in spec.model_dump().items() if key not in _NOT_TOLD and value not in (None, {})}
    started = {"started from": Path(spec.adapter_path).name} if spec.adapter_path else {}
    if compares_with_start(spec):
        started["compared with"] = "what it started from"
    return found | {key: getattr(spec.data, key) for key in _DATA_TOLD} | started


def _result(result: dict[str, Any]) -> dict[str, Any]:
    keys = ("steps", "num_tokens", "train_loss_first", "train_loss", "eval_loss_first", "eval_loss", "best_step")
    return {key: result[key] for key in keys if result[key] is not None}


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {_shown(value)} |" for key, value in rows.items())])


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")
