"""Writes the pages of docs/ that are made from code and from bench/results.

    python -m docs.generate            # writes them
    python -m docs.generate --check    # exits with 1 if a committed page differs

A page, or the part of one between its two marks, belongs to this program; `tests/test_docs_generated.py` compares them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from docs.generators.benchmarks import benchmark_tables
from docs.generators.command_line import command_line
from docs.generators.http_api import http_api
from docs.generators.scale import scale_table

DOCS = Path(__file__).parent
PAGES: dict[str, tuple[str, Callable[[], str]]] = {
    "reference/command-line.md": ("commands", command_line),
    "reference/http.md": ("routes", http_api),
    "benchmarks.md": ("tables", benchmark_tables),
    "reference/scale.md": ("scale", scale_table),
}


def marks(name: str) -> tuple[str, str]:
    return f"<!-- begin: {name}, by python -m docs.generate -->", f"<!-- end: {name} -->"


def made(page: str) -> str:
    """The whole page as it must be: the committed text around the marks, and between them what is generated now."""
    name, generator = PAGES[page]
    begin, end = marks(name)
    text = (DOCS / page).read_text(encoding="utf-8")
    head, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise SystemExit(f"docs/{page} has no marks {begin} and {end}")
    return f"{head}{begin}\n\n{generator().strip()}\n\n{end}{rest.partition(end)[2]}"


def stale(pages: Iterable[str] = PAGES) -> list[str]:
    return [page for page in pages if (DOCS / page).read_text(encoding="utf-8") != made(page)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        found = stale()
        if found:
            print(f"run python -m docs.generate: {', '.join(found)} would change")
        sys.exit(bool(found))
    for page in PAGES:
        (DOCS / page).write_text(made(page), encoding="utf-8")


if __name__ == "__main__":
    main()
