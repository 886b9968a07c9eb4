"""A job's metrics for OpenAI's clients: as events, as a checkpoint's numbers, and as the CSV file that its `result_files` name.

All are read from `metrics.jsonl` when they are asked for; nothing is stored.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from sqlalchemy import Row

from tlora.api import ENDED, FileView
from tlora.service.problems import missing

_PREFIX = "results-"
_COLUMNS = {
    "step": "step",
    "loss": "train_loss",
    "eval_loss": "valid_loss",
    "accuracy": "train_accuracy",
    "eval_accuracy": "valid_accuracy",
}
_OTHERS = ("learning_rate", "grad_norm", "num_tokens")


def metric_lines(directory: Path, job_id: str) -> Sequence[bytes]:
    """The whole lines of the job's metrics; none before the first."""
    try:
        content = (directory / "jobs" / job_id / "metrics.jsonl").read_bytes()
    except FileNotFoundError:
        return []
    return content[: content.rfind(b"\n") + 1].splitlines()


def numbers_of(line: bytes) -> dict[str, Any]:
    """A row of metrics by OpenAI's names. Empty for a damaged line."""
    try:
        row: object = json.loads(line)
    except ValueError:
        return {}
    if not isinstance(row, dict) or not isinstance(cast("dict[str, Any]", row).get("step"), int):
        return {}
    found = cast("dict[str, Any]", row)
    return {name: found[key] for key, name in _COLUMNS.items() if key in found} | {key: found[key] for key in _OTHERS if key in found}


def numbers_by_step(lines: Sequence[bytes]) -> dict[int, dict[str, Any]]:
    """All that is known of a step, in the order of the steps."""
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        if numbers := numbers_of(line):
            found.setdefault(numbers["step"], {}).update(numbers)
    return dict(sorted(found.items()))


def ids_of(directory: Path, row: Row[Any]) -> list[str]:
    """Of the job's result files: one, once it has ended with metrics."""
    there = row.status in ENDED and row.removed is None and (directory / "jobs" / row.id / "metrics.jsonl").is_file()
    return [_PREFIX + row.id] if there else []


def job_of(file_id: str) -> str | None:
    """The job whose result file has this id; None for other files."""
    return file_id.removeprefix(_PREFIX) if file_id.startswith(_PREFIX) else None


def content_of(directory: Path, row: Row[Any]) -> bytes:
    """A line for each step that has metrics. Raises RefusedError where the job has no result file."""
    if not ids_of(directory, row):
        raise missing("file", _PREFIX + row.id)
    columns = (*_COLUMNS.values(), *_OTHERS)
    table = numbers_by_step(metric_lines(directory, row.id))
    used = [column for column in columns if column in ("step", "train_loss", "valid_loss") or any(column in one for one in table.values())]
    text = io.StringIO()
    writer = csv.DictWriter(text, used, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.values())
    return text.getvalue().encode()


def view_of(directory: Path, row: Row[Any]) -> FileView:
    """Raises RefusedError where the job has no result file."""
    content = content_of(directory, row)
    return FileView(
        id=_PREFIX + row.id,
        bytes=len(content),
        created_at=int(row.ended),
        filename=f"{row.name}-metrics.csv",
        purpose="fine-tune-results",
        sha256=hashlib.sha256(content).hexdigest(),
    )


def event_message(numbers: Mapping[str, Any], total_steps: int | None) -> str:
    """Of one row, as OpenAI writes it."""
    losses = {"train_loss": "training loss", "valid_loss": "validation loss"}
    told = [f"{words}={numbers[key]:.4f}" for key, words in losses.items() if isinstance(numbers.get(key), int | float)]
    return f"Step {numbers['step']}{f'/{total_steps}' if total_steps else ''}: {', '.join(told) or 'no finite loss'}"
