"""The old names of the glossary's table are gone from the source, but for those that it calls "not renamed yet"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_YET = {"Span"}  # supermodel/batch.py: a range of tokens, another thing than `ReplicaPlacement`


def old_classes() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    renamed = [old for old, new in rows if "not renamed yet" not in new]
    return {name for old in renamed for name in re.findall(r"`(?:\w+\.)?([A-Z]\w+)`", old)} - NOT_YET


def test_no_class_has_an_old_name_of_the_glossary() -> None:
    classes = {
        node.name: path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "src").rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    assert len(old_classes()) > 20 and not {name: classes[name] for name in old_classes() & classes.keys()}
