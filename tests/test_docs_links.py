"""Every relative link of a page leads to a file, and every anchor to a heading of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "demo").glob("*.md")]
LINK = re.compile(r"\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
MENTION = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.md")
CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_pages_that_code_names_exist() -> None:
    """Messages, help texts and comments name pages of docs/."""
    files = [file for room in ("src", "tests", "bench", "demo", "examples") for file in (ROOT / room).rglob("*.py")]
    named = {(name, file.relative_to(ROOT).as_posix()) for file in files for name in MENTION.findall(file.read_text(encoding="utf-8"))}
    assert named and not [each for each in sorted(named) if not (ROOT / each[0]).is_file()]


DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name)
def test_a_decision_has_its_four_parts_and_is_listed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {int(page.name[:3])}. ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Measured", "Consequences"]
    assert f"]({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*(ROOT / "docs").glob("explanation/*.md"), ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    """`engine/train.py` is a file of src/tlora, others are from the root."""
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|json|md))`", page.read_text(encoding="utf-8")))
    assert not [
        name for name in sorted(named) if "NNN" not in name and not any((root / name).exists() for root in (ROOT, ROOT / "src" / "tlora"))
    ]
