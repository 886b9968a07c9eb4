"""The old names of the glossary's table are gone from the source."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
ONE_OF_TWO = {"Draft", "Guard", "Line"}  # one of the two has kept its name


def old_classes() -> set[str]:
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {name for old, _ in rows for name in re.findall(r"`(?:\w+\.)?([A-Z]\w+)`", old)}


def test_no_class_has_an_old_name_of_the_glossary() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    assert len(old_classes()) > 20 and old_classes() >= ONE_OF_TWO
    assert not {name: places[name] for name in (old_classes() - ONE_OF_TWO) & places.keys()}
    assert {name: len(places[name]) for name in ONE_OF_TWO} == dict.fromkeys(ONE_OF_TWO, 1)
