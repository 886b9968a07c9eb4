"""Values in the files of bench/results by their keys, as pages of docs/ cite them.

A key is names and selectors: `rows[2]` is the third, `rows[system=peft][best=true]` those for which it holds, `rows[]` all. It must
find one value, or begin with `mean`, `median`, `max` or `min`. `KEY / KEY`, `KEY / OTHER.json KEY` and `KEY / 1024` divide.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_STEP = re.compile(r"([^.\[\]]+)|\[([^\]]*)\]")
_AGGREGATES: dict[str, Callable[[list[float]], float]] = {"mean": statistics.fmean, "median": statistics.median, "max": max, "min": min}


@cache
def text_of(name: str) -> str:
    return (RESULTS / name).read_text(encoding="utf-8")


@cache
def document_of(name: str) -> Any:
    return json.loads(text_of(name))


def spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def values_at(document: Any, key: str) -> list[Any]:
    """All values that a key without arithmetic finds."""
    nodes = [document]
    for name, selector in _STEP.findall(key):
        if name:
            nodes = [node[name] for node in nodes]
        elif selector.isdigit():
            nodes = [node[int(selector)] for node in nodes]
        else:
            items = [item for node in nodes for item in (node if isinstance(node, list) else [node])]
            field, _, wanted = selector.partition("=")
            nodes = [item for item in items if not field or spelled(item.get(field)) == wanted]
    return nodes


def number_at(document: Any, key: str) -> float:
    above, slash, below = key.partition(" / ")
    if slash:
        if below.isdigit():
            return number_at(document, above) / float(below)
        other, json_file, other_key = below.partition(".json ")
        divisor = number_at(document_of(f"{other}.json"), other_key) if json_file else number_at(document, below)
        return number_at(document, above) / divisor
    for name, aggregate in _AGGREGATES.items():
        if key.startswith(f"{name} "):
            return aggregate(values_at(document, key.removeprefix(f"{name} ")))
    (value,) = values_at(document, key)
    return float(value)
