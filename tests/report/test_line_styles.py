"""Colours and dashes: along the swept field, apart for colour-blind eyes, visible on both grounds, and explained by the key."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from made_runs import write_job, write_run
from pages import PageReader, read_charts

from tlora.report.line_styles import CATEGORIES, job_colours, job_looks, keys_html, sequence_colours
from tlora.report.run_page import report_page
from tlora.report.run_view import RunView, read_run

# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
EYES = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
GROUNDS = ("#ffffff", "#171b21")  # cards of the light and the dark page
JUST_SEEN = 2.3  # CIELAB: the difference that is just noticed side by side


def linear(colour: str) -> list[float]:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]


def lab(colour: str, eye: str) -> tuple[float, float, float]:
    seen = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear(colour), strict=True)))) for row in EYES[eye]]
    xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    parts = [sum(a * b for a, b in zip(row, seen, strict=True)) / full for row, full in zip(xyz, white, strict=True)]
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in parts)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: str, other: str) -> float:
    luminances = [sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True)) for colour in (one, other)]
    light, dark = max(luminances), min(luminances)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("eye", EYES)
def test_colours_stay_apart_for_every_eye(eye: str) -> None:
    for count in (2, 5, 10):
        seen = [lab(colour, eye) for colour in sequence_colours(count)]
        assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 3 * JUST_SEEN
    seen = [lab(colour, eye) for colour in job_colours(CATEGORIES)]
    assert min(math.dist(a, b) for a, b in combinations(seen, 2)) > 5 * JUST_SEEN


@pytest.mark.parametrize("ground", GROUNDS)
def test_colours_are_seen_on_both_grounds(ground: str) -> None:
    assert min(contrast(colour, ground) for colour in [*sequence_colours(10), *job_colours(CATEGORIES)]) > 1.7


def sweep(run_dir: Path, settings: list[dict[str, Any]], name: str = "s") -> RunView:
    names = [f"{name}-{at}" for at in range(len(settings))]
    write_run(run_dir, names, 5)
    rows = [{"step": step, "loss": 3.0 - step, "seconds": step, "num_tokens": step} for step in (1, 2)]
    for job, values in zip(names, settings, strict=True):
        write_job(run_dir, job, rows, sweep_of=name, settings=values)
    return read_run(run_dir)


def test_colour_follows_the_numbers_and_dash_the_second_field(tmp_path: Path) -> None:
    grid = [{"r": rank, "learning_rate": rate} for rank in (32, 4) for rate in (1e-3, 1e-5, 1e-4)]
    run = sweep(tmp_path, grid)
    looks = job_looks(run.jobs)
    low, middle, high = sequence_colours(3)
    assert [looks[job.name].colour for job in run.jobs] == [high, low, middle] * 2
    assert [looks[job.name].dash for job in run.jobs] == ["dash"] * 3 + ["solid"] * 3
    text = PageReader(keys_html(run.jobs)).text
    assert text == "scolour: learning_rate1e-050.00010.001dash: r432"


def test_a_field_of_words_has_categories_and_a_third_field_is_named(tmp_path: Path) -> None:
    settings = [
        {"lr_scheduler_type": kind, "seed": seed, "r": rank} for kind in ("linear", "cosine") for seed in (1, 2, 3) for rank in (4, 8)
    ]
    run = sweep(tmp_path, settings)
    colours = [job_looks(run.jobs)[job.name].colour for job in run.jobs]
    assert colours == [colour for _ in range(2) for colour in sequence_colours(3) for _ in range(2)]  # the numeric field with most values
    assert "not shown by the line: lr_scheduler_type (point at it)" in PageReader(keys_html(run.jobs)).text
    words = sweep(tmp_path / "words", [*settings[:2], settings[6] | {"r": 4}], "w")
    assert len({look.colour for look in job_looks(words.jobs).values()}) == 2


def test_charts_and_key_carry_the_looks_and_names_are_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    run = sweep(tmp_path, [{"data<b>": evil, "r": 4}, {"data<b>": "b", "r": 8}], "sweep")
    page, looks = report_page(run), job_looks(run.jobs)
    for trace in read_charts(page)["Train loss"]["data"]:
        look = looks[trace["legendgroup"]]
        assert f", r {4 if trace['legendgroup'] == 'sweep-0' else 8}<br>" in trace["hovertemplate"] and "<img" not in trace["hovertemplate"]
        assert (trace["line"]["color"], trace["line"]["dash"]) == (look.colour, look.dash)
    reader = PageReader(page)
    assert not {"img", "b>"} & {tag for tag, _ in reader.elements} and f"dash: data<b>{evil}b" in reader.text
