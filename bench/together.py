"""Speed of this program: the engine's own loop over the super-model's four verbs, with all jobs or one, and nothing written to disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.utils import counters

from bench.machine import wait
from bench.workload import Job
from tlora.batching.pack import auto_token_budget
from tlora.engine.run_monitor import TokenCounts
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import Computed, Ended, Noted, Report
from tlora.supermodel.supermodel import SuperModel

FEWEST_WINDOWS = 3
WINDOW_MICRO_BATCHES = 4  # a window waits for the device at its end: over one micro-batch that would be part of the figure


class Listener:
    """Counts tokens, keeps no files, and lets no failure pass for a figure."""

    def __init__(self) -> None:
        self.traffic = TokenCounts()

    def __call__(self, report: Report) -> None:
        match report:
            case Computed(packed, computed_tokens, left_tokens):
                self.traffic.count(packed, computed_tokens, left_tokens)
            case Ended(name, _, status, reason) if status != "stopped":
                raise RuntimeError(f"{name} failed: {reason}" if reason else f"{name} ended before the benchmark did")
            case Noted(line):
                raise RuntimeError(line)  # a smaller budget after running out of memory, among others: not what was to be measured


@dataclass(frozen=True)
class Plan:
    """How long to measure: `seconds` of windows (three at least), after `warm_up` windows that do not count."""

    token_budget: int
    seconds: float
    warm_up: int = 2


@dataclass
class Run:
    """What came of it. `windows`: (useful tokens, seconds) each; `tokens` of each job in them; memory in bytes, 0 on a CPU."""

    windows: list[tuple[int, float]] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    first_step_seconds: float = 0.0
    computed_tokens: int = 0
    steps: int = 0
    graphs: int = 0
    graphs_after_warm_up: int = 0
    adapter_bytes: int = 0
    activation_bytes: int = 0
    peak_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """The median window's."""
        return statistics.median(tokens / seconds for tokens, seconds in self.windows)


def open_engine(model: SuperModel, jobs: Sequence[Job], token_budget: int) -> tuple[Engine, TokenCounts]:
    """An engine that all `jobs` have joined, and what goes through it."""
    listener = Listener()
    engine = Engine(model, token_budget, listener)
    for job in jobs:
        engine.join(JobRun(job.spec, job.data, None))
    return engine, listener.traffic


def window_tokens(jobs: Sequence[Job], token_budget: int) -> float:
    """Tokens in which every job's optimizer steps as often as any other's, of WINDOW_MICRO_BATCHES full micro-batches at least."""
    round_tokens = sum(job.batch_tokens for job in jobs)
    return round_tokens * -(-WINDOW_MICRO_BATCHES * token_budget // max(1, int(round_tokens)))


def train_together(model: SuperModel, jobs: Sequence[Job], plan: Plan) -> Run:
    """Train `jobs` for as long as `plan` says, then let them leave."""
    device, run = model.device, Run()
    before, graphs = _allocated(device), compiled_graphs()
    if device.type == "cuda":  # the warm-up counts: a replayed pass allocates nothing, but holds what it held when it was captured
        torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    engine, traffic = open_engine(model, jobs, plan.token_budget)
    run.adapter_bytes = _allocated(device) - before
    while not _steps(engine):
        engine.run_micro_batch()
    wait(device)
    run.first_step_seconds = time.perf_counter() - start
    window = window_tokens(jobs, plan.token_budget)
    for _ in range(plan.warm_up):
        run_window(engine, window)
    warm_graphs, warm = compiled_graphs(), dict(traffic.tokens)
    computed, steps = traffic.computed, _steps(engine)
    while len(run.windows) < FEWEST_WINDOWS or sum(seconds for _, seconds in run.windows) < plan.seconds:
        run.windows.append(run_window(engine, window))
    run.tokens = {name: tokens - warm.get(name, 0) for name, tokens in traffic.tokens.items()}
    run.computed_tokens, run.steps = traffic.computed - computed, _steps(engine) - steps
    run.graphs, run.graphs_after_warm_up = compiled_graphs() - graphs, compiled_graphs() - warm_graphs
    run.peak_bytes = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    run.activation_bytes = max(0, run.peak_bytes - before - run.adapter_bytes)
    engine.stop()
    return run


def train_one_by_one(model: SuperModel, jobs: Sequence[Job], plan: Plan) -> dict[str, Run]:
    """Each job alone, with the token budget that the program would choose for it."""
    found: dict[str, Run] = {}
    for job in jobs:
        budget = min(plan.token_budget, auto_token_budget(int(job.data.lengths.max()), [job.batch_tokens], plan.token_budget))
        found[job.spec.name] = train_together(model, [job], Plan(budget, plan.seconds / len(jobs), plan.warm_up))
    return found


def run_window(engine: Engine, tokens: float) -> tuple[int, float]:
    """Micro-batches until `tokens` are through, with the optimizer steps that they complete."""
    device, done = engine.model.device, 0
    wait(device)
    start = time.perf_counter()
    while done < tokens:
        packed = engine.run_micro_batch()
        assert packed is not None, "nothing is on offer, though no job has an end"
        done += packed.tokens
    wait(device)
    return done, time.perf_counter() - start


def _steps(engine: Engine) -> int:
    return sum(run.progress.step for run in engine.runs.values())


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    return int(counters["stats"]["unique_graphs"])


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def gib(num_bytes: float) -> float | None:
    """Of a GPU's memory; None where none was counted."""
    return num_bytes / 2**30 if num_bytes else None


def as_row(run: Run, system: str, matmul_parameters: int) -> dict[str, Any]:
    """A row of the result."""
    useful = sum(tokens for tokens, _ in run.windows)
    return {
        "system": system,
        "tokens_per_second": run.tokens_per_second,
        "useful_tflops": 4 * matmul_parameters * run.tokens_per_second / 1e12,
        "activations_gib": gib(run.activation_bytes),
        "adapters_gib": gib(run.adapter_bytes),
        "peak_gib": gib(run.peak_bytes),
        "first_step_seconds": run.first_step_seconds,
        "optimizer_steps": run.steps,
        "padding_share": 1 - useful / run.computed_tokens,
        "graphs_compiled": run.graphs,
        "graphs_compiled_after_warm_up": run.graphs_after_warm_up,
        "tokens_per_second_of_windows": [tokens / seconds for tokens, seconds in run.windows],
    }
