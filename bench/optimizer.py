"""The optimizer step of eight jobs that are due together on a GPU, on the shape of Llama-3-8B (tensors only, no model).

    python -m bench.optimizer [--layers 32] [--repeats 20] [--commit NAME] [--json FILE]

Ranks 8, 16, 32 and 64, twice, at all seven linears of each layer: 629 million parameters with 32 layers. Checks one step against
`adamw_step` and that two runs give the same bytes, then times the fused step (and the same with its check of the whole update, which
sane training does not need), beside it `take_grad`, `adamw_step` and `write` job by job, and the flat gradient of one job, had and set.
Medians; needs 24 GiB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import machine
from tlora.adapters.adamw import StepStats, adamw_step
from tlora.adapters.bank import AdapterBank
from tlora.adapters.layout import make_layout
from tlora.adapters.state import AdapterState
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.device_optimizer import DeviceOptimizer

RANKS = (8, 16, 32, 64) * 2
LINEARS = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
TRAIN = TrainConfig(lr_scheduler_type="constant", learning_rate=2e-4, weight_decay=0.01)
BYTES = 38  # gradient twice and its zero, weights and two moments in and out, the weight in bf16
DEVICE = torch.device("cuda")


@dataclass
class Job:
    state: AdapterState
    train: TrainConfig
    total_steps: int = 100


def make_jobs(layers: int) -> tuple[AdapterBank, DeviceOptimizer, dict[str, Job]]:
    targets = {f"layers.{i}.{name}": sizes for i in range(layers) for name, sizes in LINEARS.items()}
    bank = AdapterBank(targets, torch.bfloat16, DEVICE)
    optimizer, jobs = DeviceOptimizer(bank), dict[str, Job]()
    draw = torch.Generator(DEVICE).manual_seed(0)
    for i, rank in enumerate(RANKS):
        layout = make_layout(LoraConfig(r=rank), targets)
        params = torch.randn(layout.numel, device=DEVICE, generator=draw).mul_(0.01)
        state = AdapterState(layout, params, torch.zeros_like(params), torch.zeros_like(params))
        bank.add(f"job{i}", layout)
        bank.write(f"job{i}", params)
        jobs[f"job{i}"] = Job(state, TRAIN)
    for name, job in jobs.items():  # when all rows are where they stay
        optimizer.add(name, job.state)
    return bank, optimizer, jobs


def step(optimizer: DeviceOptimizer, jobs: dict[str, Job]) -> tuple[dict[str, StepStats], dict[str, Exception]]:
    """What came of the jobs' steps, waited for."""
    steps = optimizer.measure(jobs).update()
    return steps.read(), steps.errors


def fill_gradients(bank: AdapterBank, seed: int) -> None:
    draw = torch.Generator(DEVICE).manual_seed(seed)
    for module in bank.addresses(bank.jobs()[0]):
        linear = bank.linear(module)
        linear.da_RK.normal_(0, 1e-3, generator=draw)
        linear.db_RN.normal_(0, 1e-3, generator=draw)


def gradient(bank: AdapterBank, name: str, seed: int) -> torch.Tensor:
    """Of one job, filled anew."""
    fill_gradients(bank, seed)
    return bank.take_grad(name)


def check(bank: AdapterBank, optimizer: DeviceOptimizer, jobs: dict[str, Job]) -> None:
    """Two steps of all jobs twice from the same start: the same bytes; and those of `adamw_step` but for rounding."""
    starts = {name: job.state.clone() for name, job in jobs.items() if name in ("job0", "job3")}
    found: list[list[torch.Tensor]] = []
    stats: dict[str, StepStats] = {}
    for _ in range(2):
        for name, start in starts.items():
            jobs[name].state = start.clone()
        for seed in range(2):
            fill_gradients(bank, seed)
            stats, errors = step(optimizer, jobs)
            assert not errors and all(s.applied for s in stats.values()), (errors, stats)
        found.append([getattr(jobs[name].state, part).clone() for name in starts for part in ("params", "exp_avg", "exp_avg_sq")])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "two runs of the same steps differ"
    for name, true in starts.items():
        expected = [adamw_step(true, gradient(bank, name, seed), TRAIN, 100) for seed in range(2)][-1]
        assert abs(stats[name].grad_norm / expected.grad_norm - 1) < 1e-5, (stats[name], expected)
        error = float((jobs[name].state.params - true.params).norm() / true.params.norm())
        assert error < 1e-6, f"{name}: {error:.1e} from adamw_step"
        weights = torch.cat([t.flatten() for t in bank._rows(name, "a_RK", "b_RN")])
        assert torch.equal(weights, jobs[name].state.params.bfloat16()), f"{name}: other weights in the bank than in the state"
        print(f"{name} (rank {jobs[name].state.layout.shapes[0].rank}): equals adamw_step up to {error:.1e}; two runs, the same bytes")


def seconds_of(step: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        step()
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def unfused(bank: AdapterBank, jobs: dict[str, Job]) -> None:
    for name, job in jobs.items():
        if adamw_step(job.state, bank.take_grad(name), job.train, job.total_steps).applied:
            bank.write(name, job.state.params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = machine.facts(DEVICE, args.commit)
    bank, optimizer, jobs = make_jobs(args.layers)
    numel = sum(job.state.layout.numel for job in jobs.values())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {len(jobs)} jobs, {numel / 1e6:.0f} M parameters")
    check(bank, optimizer, jobs)
    rows: dict[str, float] = {"parameters": numel, "fused_seconds": seconds_of(lambda: step(optimizer, jobs), args.repeats)}
    memory = torch.cuda.memory_stats()["allocation.all.allocated"]
    step(optimizer, jobs)
    rows["allocations_in_a_step"] = torch.cuda.memory_stats()["allocation.all.allocated"] - memory
    one = {"job0": jobs["job0"]}
    rows["one_job_of_rank_8_seconds"] = seconds_of(lambda: step(optimizer, one), args.repeats)
    unproven = TRAIN.model_copy(update={"adam_epsilon": 1e-40})  # no normal number: nothing bounds the update
    with_check = {name: Job(job.state, unproven) for name, job in jobs.items()}
    rows["with_check_seconds"] = seconds_of(lambda: step(optimizer, with_check), args.repeats)
    rows["unfused_seconds"] = seconds_of(lambda: unfused(bank, jobs), 3)
    flat = optimizer.gradient("job3")
    rows["gradient_of_rank_64_seconds"] = seconds_of(lambda: optimizer.gradient("job3"), args.repeats)
    rows["set_gradient_of_rank_64_seconds"] = seconds_of(lambda: optimizer.set_gradient("job3", flat), args.repeats)
    rows["bytes_per_second"] = BYTES * numel / rows["fused_seconds"]
    for name in [name for name in rows if name.endswith("_seconds")]:
        print(f"{name.removesuffix('_seconds').replace('_', ' '):>24}: {1e3 * rows[name]:8.2f} ms")
    print(
        f"fused: {rows['bytes_per_second'] / 1e12:.2f} TB/s at {BYTES} bytes per parameter; {rows['allocations_in_a_step']:.0f} allocations"
    )
    machine.write(args.json, {"benchmark": "optimizer", **facts, **rows})


if __name__ == "__main__":
    main()
