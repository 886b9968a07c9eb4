"""`layout: streamed`: adapters have the bytes of those over a resident base, also after a kill; what is said of it, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import tlora
from tests.engine.tiny_runs import job, run_spec, same_bytes, save_base, sentence, train, train_killed, write_rows
from tlora.engine.check import check
from tlora.engine.watcher import Watcher
from tlora.errors import CapacityError, ConfigError
from tlora.sharing import host_memory
from tlora.sharing.layer_stream import LayerStream

JOBS = ("a", "b", "pairs")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More layers than the two that are on the device at a time."""
    return save_base(tmp_path_factory.mktemp("deep") / "base", num_hidden_layers=5)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """With dropout, with a part of the linears, and from pairs, which also run without an adapter."""
    directory, rng = tmp_path_factory.mktemp("data"), random.Random(5)
    data, pairs = str(write_rows(directory / "d.jsonl", 24)), directory / "pairs.jsonl"
    found = [{"prompt": sentence(rng, 1, 3), "chosen": sentence(rng, 1, 3), "rejected": sentence(rng, 2, 6)} for _ in range(12)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in found))
    return [
        job("a", {"path": data, "eval_size": 4}, save_steps=2, lora_dropout=0.1, eval_steps=2),
        job("b", data, r=9, target_modules=["q_proj", "down_proj"], save_steps=2, seed=3),
        job("pairs", str(pairs), objective="dpo", save_steps=2, batch_size=3, max_steps=4),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_adapters_are_those_over_a_resident_base(
    dtype: str, deep: Path, orders: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[LayerStream] = []
    made = LayerStream.__init__

    def watch(self: LayerStream, *args: Any) -> None:
        made(self, *args)
        streams.append(self)

    settings: dict[str, Any] = {"dtype": dtype, "deterministic": True}
    train(deep, tmp_path / "resident", orders, **settings)
    monkeypatch.setattr(LayerStream, "__init__", watch)
    said: list[str] = []
    train(deep, tmp_path / "streamed", orders, layout="streamed", watcher=Watcher(note=said.append), **settings)
    same_bytes(tmp_path / "streamed", tmp_path / "resident", JOBS)
    (stream,) = streams
    assert len(stream._slots) == 2 and stream.stats().layers > 6 * 6, "layers were not fetched anew in each micro-batch"
    facts = json.loads((tmp_path / "streamed" / "run.json").read_text())
    assert facts["layout"] == "streamed" and facts["streamed"]["slots"] == 2 and facts["streamed"]["link_gb_per_second"] > 0
    (line,) = [line for line in said if "streamed from the host's memory" in line]
    assert "2 of 5 layers at a time" in line and "GB/s" in line and "exposed" in line
    assert "streamed" not in json.loads((tmp_path / "resident" / "run.json").read_text())


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes_streamed_or_not(deep: Path, orders: list[dict[str, Any]], tmp_path: Path) -> None:
    train(deep, tmp_path / "whole", orders, deterministic=True)
    for first, then in (("streamed", "streamed"), ("streamed", "auto"), ("auto", "streamed")):
        out = tmp_path / f"{first}-{then}"
        train_killed(deep, out, orders, deterministic=True, layout=first)
        train(deep, out, orders, deterministic=True, layout=then, resume=True)
        same_bytes(out, tmp_path / "whole", JOBS)


def test_check_says_what_it_costs(deep: Path, orders: list[dict[str, Any]], tmp_path: Path) -> None:
    plain, streamed = (check(run_spec(deep, tmp_path / "out", orders, layout=each), device="cpu") for each in ("auto", "streamed"))
    assert not plain.streamed and not streamed.problems and streamed.stream_cost is not None
    assert "2 of 5 layers at a time on the device): the jobs file orders it" in streamed.streamed
    cost = streamed.stream_cost
    assert cost.exposed_seconds == max(0.0, cost.link_seconds - cost.product_seconds)
    # On a CPU the layers are in the host's memory, and two slots beside them.
    assert plain.base_bytes < streamed.base_bytes < 1.5 * plain.base_bytes


def test_too_little_host_memory_is_said_before_the_base_is_read(
    deep: Path, orders: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: 1000)
    why = "have .* to be streamed from the host's memory, and must take at most 90% of .* that are free there. Free host memory"
    with pytest.raises(CapacityError, match=why):
        train(deep, tmp_path / "out", orders, layout="streamed")
    (problem,) = check(run_spec(deep, tmp_path / "out", orders, layout="streamed"), device="cpu").problems
    assert "Free host memory" in problem


def test_a_device_too_small_for_two_layers_is_said(deep: Path, orders: list[dict[str, Any]], tmp_path: Path) -> None:
    run = run_spec(deep, tmp_path / "out", orders, layout="streamed", memory_limit=100_000)
    (problem,) = check(run, device="cpu").problems
    assert "for two layers and what is in no layer" in problem and "Take a smaller base, or raise memory_limit" in problem


def test_several_processes_hold_a_base_in_parts_instead(deep: Path, orders: list[dict[str, Any]], tmp_path: Path) -> None:
    (problem,) = check(run_spec(deep, tmp_path / "out", orders[:1], layout="streamed"), device="cpu", gpus=2).problems
    assert problem == "layout: streamed is for one GPU, and these are 2, which can hold a base in parts. Take it out, or --gpus"
    with pytest.raises(ConfigError, match="layout: streamed is for one GPU"):
        tlora.train(run_spec(deep, tmp_path / "two", orders[:1], layout="streamed"), device="cpu", gpus=2)
