"""Steps of all due jobs on a GPU (through the interpreter on a CPU) against `adamw_step` and the bank's own `take_grad` and `write`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.tolerances import assert_close
from tlora.adapters.adamw import StepStats, adamw_step
from tlora.adapters.bank import AdapterBank
from tlora.adapters.layout import make_layout
from tlora.adapters.state import AdapterState, init_state
from tlora.job import LoraConfig, TrainConfig
from tlora.shape.stages import LayerRange
from tlora.supermodel.optimizer_steps import OPEN, PROVEN, REFUSED
from tlora.supermodel.stage import AdapterCut, Stage, StageInput

pytest.importorskip("triton")
with interpreted():
    from tlora.kernels import triton_adamw, triton_chunks
    from tlora.supermodel import device_optimizer
    from tlora.supermodel.device_optimizer import DeviceOptimizer, DevicePart

pytestmark = MARKS
TARGETS = {"layers.0.q_proj": (32, 48), "layers.0.v_proj": (32, 7), "layers.1.q_proj": (32, 48), "layers.1.down_proj": (300, 32)}
CLOSE = 1e-6


@dataclass
class Job:
    """A resident on the optimizer, and its twin: the same adapter by itself in a bank of its own, stepped by `adamw_step`."""

    state: AdapterState
    train: TrainConfig
    total_steps: int
    twin: AdapterState
    twin_bank: AdapterBank
    stats: list[StepStats] = field(default_factory=list)


class Shared:
    """One bank with many jobs."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.bank = AdapterBank(TARGETS, dtype, DEVICE)
        self.optimizer = DeviceOptimizer(self.bank)
        self.jobs: dict[str, Job] = {}

    def join(self, name: str, lora: LoraConfig, **train: Any) -> None:
        wanted = lora.target_modules
        layout = make_layout(lora, {m: sizes for m, sizes in TARGETS.items() if wanted == "all-linear" or m.split(".")[-1] in wanted})
        state = init_state(layout, len(self.jobs), self.bank.sum_dtype, DEVICE)
        state.params += 0.01
        twin_bank = AdapterBank(TARGETS, self.bank.dtype, DEVICE)
        config = TrainConfig(**{"learning_rate": 1e-2, **train})
        self.jobs[name] = Job(state, config, 10, state.clone(), twin_bank)
        for bank in (self.bank, twin_bank):
            bank.add(name, layout)
            bank.write(name, state.params)
        self.optimizer.add(name, state)

    def leave(self, name: str) -> None:
        del self.jobs[name]
        self.bank.remove(name)
        self.optimizer.remove(name)

    def add_gradient(self, name: str, seed: int, size: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(seed)
        for s in self.jobs[name].state.layout.shapes:
            da, db = (torch.randn(s.rank, n, generator=draw).mul_(size) for n in (s.in_features, s.out_features))
            for bank in (self.bank, self.jobs[name].twin_bank):
                slot = bank.slot(name, s.module)
                assert slot is not None
                rows, _ = slot
                bank.linear(s.module).da_RK[rows.start : rows.stop] += da.to(DEVICE)
                bank.linear(s.module).db_RN[rows.start : rows.stop] += db.to(DEVICE)

    def step(self, *names: str) -> None:
        stats = self.step_unchecked(*names)
        assert list(stats) == list(names)
        for name in names:
            self.check(name, stats[name])

    def step_unchecked(self, *names: str) -> dict[str, StepStats]:
        """Without the twins."""
        steps = self.optimizer.measure({name: self.jobs[name] for name in names}).update()
        assert not steps.errors and not steps.done
        return steps.read()

    def check(self, name: str, stats: StepStats) -> None:
        """Step the twin too; all that the two have must agree."""
        job = self.jobs[name]
        expected = adamw_step(job.twin, job.twin_bank.take_grad(name), job.train, job.total_steps, self.bank.dtype)
        job.stats.append(stats)
        assert (stats.step, stats.learning_rate, stats.applied) == (expected.step, expected.learning_rate, expected.applied)
        assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6, nan_ok=True)
        assert (job.state.step, job.state.updates, job.state.skipped) == (job.twin.step, job.twin.updates, job.twin.skipped)
        for part in ("params", "exp_avg", "exp_avg_sq"):
            assert_close(getattr(job.state, part), getattr(job.twin, part), CLOSE, f"{name}: {part} after step {stats.step}")
        self.bank_holds(name)
        assert not self.bank.take_grad(name).any()

    def bank_holds(self, name: str) -> None:
        """The weights in the bank are the state's."""
        for s, a, b in self.jobs[name].state.layout.views(self.jobs[name].state.params):
            slot = self.bank.slot(name, s.module)
            assert slot is not None
            rows, _ = slot
            linear = self.bank.linear(s.module)
            assert torch.equal(linear.a_RK[rows.start : rows.stop], a.to(self.bank.dtype)), f"{name}: A at {s.module}"
            assert torch.equal(linear.b_RN[rows.start : rows.stop], b.to(self.bank.dtype)), f"{name}: B at {s.module}"


