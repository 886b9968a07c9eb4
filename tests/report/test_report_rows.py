"""Reading torn files, and thinning and smoothing without losing what a person must see."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.report.rows import buckets, column, number, read_json, read_rows, smooth, smoothing_window, thin

SERIES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=300)


def test_read_rows_skips_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n\n[2]\n{"step": 2, "loss": NaN}\n\xff\xfe\n{"ste{"step": 3}\n{"step": 4}\n{"step": 5, "lo')
    assert [row["step"] for row in read_rows(path)] == [1, 2, 4]


def test_read_rows_of_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.jsonl") == []
    assert read_rows(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_read_json_of_what_is_no_object_is_empty(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    assert read_json(path) == {}


def test_number_and_column() -> None:
    assert number(3) == 3.0 and number(10**400) == math.inf and number(-(10**400)) == -math.inf
    assert all(math.isnan(number(value)) for value in (None, True, "3", [], math.nan))
    first, second = column([{"loss": 2}, {"eval_loss": 1}], "loss")
    assert first == 2.0 and math.isnan(second)


@given(SERIES, st.integers(1, 100))
def test_smooth_is_the_decayed_mean_of_what_came_before(values: list[float], window: int) -> None:
    decay = 1 - 1 / window
    for at, smoothed in enumerate(smooth(values, window)):
        if not math.isfinite(values[at]):
            assert math.isnan(smoothed)
            continue
        before = [(other, value) for other, value in enumerate(values[: at + 1]) if math.isfinite(value)]
        weights = [decay ** (at - other) for other, _ in before]
        expected = sum(weight * value for weight, (_, value) in zip(weights, before, strict=True)) / sum(weights)
        assert smoothed == pytest.approx(expected, rel=1e-6, abs=1e-4)


@given(SERIES, SERIES, st.integers(1, 100))
def test_smooth_begins_with_the_first_value_and_knows_nothing_of_later_ones(values: list[float], more: list[float], window: int) -> None:
    smoothed = smooth(values, window)
    assert smooth([*values, *more], window)[: len(values)] == [pytest.approx(value, rel=1e-12, nan_ok=True) for value in smoothed]
    assert smoothed[0] == values[0] or not math.isfinite(values[0])


@pytest.mark.parametrize(("longest", "window"), [(0, 3), (120, 3), (400, 10), (4000, 100), (10**6, 100)])
def test_the_window_grows_with_the_longest_series(longest: int, window: int) -> None:
    assert smoothing_window(longest) == window


@given(SERIES, st.integers(7, 80))
def test_thin_keeps_order_ends_and_the_limit(values: list[float], limit: int) -> None:
    kept = thin([values, values], limit)
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == len(values) - 1
    assert len(kept) <= max(limit, 2)
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [values[at] for at in kept if math.isfinite(values[at])]
        assert max(shown) == max(finite) and min(shown) == min(finite)
    assert len(finite) == len(values) or any(not math.isfinite(values[at]) for at in kept)


def test_thin_keeps_spikes_of_every_series_and_single_nans() -> None:
    loss, norm = [1.0] * 10_000, [2.0] * 10_000
    loss[4321], norm[7777], loss[9000] = 9.0, 50.0, math.nan
    kept = thin([loss, norm], 500)
    assert {4321, 7777, 9000} <= set(kept) and len(kept) <= 500


@given(st.integers(0, 500), st.integers(1, 100))
def test_buckets_partition_evenly(length: int, limit: int) -> None:
    spans = buckets(length, limit)
    assert [at for span in spans for at in span] == list(range(length))
    assert len(spans) == min(length, limit)
    assert not spans or max(map(len, spans)) - min(map(len, spans)) <= 1
