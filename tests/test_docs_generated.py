"""The committed pages of docs/ are what their generators make of the code and of bench/results."""

from __future__ import annotations

import pytest

from docs.generate import DOCS, PAGES, made


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_up_to_date(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == made(page), "run python -m docs.generate"
