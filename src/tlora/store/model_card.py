"""The model card of an adapter: README.md as the hub reads it, small and true."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tlora.adapters.pattern_warnings import other_readers
from tlora.job import SCHEDULED, BasePrecision, DataSource, JobSpec
from tlora.kernels.frozen import form_of
from tlora.objectives import compares_with_start
from tlora.registry import OBJECTIVES
from tlora.store.serving import read_prompt
from tlora.supermodel.base_name import is_hub_id
from tlora.version import __version__
from tlora.wording.card_seal import seal, unsealed
from tlora.wording.numbers import quantity

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


def model_card(
    spec: JobSpec,
    base_model: str,
    base_precision: BasePrecision | None,
    report: dict[str, Any] | None,
    result: dict[str, Any],
    directory: Path,
) -> str:
    """The card's text. `report` is the training set's, if it has one, `result` the job's; `directory` holds `prompt.json`. The card names
    files, never paths, and those settings that affect the job.
    """
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
        *(
            [f"It was trained over the base with its linear layers in {form_of(base_precision).CARD}\n"]
            if base_precision is not None
            else []
        ),
        *(f"{line}.\n" for line in other_readers(spec, (*spec.rank_pattern, *spec.alpha_pattern))),
        f"## Data\n\n{_data(spec, report)}\n",
        f"## Settings\n\n{_table(_settings(spec, '' if report is None else report['format']))}\n",
        f"## Result\n\n{_table(_result(result))}\n",
        f"Trained with tlora {__version__}, {' and '.join(f'{name} {of}' for name, of in library_versions().items())}.\n",
    ]
    return seal("\n".join(lines) + "\n")


@cache
def library_versions() -> dict[str, str]:
    """The installed versions of torch and transformers."""
    return {name: version(name) for name in ("torch", "transformers")}


def is_unedited(path: Path) -> bool:
    """Whether a card is as `model_card` made it. One of an earlier version does not tell, and counts as edited."""
    try:
        return unsealed(path.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def _data(spec: JobSpec, report: dict[str, Any] | None) -> str:
    sources = {"Trained on": spec.data.sources, "evaluated on": spec.data.eval_sources}
    parts = [f"{what} {', '.join(map(_source, origin))}" for what, origin in sources.items() if origin]
    if spec.data.eval_size:
        parts.append(f"evaluated on {spec.data.eval_size:g} {'of its rows' if spec.data.eval_size < 1 else 'rows of it'}")
    if report is None:
        return f"{', '.join(parts)}."
    counts = f"{quantity(report['rows'], 'row')} of format {report['format']}, {report['tokens']:,} tokens"
    return f"{', '.join(parts)}: {counts}, {report['trained_tokens']:,} of them trained on."


def _source(source: DataSource) -> str:
    """A file's name; of a data set of the hub all that it takes to load it again."""
    if source.revision is None:
        shown = f"`{Path(source.path).name}`"
    else:
        shown = f"`{source.path}` (revision {source.revision})"
    parts = [f"{key} {value}" for key in ("name", "split") if (value := getattr(source, key))]
    weight = f"weight {source.weight:g}" if source.weight is not None else ""
    return shown + (f" ({', '.join([*parts, *filter(None, [weight])])})" if parts or weight else "")


def _settings(spec: JobSpec, data_format: str) -> dict[str, Any]:
    """Those that the job reads; `data_format` is that of its rows, where it is known."""
    hidden = _NOT_TOLD | _not_read(spec)
    settings = {key: value for key, value in spec.model_dump().items() if key not in hidden and value not in (None, {})}
    data = {key: value for key in _DATA_TOLD if (value := getattr(spec.data, key)) not in (None, {}, False)}
    if spec.learns_from != "samples" or data_format == "text":
        del data["train_on"]  # an answer's tokens are trained, or all of a text
    started = {"started from": Path(spec.adapter_path).name} if spec.adapter_path else {}
    if compares_with_start(spec):
        started["compared with"] = "what it started from"
    return settings | data | started


def _not_read(spec: JobSpec) -> set[str]:
    """Settings that change nothing in the job, by its other settings."""
    unread = {name for entry in OBJECTIVES.values() for name in entry.settings} - set(OBJECTIVES[spec.objective].settings)
    if spec.lr_scheduler_type != "cosine_with_min_lr":
        unread.add("min_lr_rate")
    if spec.lr_scheduler_type == "constant":
        unread.add("warmup_steps")
    if spec.max_steps is not None:
        unread.add("num_train_epochs")
    return unread


def _result(result: dict[str, Any]) -> dict[str, Any]:
    keys = ("steps", "num_tokens", "train_loss_first", "train_loss", "eval_loss_first", "eval_loss", "best_step")
    return {key: result[key] for key in keys if result[key] is not None}


def _table(rows: dict[str, Any]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {_shown(value)} |" for key, value in rows.items())])


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|")
