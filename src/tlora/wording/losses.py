"""Losses of jobs as they are shown: what "train loss" means, and which jobs may be ranked by theirs (measured on the same tokens alike)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from tlora.registry import OBJECTIVES

_TOKENS = ("format", "max_length", "train_on", "on_bad_rows", "chat_template")


def incomparable(orders: Sequence[Mapping[str, Any]], by_eval: bool) -> str:
    """Why losses of `orders`, as `job.json` has them, do not rank their jobs; empty if they do. `by_eval`: losses of evaluations."""
    measures = [_measure(order, by_eval) for order in orders]
    keys = dict.fromkeys(key for measure in measures for key in measure)
    differing = [key for key in keys if any(measure.get(key) != measures[0].get(key) for measure in measures)]
    if not differing:
        return ""
    kind = "eval" if by_eval else "train"
    return f"these {kind} losses are not comparable: the jobs differ in {', '.join(differing)}, and so in what a loss is measured on"


def _measure(order: Mapping[str, Any], by_eval: bool) -> dict[str, Any]:
    """All that a loss depends on besides the adapter, by key."""
    data = cast("Mapping[str, Any]", order.get("data") or {})
    measure = {key: data.get(key) for key in _TOKENS}
    if by_eval and data.get("eval_path"):
        measure["eval_path"] = data["eval_path"]
    else:
        measure["path"] = _unweighted(data.get("path")) if by_eval else data.get("path")
    if by_eval and data.get("eval_size"):
        measure["eval_size"] = data["eval_size"]
        measure["eval_seed"] = data.get("eval_seed")
    objective = measure["objective"] = str(order.get("objective", "sft"))
    return measure | {key: order.get(key) for key in (OBJECTIVES[objective].settings if objective in OBJECTIVES else ())}


def _unweighted(path: object) -> object:
    """Sources without the weights of a mixture: evaluation rows are split off before those count."""
    if not isinstance(path, list | tuple):
        return path
    sources = cast("Sequence[Mapping[str, Any]]", path)
    return [{key: value for key, value in source.items() if key != "weight"} for source in sources]


RECENT_STEPS = 10


def recent_loss(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """The mean over the rows of `metrics.jsonl` that the last `RECENT_STEPS` steps are in, of those that are finite; None without any.

    With `logging_steps: 1` this is the `train_loss` of `result.json`; a row of more steps counts with all of them.
    """
    losses = [(row["step"], row["loss"]) for row in rows if _is_number(row.get("step")) and "loss" in row]
    recent = [loss for step, loss in losses if step > losses[-1][0] - RECENT_STEPS]
    finite = [float(loss) for loss in recent if _is_number(loss)]
    return sum(finite) / len(finite) if finite else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
