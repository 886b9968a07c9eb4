"""`bench.families`: what it says of some families, and that the page holds what was found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from bench.families import BEGIN, END, Row, families, look, table

(FOUND,) = (Path(__file__).parents[2] / "bench/results").glob("cpu_*_families.json")
(PINNED,) = re.findall(r"^transformers==(.+)$", (Path(__file__).parents[2] / "constraints.txt").read_text(), re.MULTILINE)
KNOWN = (
    "llama",
    "qwen3",
    "gemma3_text",
    "phi3",
    "mixtral",
    "gpt_oss",
    "mistral3",
    "qwen3_vl",
    "mamba",
    "lfm2",
    "gpt2",
    "qwen3_next",
    "gemma3n",
    "zaya",
)


def recorded() -> dict[str, Row]:
    return {row["family"]: Row(**row | {"adapted": tuple(row["adapted"])}) for row in json.loads(FOUND.read_text())["rows"]}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in ("gpt_oss", "mistral3", "mamba") else pytest.mark.slow) for name in KNOWN]
)
def test_a_family_is_as_it_was_found(family: str) -> None:
    row = look(family, families()[family])
    found = recorded()[family]
    assert (row.state, row.adapted, row.experts) == (found.state, found.adapted, found.experts), row.note


@pytest.mark.skipif(transformers.__version__ != PINNED, reason="another transformers than that of constraints.txt has other families")
def test_the_page_has_what_was_found() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/bases.md").read_text(encoding="utf-8")
    shown, found = text.split(BEGIN)[1].split(END)[0].strip(), list(recorded().values())
    assert shown.splitlines()[2:] == table(found).splitlines()[2:]
    assert {row.family for row in found} == {*families()}
