"""Steps that wait for no device against the host's: the same numbers, and the same refusals, decided without reading one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.supermodel.test_plain_path import Calls
from tests.tolerances import assert_close
from tlora.adapters.bank import AdapterBank
from tlora.adapters.layout import make_layout
from tlora.adapters.state import AdapterState, init_state
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.job_by_job import make_host_optimizer, make_queued_optimizer
from tlora.supermodel.optimizer_steps import Optimizer, Stepping

CPU = torch.device("cpu")
TARGETS = {"layers.0.q_proj": (32, 48), "layers.0.v_proj": (32, 7)}


class Job(Stepping):
    def __init__(self, state: AdapterState, **train: Any) -> None:
        options: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, **train}
        self._state, self._train = state, TrainConfig(**options)

    state = property(lambda self: self._state)  # type: ignore[assignment]
    train = property(lambda self: self._train)  # type: ignore[assignment]
    total_steps = property(lambda self: 10)  # type: ignore[assignment]


class World:
    """A bank with two jobs, `a` with what a test gives and `b` as usual."""

    def __init__(self, kind: Callable[[AdapterBank], Optimizer], dtype: torch.dtype = torch.float32, **train: Any) -> None:
        self.bank = AdapterBank(TARGETS, dtype, CPU)
        self.optimizer: Optimizer = kind(self.bank)
        self.jobs: dict[str, Job] = {}
        for i, (name, options) in enumerate({"a": train, "b": {}}.items()):
            layout = make_layout(LoraConfig(r=3 + i), TARGETS)
            state = init_state(layout, i, self.bank.sum_dtype, CPU)
            self.bank.add(name, layout)
            self.bank.write(name, state.params)
            self.optimizer.add(name, state)
            self.jobs[name] = Job(state, **options)

    def gradient(self, name: str, seed: int, size: float = 1.0) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        return torch.randn(self.jobs[name].state.layout.numel, generator=draw).mul_(size).to(self.bank.sum_dtype)

    def step(self, seed: int, size: float = 1.0, spoilt: float | None = None) -> list[bool]:
        for i, name in enumerate(self.jobs):
            grad = self.gradient(name, seed + i, size if name == "a" else 1.0)
            if spoilt is not None and name == "a":
                grad[3] = spoilt
            self.optimizer.set_gradient(name, grad)
        measured = self.optimizer.measure(self.jobs)
        stats = measured.update().read()
        assert all(s.step == self.jobs[name].state.step - 1 for name, s in stats.items())
        assert not any(bool(self.bank.gradient(name).any()) for name in self.jobs)
        return [stats[name].applied for name in self.jobs]

    def found(self) -> dict[str, Tensor]:
        states = {name: job.state for name, job in self.jobs.items()}
        flat = {f"{what} of {name}": getattr(s, what) for name, s in states.items() for what in ("params", "exp_avg", "exp_avg_sq")}
        rows = {f"rows {module}": self.bank.linear(module).a_RK.clone() for module in TARGETS}
        counters = {f"counters of {name}": torch.tensor([s.step, s.updates, s.skipped]) for name, s in states.items()}
        return flat | rows | counters


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("train", [{}, {"max_grad_norm": 0.3}, {"max_grad_norm": 0, "weight_decay": 0}], ids=str)
def test_steps_are_the_hosts(train: dict[str, Any], dtype: torch.dtype) -> None:
    """To the bit where nothing is clipped; the norm is taken in fp64."""
    host, queued = World(make_host_optimizer, dtype, **train), World(make_queued_optimizer, dtype, **train)
    for step in range(3):
        assert host.step(step, 1e-2) == queued.step(step, 1e-2) == [True, True]
    for name, expected in host.found().items():
        if train.get("max_grad_norm", 1) == 0 and name.endswith(" a"):
            assert torch.equal(queued.found()[name], expected), name
        else:
            assert_close(queued.found()[name], expected, 1e-2 if name.startswith("rows") and dtype == torch.bfloat16 else 1e-6, name)


@pytest.mark.parametrize(
    ("train", "size", "spoilt", "dtype"),
    [
        ({}, 1.0, math.nan, torch.float32),
        ({}, 1.0, math.inf, torch.float32),
        ({"learning_rate": 1e6}, 1.0, None, torch.float16),  # beyond what the base's dtype holds
        ({"max_grad_norm": 0}, 1e30, None, torch.float32),  # its square is a moment
        ({"learning_rate": 1e38, "weight_decay": 1e3}, 1.0, None, torch.float32),  # a factor that torch refuses
    ],
)
def test_what_the_host_refuses_changes_nothing(train: dict[str, Any], size: float, spoilt: float | None, dtype: torch.dtype) -> None:
    host, queued = World(make_host_optimizer, dtype, **train), World(make_queued_optimizer, dtype, **train)
    before = {name: t.clone() for name, t in queued.found().items()}
    refused = [False, True]
    assert host.step(0, size, spoilt) == queued.step(0, size, spoilt) == refused
    after = queued.found()
    assert all(torch.equal(after[name], t) for name, t in before.items() if name.endswith(" of a") and "counters" not in name)
    assert after["counters of a"].tolist() == [1, 0, 1]
    assert all(bool(t.isfinite().all()) for t in after.values())


def test_a_gradient_beyond_fp32s_squares_is_clipped() -> None:
    host, queued = World(make_host_optimizer, max_grad_norm=1.0), World(make_queued_optimizer, max_grad_norm=1.0)
    assert host.step(0, 1e25) == queued.step(0, 1e25) == [True, True]
    assert_close(queued.found()["params of a"], host.found()["params of a"], 1e-6, "params")


def test_no_half_waits() -> None:
    world = World(make_queued_optimizer)
    for name in world.jobs:
        world.optimizer.set_gradient(name, world.gradient(name, 0))
    with Calls():
        measured = world.optimizer.measure(world.jobs)
        steps = measured.update()
    assert not steps.done and all(s.applied for s in steps.read().values())
    assert set(measured.verdicts) == {"a", "b"} and all(v.shape == (2,) and v.dtype == torch.float64 for v in measured.verdicts.values())


def test_a_step_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(make_queued_optimizer)
    for name in world.jobs:
        world.optimizer.set_gradient(name, world.gradient(name, 0))
    write = world.bank.write

    def refuse(job_id: str, params: Tensor) -> None:
        if job_id == "a":
            raise RuntimeError("no memory")
        write(job_id, params)

    monkeypatch.setattr(world.bank, "write", refuse)
    steps = world.optimizer.measure(world.jobs).update()
    assert list(steps.read()) == ["b"] and str(steps.errors["a"]) == "no memory"
