"""Where the time of a micro-batch goes: shares by part, and the kernels that take most, from torch.profiler's trace.

    python -m bench.breakdown --shape llama-3-8b --lengths 2048 --out FILE      # the options of bench.throughput that describe the jobs
    python -m bench.breakdown --shape tiny --device cpu --lengths 64 --token-budget 512

A kernel belongs to the optimizer or to head and loss if it was launched within them, else to the part that its name tells. Idle is what
the kernels leave of the time that the same micro-batches take untraced: tracing slows the host, and the device would seem to wait for it.
On a CPU, where it slows the work itself, operations stand for kernels, each with the time that none of its own operations takes, and
idle is when none runs in the trace.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import tlora.supermodel.losses as losses
from bench import machine, throughput
from bench.shapes import SHAPES, make_model
from bench.together import open_engine, window_tokens
from bench.workload import Order, make_jobs
from tlora.group.engine import Engine
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

WHOLE, HEAD, OPTIMIZER = "bench: micro-batches", "bench: head + loss", "bench: optimizer"
RANGES = {HEAD: "head + loss", OPTIMIZER: "optimizer"}
UNTRACED_RUNS = 3
OTHER = "element-wise and copies"
# The first that is found in a kernel's name, in lower case. Triton's kernels carry their function's name, inductor's begin with triton_.
PARTS: tuple[tuple[str, str], ...] = (
    (OTHER, r"^triton_(?!tem)"),
    ("optimizer", r"adamw|^norm_kernel|verdict_kernel|check_kernel|update_kernel"),
    ("LoRA", r"shrink|sum_kernel|(?<!t)lora(?!_linear|_group)"),
    ("attention", r"flash|fmha|attention|attn|cudnn|dot_product|^(forward|dq|dkv)_kernel"),
    (OTHER, r"elementwise|vectorized|(?<!splitk)reduce_kernel|memcpy|memset"),
    ("GEMM", r"gemm|nvjet|cutlass|cublas|xmma|gemv|splitk|^triton_tem|aten::(mm|addmm|bmm|linear)|mkldnn|multi_lora_(linear|group)"),
)


@dataclass(frozen=True)
class Slice:
    """One kernel (or operation) on the time line, in microseconds, and the range in which it was launched. `own` is its time without
    what runs within it.
    """

    name: str
    start: float
    end: float
    own: float
    launched_in: str | None

    @property
    def part(self) -> str:
        """The part of a micro-batch that it belongs to."""
        return RANGES.get(self.launched_in or "") or part_of(self.name)


def part_of(name: str) -> str:
    """By name alone. What no pattern knows is element-wise."""
    return next((part for part, pattern in PARTS if re.search(pattern, name.lower())), OTHER)


def record(model: SuperModel, work: Callable[[], None]) -> list[dict[str, Any]]:
    """The trace's events of `work`, with head and optimizer as named ranges."""
    cuda = model.device.type == "cuda"
    original, measure = losses.linear_cross_entropy, _in_range(OPTIMIZER, model.measure_gradients)
    losses.linear_cross_entropy = _in_range(HEAD, original)
    model.measure_gradients = lambda job_ids: SimpleNamespace(update=_in_range(OPTIMIZER, measure(job_ids).update))  # type: ignore[method-assign, assignment]
    try:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities, acc_events=True) as profiler, record_function(WHOLE):
            work()
            machine.wait(model.device)
    finally:
        losses.linear_cross_entropy = original
        del model.measure_gradients
    with tempfile.TemporaryDirectory() as directory:
        profiler.export_chrome_trace(str(Path(directory) / "trace.json"))
        return json.loads((Path(directory) / "trace.json").read_text())["traceEvents"]


def _in_range(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return run


def read_slices(events: list[dict[str, Any]]) -> list[Slice]:
    """Kernels and copies of the device; where there are none, operations of the CPU."""
    on_device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in RANGES]
    if not on_device:
        return [Slice(e["name"], e["ts"], e["ts"] + e["dur"], own, _range_at(e, ranges)) for e, own in _own_times(events)]
    runtime = (e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e["args"])
    launches = {e["args"]["correlation"]: e for e in runtime}
    found: list[Slice] = []
    for e in on_device:
        launch = launches.get(e["args"].get("correlation"))
        found.append(Slice(e["name"], e["ts"], e["ts"] + e["dur"], e["dur"], _range_at(launch, ranges) if launch else None))
    return found


def _range_at(event: dict[str, Any], ranges: list[dict[str, Any]]) -> str | None:
    """By time alone: whoever is in one of the ranges has no other thread at work."""
    return next((r["name"] for r in ranges if r["ts"] <= event["ts"] <= r["ts"] + r["dur"]), None)