@pytest.fixture
def shared() -> Shared:
    made = Shared()
    made.join("plain", LoraConfig(r=3))
    made.join("ranks", LoraConfig(r=4, rank_pattern={"layers.1.q_proj": 19, "down_proj": 1}), weight_decay=0.3, max_grad_norm=0.05)
    made.join("few", LoraConfig(r=8, target_modules=["v_proj"]), warmup_steps=2, adam_beta1=0.4, lr_scheduler_type="cosine")
    return made


def parts_of(whole: Job) -> tuple[AdapterCut, list[tuple[DeviceOptimizer, Job]]]:
    """The same job at three stages, each with a bank and an optimizer of its own; the last has no module of it."""
    stages = [Stage(LayerRange(i, i + 1, 3), (f"layers.{i}",), StageInput()) for i in range(3)]
    cut = AdapterCut(whole.state.layout, stages)
    found: list[tuple[DeviceOptimizer, Job]] = []
    for rank, layout in enumerate(cut.parts):
        bank = AdapterBank(TARGETS, torch.float32, DEVICE)
        job = replace(whole, state=cut.state(rank, whole.state), twin_bank=bank)
        optimizer = DeviceOptimizer(bank)
        bank.add("a", layout)
        bank.write("a", job.state.params)
        optimizer.add("a", job.state)
        found.append((optimizer, job))
    return cut, found


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_an_adapter_that_steps_in_parts_keeps_every_bit(clip: float) -> None:
    """A step that the bound proves, one with NaN, one that a look at the update refuses where it is not clipped, and one more."""
    shared = Shared()
    shared.join("a", LoraConfig(r=20, rank_pattern={"v_proj": 3}), weight_decay=0.3, max_grad_norm=clip)
    whole, rule = shared.jobs["a"], shared.optimizer.part_rule
    cut, parts = parts_of(whole)
    draw = torch.Generator().manual_seed(0)
    verdicts: list[float] = []
    for size in (0.1, math.nan, 1e30, 0.2):
        gradient_P = torch.randn(cut.layout.numel, generator=draw).to(DEVICE)
        gradient_P[7] *= size
        shared.optimizer.set_gradient("a", gradient_P)
        expected = shared.step_unchecked("a")["a"]
        steps: list[DevicePart] = []
        for rank, (optimizer, job) in enumerate(parts):
            optimizer.set_gradient("a", cut.take(rank, gradient_P))
            steps.append(optimizer.begin_part("a", job))
        measured_RE = cut.put_together([step.measured_RE for step in steps], rule.columns)
        norm, factor, verdict = steps[-1].judge(measured_RE).tolist()
        verdicts.append(verdict)
        checks = [bool(step.check(factor)) for step in steps] if verdict == OPEN else [verdict == REFUSED]
        found = [step.apply(norm, factor, applied=not any(checks)) for step in steps]
        assert all(repr(each) == repr(expected) for each in found)  # NaN too
        for name in ("params", "exp_avg", "exp_avg_sq"):
            assert torch.equal(cut.put_together([getattr(job.state, name) for _, job in parts]), getattr(whole.state, name)), name
        assert not any(bool(optimizer.gradient("a").any()) for optimizer, _ in parts)
        for rank, (_, job) in enumerate(parts):
            for s in cut.parts[rank].shapes:
                assert torch.equal(job.twin_bank.linear(s.module).a_RK, shared.bank.linear(s.module).a_RK), s.module
    assert verdicts == ([PROVEN, REFUSED, OPEN, PROVEN] if clip == 0 else [PROVEN, REFUSED, PROVEN, PROVEN])


