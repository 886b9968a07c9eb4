"""How numbers and names read on a page."""

from __future__ import annotations

import math

import pytest

from tlora.wording.numbers import are, count_text, duration_text, field_text, gib, loss_text, quantity, setting_text, shorten, time_unit


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (None, "\u2013"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-math.inf, "\u2212∞"),
        (1.23456, "1.2346"),
        (0.0, "0.0000"),
        (2e-5, "2.000e-05"),
    ],
)
def test_loss_text(loss: float | None, text: str) -> None:
    assert loss_text(loss) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (9999, "9,999"), (12_345, "12.3 k"), (999_999, "1000 k"), (2_741_190, "2.74 M"), (8e9, "8 B"), (math.nan, "\u2013")],
)
def test_count_text(count: float, text: str) -> None:
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(24, "24 bytes"), (5000, "4.9 KiB"), (12 << 20, "12.0 MiB"), (1 << 29, "0.50 GiB"), (1500 << 30, "1,500.00 GiB")],
)
def test_gib_never_calls_a_few_bytes_none(size: int, text: str) -> None:
    assert gib(size) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (quantity(1, "job"), "1 job"),
        (quantity(0, "job"), "0 jobs"),
        (quantity(1234, "job"), "1,234 jobs"),
        (quantity(1, "process", "processes"), "1 process"),
        (quantity(2, "job was", "jobs were"), "2 jobs were"),
        (" ".join(map(are, (0, 1, 2))), "are is are"),
    ],
)
def test_one_is_singular(text: str, words: str) -> None:
    assert text == words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "\u2013"), (math.nan, "\u2013"), (4.25, "4.2 s"), (240, "4 min 0 s"), (7384, "2 h 3 min"), (200_000, "2 d 7 h")],
)
def test_duration_text(seconds: float | None, text: str) -> None:
    assert duration_text(seconds) == text


def test_setting_text_writes_what_one_would_write() -> None:
    assert [setting_text(value) for value in (1e-5, 0.0003, 8, True, "cosine")] == ["1e-05", "0.0003", "8", "True", "cosine"]


def test_field_text_writes_whole_numbers_as_such() -> None:
    found = [field_text(value) for value in (50.0, 0.004, 16, "all-linear", None, ["q_proj"], True)]
    assert found == ["50", "0.004", "16", "all-linear", "null", '["q_proj"]', "true"]


def test_shorten_keeps_both_ends_and_the_length() -> None:
    name = "sweep-of-the-support-job-r32-lr3e-4"
    assert shorten(name, 24).endswith("r32-lr3e-4") and shorten(name, 24).startswith("sweep-of-th") and len(shorten(name, 24)) == 24
    assert shorten("polite", 24) == "polite"


def test_time_unit_by_length() -> None:
    assert [time_unit(seconds)[1] for seconds in (math.nan, 90, 3600, 40_000)] == ["s", "s", "min", "h"]
