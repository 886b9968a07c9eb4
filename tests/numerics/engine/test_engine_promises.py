"""The promises at the level of `tlora.train`: whole runs, with evaluation, early stopping, queue, sweeps' siblings and bad neighbours."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.tiny_runs import job, rows, sha256, train
from tlora.adapters.layout import AdapterLayout
from tlora.adapters.state import AdapterState
from tlora.engine import job_opening
from tlora.job import JobSpec
from tlora.planning import job_plan, start
from tlora.supermodel import losses, supermodel
from tlora.supermodel.supermodel import SuperModel

Order = dict[str, Any]


def orders(data: Path) -> list[Order]:
    """Four jobs; the second's samples are short, the third stops early or not by its evaluation, the last has a sibling's data."""
    a, b, c, d = (str(data / f"{name}.jsonl") for name in "abcd")
    return [
        job("plain", {"path": a, "eval_size": 5}, r=3, weight_decay=0.1, lora_dropout=0.1, eval_steps=2),
        job("short", b, r=8, batch_size=1, target_modules=["q_proj", "v_proj"], lr_scheduler_type="cosine", max_steps=4, max_grad_norm=0.1),
        job("picky", {"path": c, "eval_size": 11}, r=16, eval_steps=1, early_stopping_patience=2, load_best_model_at_end=True, seed=3),
        job("late", d, r=1, batch_size=7, use_rslora=True, weight=2.5, max_steps=None, num_train_epochs=2),
    ]


def clean(order: Order) -> Order:
    return {key: value for key, value in order.items() if value is not None}


def hashes(base: Path, out: Path, jobs: list[Order], **more: Any) -> dict[str, str]:
    """sha256 of each job's adapter after one deterministic run of them all."""
    results = train(base, out, [clean(order) for order in jobs], deterministic=True, **more)
    return {name: sha256(out / name) for name, result in results.items() if result.status == "done"}


def check_engine_l1(base: Path, out: Path, jobs: list[Order], budgets: tuple[int | str, ...] = ("auto", 256), **more: Any) -> None:
    """Alone = together, in the file's order and backwards, under each token budget."""
    alone: dict[str, str] = {}
    for order in jobs:
        alone |= hashes(base, out / f"alone-{order['name']}", [order], **more)
    assert set(alone) == {order["name"] for order in jobs}
    for i, budget in enumerate(budgets):
        together = hashes(base, out / f"together-{i}", jobs if i % 2 == 0 else list(reversed(jobs)), token_budget=budget, **more)
        assert together == alone, (
            f"with token_budget {budget}: {[n for n in alone if together.get(n) != alone[n]]} have other bytes than alone"
        )


@pytest.mark.soak
def test_l1_of_whole_runs(wide_base: Path, data: Path, tmp_path: Path) -> None:
    check_engine_l1(wide_base, tmp_path, orders(data))


@pytest.mark.usefixtures("two_threads")
def test_l1_of_whole_runs_with_two_threads(wide_base: Path, data: Path, tmp_path: Path) -> None:
    check_engine_l1(wide_base, tmp_path, orders(data)[:2], budgets=(256,), cpu_threads=2)


def evaluations(directory: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["eval_loss"]) for row in rows(directory / "metrics.jsonl") if "eval_loss" in row]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.soak)])
def test_evaluations_are_the_same_to_the_last_bit(dtype: str, wide_base: Path, data: Path, tmp_path: Path) -> None:
    """They decide which step was best and when to stop, so they must not depend on how their sums were grouped."""
    held_out = {"path": str(data / "c.jsonl"), "eval_size": 19}
    still = [job(f"still{i}", held_out, seed=i, max_steps=3, learning_rate=1e-9, eval_steps=1, load_best_model_at_end=True) for i in (0, 1)]
    together = hashes(wide_base, tmp_path / "together", [*still, orders(data)[0]], dtype=dtype, token_budget=64)
    for order in still:
        alone = hashes(wide_base, tmp_path / order["name"], [order], dtype=dtype)
        name = order["name"]
        assert evaluations(tmp_path / "together" / name) == evaluations(tmp_path / name / name) != []
        assert together[name] == alone[name]


@st.composite
def drawn_orders(draw: st.DrawFn) -> list[Order]:
    found: list[Order] = []
    for i in range(draw(st.integers(2, 5))):
        fields: Order = {
            "r": draw(st.integers(1, 16)),
            "lora_dropout": draw(st.sampled_from([0.0, 0.1])),
            "batch_size": draw(st.integers(1, 9)),
            "max_steps": draw(st.integers(1, 5)),
            "learning_rate": draw(st.sampled_from([1e-4, 1e-2, 1.0])),
            "max_grad_norm": draw(st.sampled_from([0.0, 0.01, 1.0])),
            "seed": draw(st.integers(0, 2**32 - 1)),
            "weight": draw(st.sampled_from([0.1, 1.0, 10.0])),
        }
        evaluated = draw(st.booleans())
        if evaluated:
            fields |= {"eval_steps": draw(st.integers(1, 3)), "load_best_model_at_end": draw(st.booleans())}
        found.append(job(f"job{i}", {"path": f"{draw(st.sampled_from('abcd'))}.jsonl", "eval_size": 6 if evaluated else 0}, **fields))
    return found


