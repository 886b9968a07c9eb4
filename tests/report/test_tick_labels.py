"""Labels of a logarithmic axis, as a browser draws them."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report.made_runs import train_rows, write_job, write_run
from tlora.report.run_page import write_report

_BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
_LABEL = re.compile(r'<g class="ytick"><text ([^>]*)>([^<]*)')
_FONT_PIXELS = 12


@pytest.mark.skipif(_BROWSER is None, reason="no browser is here")
@pytest.mark.parametrize(("low", "high"), [(1.4, 10.5), (0.6, 12.0), (1.8, 3.0)])
def test_labels_of_a_logarithmic_axis_do_not_overlap(low: float, high: float, tmp_path: Path) -> None:
    write_run(tmp_path, ["a"], 100)
    rows = train_rows(random.Random(1), 200, 0.0, 0.5, 900)
    for row in rows:
        row["loss"] = low + (high - low) * 0.97 ** row["step"]
    write_job(tmp_path, "a", rows)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1500", "--virtual-time-budget=8000", "--dump-dom"]
    page = write_report(tmp_path).as_uri()
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([str(_BROWSER), profile, *options, page], capture_output=True, text=True, check=True)
    (chart,) = [figure for figure in done.stdout.split("<figure") if "Train loss</" in figure]
    shown = [
        (float(height[1]), text)
        for attributes, text in _LABEL.findall(chart)
        if "visibility: hidden" not in attributes and (height := re.search(r"translate\(0,([\d.]+)\)", attributes))
    ]
    assert len(shown) >= 4
    heights = sorted(height for height, _ in shown)
    assert min(after - before for before, after in itertools.pairwise(heights)) >= _FONT_PIXELS, shown