def test_jobs_step_together_and_apart_each_by_its_own_rule(shared: Shared) -> None:
    for step in range(3):
        due = ("few", "plain", "ranks") if step != 1 else ("ranks",)
        for name in shared.jobs:
            shared.add_gradient(name, 10 * step + len(name), size=0.1 * (step + 1))
        shared.step(*due)
    assert [job.state.step for job in shared.jobs.values()] == [2, 3, 2]
    assert shared.jobs["few"].stats[0].learning_rate == 0.0


def test_a_step_of_one_changes_no_bit_of_the_others(shared: Shared) -> None:
    for name in shared.jobs:
        shared.add_gradient(name, 1)
    before = {m: {n: getattr(shared.bank.linear(m), n).clone() for n in ("a_RK", "b_RN", "da_RK", "db_RN")} for m in TARGETS}
    states = {name: job.state.clone() for name, job in shared.jobs.items()}
    shared.step_unchecked("plain")
    for module, tensors in before.items():
        slot = shared.bank.slot("plain", module)
        assert slot is not None
        rows, _ = slot
        others = torch.ones(len(tensors["a_RK"]), dtype=torch.bool)
        others[rows.start : rows.stop] = False
        for name, old in tensors.items():
            assert torch.equal(getattr(shared.bank.linear(module), name)[others], old[others]), f"{name} at {module}"
    for name in ("ranks", "few"):
        assert torch.equal(shared.jobs[name].state.params, states[name].params)
    assert not torch.equal(shared.jobs["plain"].state.params, states["plain"].params)


def test_rows_that_move_between_two_steps_are_found_again(shared: Shared) -> None:
    shared.add_gradient("plain", 1)
    shared.step("plain")
    address = shared.bank.addresses("plain")["layers.0.q_proj"]
    shared.add_gradient("plain", 2)
    shared.join("large", LoraConfig(r=100))
    assert shared.bank.addresses("plain")["layers.0.q_proj"] != address, "the bank did not grow"
    shared.add_gradient("large", 3)
    shared.step("plain", "large")
    shared.leave("large")
    shared.join("next", LoraConfig(r=5))
    for name in ("plain", "next"):
        shared.add_gradient(name, 4)
    shared.step("next", "plain")


def test_a_gradient_that_is_not_finite_is_its_own_jobs_alone(shared: Shared) -> None:
    shared.add_gradient("plain", 1)
    shared.step("plain")
    for name, size in (("plain", 1.0), ("ranks", math.nan), ("few", math.inf)):
        shared.add_gradient(name, 2, size)
    shared.step("ranks", "plain", "few")
    assert [shared.jobs[name].stats[-1].applied for name in ("ranks", "plain", "few")] == [False, True, False]
    assert shared.jobs["ranks"].state.skipped == 1


def test_a_state_that_someone_else_wrote_is_looked_at_again(shared: Shared) -> None:
    """The kernels keep the largest magnitudes from step to step; those of a state written since then would let an overflow pass."""
    shared.add_gradient("plain", 1)
    shared.step("plain")
    for replaced in (False, True):
        job = shared.jobs["plain"]
        for state in (job.state, job.twin):
            before = state.params
            state.params = before.clone() if replaced else before
            state.params[5] = 3.4e38
            while replaced and state.params._version < before._version:  # another tensor that was written as often
                state.params[5] = 3.4e38
        job.train = job.train.model_copy(update={"learning_rate": 1.0, "weight_decay": 3.0, "lr_scheduler_type": "constant"})
        kept = job.state.params.clone()
        shared.add_gradient("plain", 2)
        assert not shared.step_unchecked("plain")["plain"].applied and torch.equal(job.state.params, kept)
        job.state.params[5] = 0.0  # a healthy state again, for the second round
        shared.add_gradient("plain", 3, size=0.0)
        assert shared.step_unchecked("plain")["plain"].applied