@pytest.mark.soak
@settings(max_examples=12, derandomize=False)
@given(drawn=drawn_orders(), budget=st.sampled_from(["auto", 48, 100, 1024]))
def test_l1_of_drawn_runs(
    drawn: list[Order], budget: int | str, wide_base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    jobs = [{**order, "data": {**order["data"], "path": str(data / order["data"]["path"])}} for order in drawn]
    check_engine_l1(wide_base, tmp_path_factory.mktemp("drawn"), jobs, budgets=(budget,))


# -- bad neighbours ------------------------------------------------------------------------------------------------------


@contextmanager
def _start_at(value: float) -> Iterator[None]:
    healthy = start.start_state

    def spoil(spec: JobSpec, layout: AdapterLayout, dtype: torch.dtype) -> AdapterState:
        state = healthy(spec, layout, dtype)
        if spec.name == "bad":
            state.params.fill_(value)
        return state

    with patch.object(job_plan, "start_state", spoil), patch.object(job_opening, "start_state", spoil):
        yield


@contextmanager
def _gradient(value: float) -> Iterator[None]:
    healthy = supermodel.SuperModel.forward_backward

    def spoil(self: SuperModel, *batch: Any) -> Any:
        found = healthy(self, *batch)
        if "bad" in found:
            for module in [s.module for s in self.state("bad").layout.shapes]:
                rows, _ = self.bank.slot("bad", module) or (range(0), 0)
                self.bank.linear(module).da_RK[rows.start : rows.stop] = value
        return found

    with patch.object(supermodel.SuperModel, "forward_backward", spoil):
        yield


@contextmanager
def _loss_raises(mark: int) -> Iterator[None]:
    healthy = losses.linear_cross_entropy

    def raising(hidden: Tensor, head: Any, labels: Tensor, grad_weights: Tensor | None = None) -> Any:
        if bool((labels == mark).any()):
            raise ArithmeticError("this loss cannot be computed")
        return healthy(hidden, head, labels, grad_weights)

    with patch.object(losses, "linear_cross_entropy", raising):
        yield


LAST_ID = -1  # stands for the vocabulary's last id, which no text is tokenized to


def tokens(*ids: int) -> Order:
    return {"input_ids": list(ids), "labels": list(ids)}


@dataclass(frozen=True)
class BadOrder:
    """A neighbour that goes wrong in its own way; `status` is what becomes of it."""

    name: str
    status: str
    fields: Order = field(default_factory=dict)
    rows: tuple[Order, ...] = ()
    around: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()  # given the last id


MANY = tuple(tokens(9, 10, 11, 12, 13 + i) for i in range(8))
BAD = (
    BadOrder("NaN adapter", "failed", around=lambda _: _start_at(math.nan)),
    BadOrder("Inf adapter", "failed", around=lambda _: _start_at(math.inf)),
    BadOrder("NaN gradient", "failed", around=lambda _: _gradient(math.nan)),
    BadOrder("3e38 activations", "failed", around=lambda _: _start_at(3e38)),
    BadOrder("a loss that raises", "failed", rows=(*MANY, tokens(9, LAST_ID, 9)), fields={"batch_size": 9}, around=_loss_raises),
    BadOrder("empty file", "failed", rows=()),
    BadOrder("all labels ignored", "failed", rows=tuple({"input_ids": [9, 10], "labels": [-100, -100]} for _ in range(4))),
    BadOrder("token id = vocabulary size", "failed", rows=(*MANY, tokens(9, 100_000))),
    BadOrder("length 1", "done", rows=(*MANY, tokens(9), tokens(10))),
    BadOrder("length = max", "done", fields={"max_length": 2048}, rows=(tokens(*([9, 10] * 1024)), *MANY)),
    BadOrder("learning rate 1e9", "failed", fields={"learning_rate": 1e9, "weight_decay": 0.1, "lr_scheduler_type": "constant"}),
)


@pytest.fixture(scope="module")
def neighbours(wide_base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Order], dict[str, str]]]:
    """Two healthy jobs, and their bytes alone."""
    healthy = [orders(data)[0], orders(data)[3]]
    alone: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TLORA_CACHE", str(tmp_path_factory.mktemp("cache")))
        for order in healthy:
            alone |= hashes(wide_base, tmp_path_factory.mktemp("alone") / "out", [order])
    yield healthy, alone


IN_EVERY_RUN = ("NaN adapter", "length 1")  # one that fails, one that is done


@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name, marks=[] if bad.name in IN_EVERY_RUN else pytest.mark.slow) for bad in BAD])
def test_l2_a_bad_neighbour_changes_nothing(
    bad: BadOrder, wide_base: Path, data: Path, tmp_path: Path, neighbours: tuple[list[Order], dict[str, str]]
) -> None:
    """It fails alone, with its reason, and its weights on disk are finite; its neighbours' bytes are those of training alone."""
    vocab_size = json.loads((wide_base / "config.json").read_text())["vocab_size"]
    path = data / "a.jsonl"
    if bad.rows or bad.name == "empty file":
        path = tmp_path / "bad.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in bad.rows).replace(str(LAST_ID) + ",", f"{vocab_size - 1},"))
    healthy, alone = neighbours
    order = job("bad", str(path), **bad.fields)
    with bad.around(vocab_size - 1):
        results = train(wide_base, tmp_path / "out", [clean(o) for o in (order, *healthy)], deterministic=True)
    assert results["bad"].status == bad.status, results["bad"]
    assert bool(results["bad"].reason) == (bad.status == "failed")
    assert {name: sha256(tmp_path / "out" / name) for name in alone} == alone
    assert all(results[name].status == "done" for name in alone)
