"""The constants that are shipped: each with its source, true to the points that they were fitted to."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tlora.errors import ConfigError
from tlora.shape.cost import BaseConstants
from tlora.shape.hardware import LIVE_GPU, cost_model, extrapolated_fields, load_constants, nearest_base

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "src/tlora/shape/constants").glob("*.json"))
SHIPPED: dict[str, dict[str, dict[str, Any]]] = {}
for shipped in FILES:
    for type_of_gpu, sets_of_it in json.loads(shipped.read_text()).items():
        for kernels_of_it, bases_of_it in sets_of_it.items():
            SHIPPED.setdefault(type_of_gpu, {}).setdefault(kernels_of_it, {}).update(bases_of_it)
ALL = [(gpu, kernels, base) for gpu, sets in SHIPPED.items() for kernels, bases in sets.items() for base in bases]
EACH = pytest.mark.parametrize(("gpu", "kernels", "base"), ALL)
EACH_OF_LARGE = pytest.mark.parametrize(("gpu", "kernels", "base"), [each for each in ALL if each[0] == "h200"])
NUMBERS = [f.name for f in fields(BaseConstants) if f.name != "source"]


def points(gpu: str, kernels: str, base: str) -> list[dict[str, Any]]:
    return SHIPPED[gpu][kernels][base]["points"]


def test_both_kernels_know_the_same_bases() -> None:
    of_small_steps = ["llama-3-70b", "llama-3-8b", "qwen3-0.6b", "qwen3-1.7b"]
    for gpu, bases in (("h200", ["llama-3-8b", "qwen3-0.6b"]), ("h200-from-128", of_small_steps)):
        for kernels in ("tlora", "peft"):
            assert sorted(SHIPPED[gpu][kernels]) == bases
    loaded = [(g, k, b) for g, sets in load_constants().items() for k, bases in sets.items() for b in bases]
    assert sorted(loaded) == sorted(ALL)


@EACH
def test_every_field_has_a_source_and_the_files_named_in_it_exist(gpu: str, kernels: str, base: str) -> None:
    constants, given = load_constants()[gpu][kernels][base], SHIPPED[gpu][kernels][base]["fields"]
    assert list(constants.source) == NUMBERS and set(given) == set(NUMBERS)
    assert [getattr(constants, name) for name in NUMBERS] == [given[name]["value"] for name in NUMBERS]
    assert all(type(given[name]["value"]) in (int, float) and 0 <= getattr(constants, name) < math.inf for name in NUMBERS)
    assert min(constants.tokens_per_second, constants.base_bytes, constants.gpu_bytes) > 0
    texts = [*constants.source.values(), *(point["source"] for point in points(gpu, kernels, base))]
    for text in texts:
        assert text.strip()
        for word in text.replace(",", " ").replace(")", " ").replace("(", " ").replace(";", " ").replace(":", " ").split():
            assert not word.startswith("bench/results/") or (ROOT / word).is_file(), word


@EACH
def test_the_points_are_in_the_files_that_they_name(gpu: str, kernels: str, base: str) -> None:
    for point in points(gpu, kernels, base):
        name = point["source"].split(",")[0]
        if not name.startswith("bench/results/") or "recomputed layers" in point["source"]:
            continue
        rows = json.loads((ROOT / name).read_text())["rows"]
        assert any(row.get("tokens_per_second") == pytest.approx(point["tokens_per_second"], abs=0.06) for row in rows), point


@EACH_OF_LARGE
def test_the_points_are_met_within_two_percent(gpu: str, kernels: str, base: str) -> None:
    cost = cost_model(gpu, kernels)
    for point in points(gpu, kernels, base):
        assert cost.capacity(base, point["tokens"], 1, 1, point["members"]) == pytest.approx(point["tokens_per_second"], rel=0.02)


@pytest.mark.parametrize("kernels", ["tlora", "peft"])
def test_speed_and_launch_are_the_least_squares_fit_of_the_points(kernels: str) -> None:
    constants = load_constants()["h200"][kernels]["llama-3-8b"]
    measured = points("h200", kernels, "llama-3-8b")
    tokens, members, speed = (np.array([float(p[key]) for p in measured]) for key in ("tokens", "members", "tokens_per_second"))
    seconds = tokens / speed
    known = 1 - constants.member_seconds * (members - 1) / seconds
    (launch, per_token), *_ = np.linalg.lstsq(np.stack([1 / seconds, tokens / seconds], axis=1), known, rcond=None)
    assert constants.launch_seconds == pytest.approx(launch, rel=1e-3)
    assert constants.tokens_per_second == pytest.approx(1 / per_token, rel=1e-3)


def test_measured_peaks_of_memory_are_met_within_two_percent() -> None:
    found = json.loads((ROOT / "bench/results/h200_memory.json").read_text())
    parameters = 2 * (8 + 16 + 32 + 64) * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)  # eight all-linear adapters of Llama-3-8B's shape
    cost = cost_model()
    rows = [row for row in found["rows"] if not row["recomputed_layers"]]
    assert len(rows) == 3
    for row in rows:
        assert cost.memory_bytes("llama-3-8b", parameters, row["token_budget"]) == pytest.approx(row["peak_bytes"], rel=0.02)


@EACH_OF_LARGE
def test_what_nobody_measured_is_told(gpu: str, kernels: str, base: str) -> None:
    constants = load_constants()[gpu][kernels][base]
    found = extrapolated_fields(constants)
    assert {"member_seconds", "exchange_gpu_seconds", "exchange_between_nodes_seconds"} <= set(found)
    assert not {"base_bytes", "gpu_bytes", "activation_bytes_per_token"} & set(found)
    assert all(text and constants.source[name].endswith(text) for name, text in found.items())


def test_constants_can_be_scaled_and_say_so() -> None:
    plain, scaled = cost_model().constants, cost_model(scale={"launch_seconds": 1.3, "member_seconds": 0.7}).constants
    for base, constants in plain.items():
        found = scaled[base]
        assert found.launch_seconds == pytest.approx(1.3 * constants.launch_seconds)
        assert found.member_seconds == pytest.approx(0.7 * constants.member_seconds)
        assert found.tokens_per_second == constants.tokens_per_second
        assert found.source["launch_seconds"] == f"{constants.source['launch_seconds']}; scaled by 1.3"
        assert set(extrapolated_fields(found)) == set(extrapolated_fields(constants))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpu": "abacus"}, "'abacus': there is no such type of GPU; name one of h200"),
        ({"kernels": "fast"}, "'fast': there is no such set of kernels on h200; name one of peft, tlora"),
        ({"bases": {"mine": "llama"}}, "'llama': there is no such base with .* tlora on h200; name one of llama-3-8b, qwen3-0.6b"),
        ({"scale": {"speed": 1.0}}, "'speed': there is no such constant; scale one of tokens_per_second, "),
        ({"scale": {"launch_seconds": 0.0}}, "launch_seconds: 0.0 must be a number above 0"),
        ({"scale": {"launch_seconds": float("nan")}}, "launch_seconds: nan must be a number above 0"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cost_model(**arguments)


def test_the_nearest_base_is_so_by_the_ratio_of_sizes() -> None:
    measured = cost_model(LIVE_GPU).constants
    for name, constants in measured.items():
        for factor in (0.9, 1.0, 1.1):
            assert measured[nearest_base(factor * constants.base_bytes)].base_bytes == constants.base_bytes, name
    sizes = {name: constants.base_bytes for name, constants in measured.items()}
    assert (nearest_base(1.0), nearest_base(1e15)) == (min(sizes, key=sizes.__getitem__), max(sizes, key=sizes.__getitem__))