@pytest.mark.parametrize("half", ["launch_measure", "launch_update"])
def test_a_step_that_cannot_be_queued_is_its_own_jobs_alone(shared: Shared, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = getattr(device_optimizer.fused_adamw, half)

    def failing(flat: Any, *rest: Any) -> None:
        if flat.params is shared.jobs["ranks"].state.params:
            raise RuntimeError("no such kernel")
        launch(flat, *rest)

    monkeypatch.setattr(device_optimizer.fused_adamw, half, failing)
    for name in shared.jobs:
        shared.add_gradient(name, 1)
    before = shared.jobs["ranks"].state.clone()
    measured = shared.optimizer.measure(shared.jobs)
    assert list(measured.verdicts) == [name for name in shared.jobs if half == "launch_update" or name != "ranks"]
    steps = measured.update()
    stats = steps.read()
    assert list(stats) == ["plain", "few"] and str(steps.errors["ranks"]) == "no such kernel"
    assert shared.jobs["ranks"].state.step == 0 and torch.equal(shared.jobs["ranks"].state.params, before.params)
    for name in stats:
        shared.check(name, stats[name])


def everything_in(bank: AdapterBank) -> dict[tuple[str, str], torch.Tensor]:
    """Copies of all rows of all adapters, the padding between them too."""
    return {(m, name): getattr(bank.linear(m), name).clone() for m in TARGETS for name in ("a_RK", "b_RN", "da_RK", "db_RN")}


def test_a_flat_gradient_is_the_banks_rows_in_the_order_of_the_layout(shared: Shared) -> None:
    for name in shared.jobs:
        assert not shared.optimizer.gradient(name).any()
        shared.add_gradient(name, len(name))
    before = everything_in(shared.bank)
    for name, job in shared.jobs.items():
        found = shared.optimizer.gradient(name)
        assert found.dtype == shared.bank.sum_dtype and torch.equal(found, shared.bank.gradient(name)) and found.any()
        for shape, da, _ in job.state.layout.views(found):
            rows, _ = shared.bank.slot(name, shape.module) or (range(0), 0.0)
            assert torch.equal(da, shared.bank.linear(shape.module).da_RK[rows.start : rows.stop])
    assert all(torch.equal(found, before[at]) for at, found in everything_in(shared.bank).items())


def test_a_gradient_that_is_set_replaces_the_jobs_own_sums_alone(shared: Shared) -> None:
    for name in shared.jobs:
        shared.add_gradient(name, len(name))
    expected = AdapterBank(TARGETS, shared.bank.dtype, DEVICE)  # the same slots, where torch writes the gradient
    for name, job in shared.jobs.items():
        expected.add(name, job.state.layout)
        expected.write(name, job.state.params)
        expected.set_gradient(name, shared.bank.gradient(name))
    drawn = torch.randn(shared.jobs["ranks"].state.layout.numel, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected.set_gradient("ranks", drawn)
    shared.optimizer.set_gradient("ranks", drawn)
    true = everything_in(expected)
    assert all(torch.equal(found, true[at]) for at, found in everything_in(shared.bank).items())
    assert torch.equal(shared.optimizer.gradient("ranks"), drawn)


def test_measuring_changes_nothing_and_says_the_norm_and_how_to_clip(shared: Shared) -> None:
    for name in shared.jobs:
        shared.add_gradient(name, 2, size=math.nan if name == "few" else 3.0)
    before, states = everything_in(shared.bank), {name: job.state.clone() for name, job in shared.jobs.items()}
    measured = shared.optimizer.measure(shared.jobs)
    assert all(found.device == shared.bank.linear("layers.0.v_proj").a_RK.device for found in measured.verdicts.values())
    verdicts = {name: found.tolist() for name, found in measured.verdicts.items()}
    for name in ("plain", "ranks"):
        norm, limit = float(shared.bank.gradient(name).double().norm()), shared.jobs[name].train.max_grad_norm
        assert verdicts[name] == pytest.approx([norm, limit / (norm + 1e-6)], rel=1e-9)
    assert math.isnan(verdicts["few"][0])
    after = everything_in(shared.bank)
    assert all(torch.equal(after[at].nan_to_num(7), old.nan_to_num(7)) for at, old in before.items())
    for name, job in shared.jobs.items():
        assert torch.equal(job.state.params, states[name].params) and job.state.step == 0
    stats = measured.update().read()
    for name in shared.jobs:
        shared.check(name, stats[name])


def test_steps_that_are_measured_apart_are_updated_in_any_order(shared: Shared) -> None:
    """An exchange for one job may last, while others step, join and move the bank."""
    for name in shared.jobs:
        shared.add_gradient(name, 5)
    waiting = shared.optimizer.measure({"plain": shared.jobs["plain"]})
    for seed in (5, 6):
        if seed == 6:
            for i in range(9):  # more than there were rows of scalars for
                shared.join(f"new{i}", LoraConfig(r=30 + i, target_modules=["q_proj"]))
                shared.add_gradient(f"new{i}", i)
            for name in ("ranks", "few"):
                shared.add_gradient(name, seed)
        shared.step(*(name for name in shared.jobs if name != "plain"))
    shared.check("plain", waiting.update().read()["plain"])
    shared.add_gradient("plain", 7)
    shared.step(*shared.jobs)


@dataclass(frozen=True)
class Counted:
    """A kernel whose launches are noted."""

    kernel: Any
    launches: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches.append(self.kernel.fn.__name__)
        return self.kernel[grid]


def test_a_step_is_two_kernels_in_each_half_and_a_flat_gradient_is_one(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    for module in (triton_adamw, triton_chunks):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Counted(getattr(module, name), launches))
    for name in shared.jobs:
        shared.add_gradient(name, 1)
    measured, num_jobs = shared.optimizer.measure(shared.jobs), len(shared.jobs)
    assert launches == num_jobs * ["norm_kernel", "verdict_kernel"]
    launches.clear()
    measured.update()
    assert launches == num_jobs * ["check_kernel", "update_kernel"]
    launches.clear()
    shared.optimizer.set_gradient("plain", shared.optimizer.gradient("plain"))
    assert launches == ["gather_kernel", "scatter_kernel"]
    launches.clear()
    shared.optimizer.write("plain", shared.jobs["plain"].state.params)
    assert launches == ["write_kernel"]


def test_weights_that_are_written_are_those_of_one_job(shared: Shared) -> None:
    before = {m: {n: getattr(shared.bank.linear(m), n).clone() for n in ("a_RK", "b_RN", "da_RK", "db_RN")} for m in TARGETS}
    params = shared.jobs["ranks"].state.params
    old = params.clone()
    params.copy_(torch.randn(len(params), generator=torch.Generator().manual_seed(5)).to(DEVICE))
    shared.optimizer.write("ranks", params)
    for name in shared.jobs:
        shared.bank_holds(name)
    shared.optimizer.write("ranks", old)
    assert all(torch.equal(getattr(shared.bank.linear(m), n), was) for m, tensors in before.items() for n, was in tensors.items())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CPU has nothing to wait for")
def test_queueing_a_step_waits_for_nothing_and_takes_no_memory(shared: Shared) -> None:
    for name in shared.jobs:
        shared.add_gradient(name, 1)
    shared.step_unchecked(*shared.jobs)  # kernels are compiled, and the host has its pinned memory
    flat = shared.optimizer.gradient("plain")
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        shared.optimizer.set_gradient("plain", flat)
        steps = shared.optimizer.measure(shared.jobs).update()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
        flat = shared.optimizer.gradient("plain")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(stats.applied for stats in steps.read().values()) and not flat.any()


def test_scaled_sums_step_as_the_gradient_that_they_stand_for() -> None:
    """Those of a float16 base: the twin's are as they are."""
    shared = Shared(torch.float16)
    shared.join("a", LoraConfig(r=4))
    for step in range(2):
        shared.bank.scale_sums("a", 1.0)
        shared.add_gradient("a", step)
        shared.bank.scale_sums("a", 4096.0)
        shared.step("a")
    shared.bank.scale_sums("a", 1.0)
    shared.add_gradient("a", 7)
    gradient = shared.jobs["a"].twin_bank.gradient("a")
    shared.bank.scale_sums("a", 1024.0)
    assert torch.equal(shared.optimizer.gradient("a"), gradient)
    shared.bank.scale_sums("a", 64.0)
    shared.optimizer.set_gradient("a", gradient * 2)
    assert torch.equal(shared.optimizer.gradient("a"), gradient * 2)
