"""Measured numbers in the README and in docs/ are what the files of bench/results say.

Such a number is a link whose title is the key of its value: [17,181](bench/results/FILE.json "rows[system=together].tokens_per_second").
Keys are those of `bench/result_keys.py`. 12% shows a share of 0.12, +5% and -5% a ratio of 1.05 and 0.95. A text in "quotes" must occur
in what the key finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.result_keys import document_of, number_at, spelled, text_of, values_at

ROOT = Path(__file__).parents[1]
LINK = re.compile(r'\[([^\[\]]+)\]\((?:\.\./)*(bench/results/[^\s)]+\.json)(?: "([^"]+)")?\)')
ANY_LINK = re.compile(r"\[([^\[\]]*)\]\([^)]*\)")
NUMBER = re.compile(r"(?<![\w.,/-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w/]|-\w|[.,]\d)%?")
SENTENCE_END = re.compile(r'(?<=[.!?])\s+(?=[A-Z`"*\[])')


@dataclass(frozen=True)
class Tie:
    """What is shown, and where its value is."""

    shown: str
    file: str
    key: str


def units(text: str) -> Iterator[str]:
    """Each row of a table, and each sentence; code blocks are left out."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=- )", text):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        yield from rows or SENTENCE_END.split(" ".join(block.split()))


def ties(text: str) -> list[Tie]:
    return [Tie(*found) for found in LINK.findall(text) if found[2]]


def untied_numbers(unit: str) -> list[str]:
    """Numbers of a sentence or row, but for those that are tied to a key."""
    return NUMBER.findall(ANY_LINK.sub(lambda link: "" if ties(link[0]) else link[1], unit))


def agrees(tie: Tie) -> bool:
    """Whether the file says what is shown, up to its rounding."""
    document = document_of(Path(tie.file).name)
    if tie.shown.startswith('"'):
        return any(tie.shown.strip('"') in spelled(value) for value in values_at(document, tie.key))
    value = number_at(document, tie.key)
    if tie.shown.endswith("%"):
        value = 100 * (value - 1 if tie.shown[0] in "+-" else value)
    digits = tie.shown.rstrip("%").replace(",", "")
    return abs(value - float(digits)) <= 0.5 * _last_place(digits) + 1e-9


def _last_place(digits: str) -> float:
    """What one more in the last digit means."""
    return 10.0 ** -len(digits.partition(".")[2])


PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/benchmarks-history.md")}
CITING = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if page.name != "benchmarks.md")]  # that one is generated
TIES = [tie for page in CITING for tie in ties(page.read_text(encoding="utf-8"))]


def test_each_number_is_what_its_file_says() -> None:
    wrong = [f"{tie.shown} is not what {tie.file} has at {tie.key}" for tie in TIES if not agrees(tie)]
    assert len(TIES) > 100 and not wrong, "\n".join(wrong)


def test_numbers_beside_a_result_file_are_tied_to_a_key_of_it() -> None:
    """In a table all but the first column; in a sentence with a link to a file all but those that stand in the file as shown: settings."""
    wrong: list[str] = []
    for unit in (unit for page in PAGES.values() for unit in units(page)):
        if unit.startswith("|"):
            first, *others = unit.strip().strip("|").split(" | ")
            wrong += [f"{number} in the row {first!r}" for cell in others for number in untied_numbers(cell)]
        files = [file for _, file, _ in LINK.findall(unit)]
        if files and not unit.startswith("|"):
            wrong += [f"{number} in {unit!r}" for number in untied_numbers(unit) if not any(_has(file, number) for file in files)]
    assert not wrong, 'write [NUMBER](bench/results/FILE.json "KEY"), as tests/test_readme_numbers.py explains:\n' + "\n".join(wrong)


def _has(file: str, number: str) -> bool:
    """Whether the number stands in the file as it is shown."""
    return re.search(rf"(?<![\w.]){re.escape(number.replace(',', ''))}(?![\w]|\.\d)", text_of(Path(file).name)) is not None


def test_files_that_are_named_exist() -> None:
    assert not [file for _, file, _ in LINK.findall("".join(PAGES.values())) if not (ROOT / file).is_file()]
