"""The fit finds constants that points were made with, leaves held-out points alone, and what is shipped is what it gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cost_fit import FITTED, Measured, constants, fit, predict, read_points
from tlora.shape.hardware import EXTRAPOLATED, cost_model

RESULTS = sorted(Path("bench/results").glob("h200_*_points_*.json"))
TRUTH = (20_000.0, 0.004, 0.03, 0.0005)


def points() -> list[Measured]:
    sizes = [(128, 1), (512, 1), (2048, 1), (4096, 8), (8192, 8), (1024, 1)]
    return [Measured(f"{n}x{m}", n, m, predict(TRUTH, n, m), n == 1024, "made") for n, m in sizes]


def test_the_constants_that_points_were_made_with_are_found():
    found = fit(points())
    assert found.values == pytest.approx(TRUTH, rel=0.01)
    assert max(abs(error) for error in [*found.errors.values(), *found.held_out.values()]) < 0.002


def test_a_point_that_is_held_out_changes_nothing_but_its_own_error():
    *others, held = points()
    worse = fit([*others, Measured(held.name, held.tokens, held.members, 3 * held.seconds, True, "made")])
    assert worse.values == fit(points()).values
    assert worse.held_out[held.name] == pytest.approx(1 / 3 - 1, abs=0.01)


def test_points_of_trl_are_not_those_of_peft(tmp_path: Path):
    content = json.loads(next(file for file in RESULTS if file.name.endswith("8b_peft.json")).read_text())
    content["rows"] += [row | {"system": "trl"} for row in content["rows"]]
    mixed = tmp_path / "mixed.json"
    mixed.write_text(json.dumps(content))
    half = len(content["rows"]) // 2
    assert {kernels: len(of["llama-3-8b"]) for kernels, of in read_points([mixed]).items()} == {"peft": half, "trl": half}


def test_the_speed_of_trl_is_fitted_with_one_base_and_has_its_ratio_to_pefts_with_others():
    found = constants(read_points(RESULTS), "h200")
    speeds = {base: entry["fields"]["tokens_per_second"] for base, entry in found["trl"].items()}
    ratios = {base: speed["value"] / found["peft"][base]["fields"]["tokens_per_second"]["value"] for base, speed in speeds.items()}
    assert list(ratios.values()) == pytest.approx([ratios["llama-3-8b"]] * 3, rel=1e-3)
    assert [base for base, speed in speeds.items() if not speed["source"].startswith(EXTRAPOLATED)] == ["llama-3-8b"]


def test_given_speed_and_members_are_kept():
    assert fit(points(), 10_000.0, 0.25).values[0::3] == (10_000.0, 0.25)


def test_what_is_shipped_is_what_the_points_give():
    shipped = json.loads(Path("src/tlora/shape/constants/h200_from_128.json").read_text())
    again = constants(read_points(RESULTS), "h200")
    for kernels in ("tlora", "peft", "trl"):
        for base, entry in shipped["h200-from-128"][kernels].items():
            for name in FITTED:
                assert again[kernels][base]["fields"][name]["value"] == pytest.approx(entry["fields"][name]["value"], rel=0.02, abs=2e-4)
            assert [row["tokens"] for row in entry["points"]] == [row["tokens"] for row in again[kernels][base]["points"]]


def test_of_ours_the_fit_is_within_7_percent_where_it_was_not_fitted():
    shipped = json.loads(Path("src/tlora/shape/constants/h200_from_128.json").read_text())["h200-from-128"]["tlora"]
    held = [abs(row["error"]) for entry in shipped.values() for row in entry["points"] if row["held_out"]]
    assert len(held) == 6
    assert sorted(held)[-2] <= 0.05 and max(held) <= 0.07


def test_the_model_predicts_as_the_fit_does():
    found = cost_model("h200-from-128")
    values = [getattr(found.constants["llama-3-8b"], name) for name in FITTED]
    assert found.micro_batch_seconds("llama-3-8b", 512, 1, 1, 3) == pytest.approx(predict(values, 512, 3))
    assert found.constants["qwen3-1.7b"].source["exchange_seconds"].startswith(EXTRAPOLATED)
