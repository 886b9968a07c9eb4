"""`bench.layer_costs`: lines through neighbouring sizes, and a group of jobs on a CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench import layer_costs
from tlora.engine.layer_speed import LayerSpeed, MadeUpBase


def test_a_line_through_each_two_sizes() -> None:
    first, second = layer_costs.lines_through({4000: 7.3e-3, 1000: 2.2e-3, 2000: 3.8e-3})
    assert first == {"from": 1000, "to": 2000, "token_us": pytest.approx(1.6), "fixed_us": pytest.approx(600)}
    assert second == {"from": 2000, "to": 4000, "token_us": pytest.approx(1.75), "fixed_us": pytest.approx(300)}
    assert layer_costs.lines_through({1000: 1e-3}) == []


def test_each_group_is_timed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[MadeUpBase] = []

    def measure(_device: object, _dtype: object, base: MadeUpBase) -> LayerSpeed:
        timed.append(base)
        seconds: Mapping[int, float] = {127 * count: 1e-3 * count for count in base.samples}
        return LayerSpeed(1e12, 0.0, seconds)

    monkeypatch.setattr(layer_costs, "measure_layers", measure)
    order = ["--tiny", "--device", "cpu", "--ranks", "8", "8,16", "--samples", "2,4", "--json", str(tmp_path / "found.json")]
    assert layer_costs.main(order) == 0
    assert [(base.ranks, base.samples, base.hidden_size) for base in timed] == [((8,), (2, 4), 64), ((8, 16), (2, 4), 64)]
    groups = json.loads((tmp_path / "found.json").read_text())["groups"]
    assert [group["ranks"] for group in groups] == [[8], [8, 16]]
    assert groups[1]["layer_seconds_by_tokens"] == {"254": 2e-3, "508": 4e-3}