def _own_times(events: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float]]:
    """Each CPU operation with its time less that of the operations within it."""
    open_until: dict[int, list[tuple[float, int]]] = defaultdict(list)  # per thread: (end, index) of the operations around the next one
    operations = sorted((e for e in events if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"]))
    own = [float(e["dur"]) for e in operations]
    for i, e in enumerate(operations):
        around = open_until[e["tid"]]
        while around and around[-1][0] <= e["ts"]:
            around.pop()
        if around:
            own[around[-1][1]] -= e["dur"]
        around.append((e["ts"] + e["dur"], i))
    yield from zip(operations, own, strict=True)


def summarize(events: list[dict[str, Any]], untraced: float | None = None, most: int = 25) -> dict[str, Any]:
    """Seconds and shares by part, idle time, and the `most` kernels that take longest. `untraced`: seconds that the same work takes
    without a trace; by default those of the trace.
    """
    whole = next(e for e in events if e.get("cat") == "user_annotation" and e["name"] == WHOLE)
    slices = [s for s in read_slices(events) if s.start >= whole["ts"]]
    parts: dict[str, float] = defaultdict(float)
    kernels: dict[tuple[str, str], list[float]] = defaultdict(list)
    for s in slices:
        parts[s.part] += s.own / 1e6
        kernels[s.name, s.part].append(s.own / 1e6)
    traced = whole["dur"] / 1e6
    total = traced if untraced is None else untraced
    parts["idle"] = max(0.0, total - _busy(slices))
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:most]
    return {
        "seconds": total,
        "traced_seconds": traced,
        "parts": {name: {"seconds": seconds, "share": seconds / total} for name, seconds in sorted(parts.items(), key=lambda p: -p[1])},
        "kernels": [{"name": n, "part": part, "calls": len(times), "seconds": sum(times)} for (n, part), times in longest],
    }


def _busy(slices: list[Slice]) -> float:
    """Seconds in which at least one slice runs."""
    busy, until = 0.0, 0.0
    for s in sorted(slices, key=lambda s: s.start):
        busy += max(0.0, s.end - max(s.start, until))
        until = max(until, s.end)
    return busy / 1e6


def _run_steps(engine: Engine, tokens: float) -> int:
    """Micro-batches of `tokens`, and how many they were."""
    count, done = 0, 0
    while done < tokens:
        packed = engine.run_micro_batch()
        assert packed is not None
        count, done = count + 1, done + packed.tokens
    return count


def _seconds_of_micro_batch(engine: Engine, tokens: float) -> float:
    """Median of UNTRACED_RUNS runs of `tokens`, the device's work included."""
    found: list[float] = []
    for _ in range(UNTRACED_RUNS):
        machine.wait(engine.model.device)
        start = time.perf_counter()
        count = _run_steps(engine, tokens)
        machine.wait(engine.model.device)
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found)


def run_breakdown(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    order = Order(options.jobs, options.ranks, options.batch_size, options.lengths, min(2048, throughput.most_tokens(options)))
    with tempfile.TemporaryDirectory() as directory:
        jobs = make_jobs(order, SHAPES[options.shape].vocab_size, options.data, Path(directory))
        base = make_base(make_model(options.shape, device, throughput.dtype_of(options)), options.shape)
        budget = throughput.token_budget(options, jobs)
        engine, _ = open_engine(SuperModel(base, options.deterministic), jobs, budget)
        tokens = window_tokens(jobs, budget)
        for _ in range(2):
            _run_steps(engine, tokens)
        seconds, counts = _seconds_of_micro_batch(engine, tokens), list[int]()
        events = record(engine.model, lambda: counts.append(_run_steps(engine, tokens)))
        engine.stop()
    parts = summarize(events, seconds * counts[0] if device.type == "cuda" else None)
    found = {"benchmark": "breakdown", **machine.facts(device, options.commit), "micro_batches": counts[0], **parts}
    machine.write(options.out, found)
    return found


def format_table(found: dict[str, Any]) -> str:
    """Milliseconds of a micro-batch, for a terminal."""
    count = found["micro_batches"]
    lines = [f"{found['device']}, commit {found['commit']}: {found['command']}"]
    traced = f"{found['traced_seconds'] / count * 1e3:.2f} traced"
    lines.append(f"{found['seconds'] / count * 1e3:10.2f} ms  a micro-batch, mean of {count}, optimizer steps within ({traced})")
    lines += [f"{part['seconds'] / count * 1e3:10.2f} ms {part['share']:6.1%}  {name}" for name, part in found["parts"].items()]
    lines.append(f"{'ms':>10} {'calls':>8}  kernel")
    for kernel in found["kernels"]:
        lines.append(f"{kernel['seconds'] / count * 1e3:10.3f} {kernel['calls'] / count:8.1f}  [{kernel['part']}] {kernel['name'][:90]}")
    return "\n".join(lines)


def main() -> None:
    print(format_table(run_breakdown(throughput.read_options())))


if __name__ == "__main__":
    main()
