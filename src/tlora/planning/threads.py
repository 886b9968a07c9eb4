"""How many threads a run on a CPU computes with. Bits follow from the number, so it depends on the order alone, never on load or timing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tlora.errors import ConfigError
from tlora.job import RunSpec
from tlora.planning.plan import RunPlan
from tlora.shape.token_cost import CPU_BUDGET_CAP

# About 5 ms of one core. With less, threads on a busy machine wait for each other longer than they compute: on 2 cores with 15 busy
# processes, a product of 17 million took two threads 236 ms and one 14 ms; from 600 million on, two were the faster
# (docs/adr/017-cpu-threads-follow-the-work-of-a-product.md).
_MULTIPLY_ADDS_PER_THREAD = 2**27


def default_threads(linears: Collection[tuple[int, int]], token_budget: int) -> int:
    """Threads that gain something: one per 2**27 multiply-adds of an average of `linears` (in, out features) over `token_budget` tokens."""
    weights = sum(k * n for k, n in linears)
    return max(1, token_budget * weights // max(len(linears), 1) // _MULTIPLY_ADDS_PER_THREAD)


def choose_threads(
    run: RunSpec, plan: RunPlan, linears: Collection[tuple[int, int]], device: torch.device, resume: bool, note: Callable[[str], None]
) -> int | None:
    """The threads that a run computes with on a CPU (None elsewhere); a note where that is not the number that was wanted.

    Wanted is what `cpu_threads` orders, else what a resumed run began with, else the default as far as this process may use so many
    cores. Raises ConfigError where a deterministic run, whose bytes follow from the number, would go on with another.
    """
    ordered = run.cpu_threads if isinstance(run.cpu_threads, int) else None
    if device.type != "cpu":
        if ordered:
            note(f"cpu_threads {ordered} has no effect here: the run computes on a GPU")
        return None
    available = torch.get_num_threads()  # the cores that this process may use, or OMP_NUM_THREADS
    before = threads_before(Path(run.output_dir) / "run.json") if resume else None
    # The bytes of a deterministic run do not depend on its budget, so its threads may not either: the largest counts.
    budget = CPU_BUDGET_CAP if run.deterministic else plan.token_budget
    wanted = ordered or before or min(default_threads(linears, budget), available)
    threads, due = min(wanted, available), before or wanted
    if threads == due:
        return threads
    whose = f"this run began with {due} CPU threads" if before else f"cpu_threads is {due}"
    found = f"this process may use {available}" if threads < wanted else f"cpu_threads is {threads}"
    if run.deterministic:
        remedy = "Give it more cores (OMP_NUM_THREADS, taskset)" if threads < wanted else "Put that back"
        raise ConfigError(f"{whose}, and {found}; the bytes of a deterministic run follow from it. {remedy}, or use a new output_dir")
    note(f"{whose}, and {found}: the run computes with {threads}, and its results differ by rounding")
    return threads


def threads_before(run_file: Path) -> int | None:
    """What the run of this `run.json` computed with; None where it did so on a GPU, or never began."""
    if not run_file.is_file():
        return None
    content = json.loads(run_file.read_text(encoding="utf-8"))
    if isinstance(threads := content.get("cpu_threads"), int):
        return threads
    old = re.fullmatch(r"cpu \((\d+) threads\)", str(content.get("device")))  # what versions before `cpu_threads` wrote
    return int(old[1]) if old else None


@contextmanager
def compute_with(threads: int | None) -> Iterator[None]:
    """Within it, torch computes with `threads` CPU threads; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
