"""The chosen layout beside all others: what counts as a candidate, and the orders that `bench.real_jobs` gets."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import chosen_plan, real_jobs


def row(case: str, rate: float | None, *errors: str, said: str = "") -> dict[str, Any]:
    return {"case": case, "errors": list(errors), "steady_tokens_per_second": rate, "notes": [(0.0, said)]}


def test_refused_layouts_are_no_candidates() -> None:
    rows = [row("plain", 90.0), row("whole", 90.0), row("stages", 100.0), row("shared", 500.0, "does not fit"), row("streamed", None)]
    found = chosen_plan.compare(rows)
    assert found["best"] == "stages" and found["chosen_over_best"] == pytest.approx(0.9)
    assert found["refused"] == {"shared": "does not fit", "streamed": "too few steps to measure"}
    assert chosen_plan.compare([row("plain", 1.0, "failed"), row("whole", 2.0)])["chosen_over_best"] is None


@pytest.mark.parametrize(
    ("taken", "said"),
    [
        ("whole", "each GPU holds the whole base, 14.96 GiB"),
        ("shared", "the base does not fit on one GPU (12 GiB): 8.0 GiB of the base's 15 GiB on each of 2 GPUs"),
        ("stages", "1.33 times as fast, by prediction, as whole on 2 GPUs: GPU 0: layers 0 to 16, 8 GiB; GPU 1: layers 17 to 31, 8 GiB"),
        (None, "starting 2 ranks"),
    ],
)
def test_each_layout_is_launched_once_by_the_same_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str | None, said: str
) -> None:
    launched: list[tuple[str, str | None]] = []
    kinds: list[str] = []

    def run(options: argparse.Namespace) -> dict[str, Any]:
        launched.extend((order.case, options.gpus) for order in options.orders)
        kinds.extend(order.kind for order in options.orders)
        (options.caches).mkdir(parents=True, exist_ok=True)
        assert (options.shape, options.jobs.count(",") + 1, options.settings) == ("tiny", 2, ["dtype=float32"])
        return {"launches": [row(order.case, 50.0 if order.case == "plain" else 40.0, said=said) for order in options.orders]}

    monkeypatch.setattr(real_jobs, "run_benchmark", run)
    file = tmp_path / "out.json"
    order = ["--points", "tiny:2", "--device", "cpu", "--set", "dtype=float32", "--commit", "abc", "--json", str(file)]
    assert chosen_plan.main(order) == 0
    forms = [form for form in ("whole", "shared", "stages") if form != taken]
    assert launched == [("plain", "2"), *((form, "2") for form in forms), ("streamed", None)]
    assert kinds == ["cold", *("warm" for _ in launched[1:])]
    (point,) = json.loads(file.read_text())["points"]
    assert point["chosen_over_best"] == 1.0 and point["best"] == "plain" and point["taken"] == taken


def test_an_unknown_point_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("nothing:2", "tiny", "tiny:0"):
        with pytest.raises(SystemExit):
            chosen_plan.read_options(["--points", text])
    assert "is not SHAPE:JOBS with a shape of" in capsys.readouterr().err
