"""Micro-batches launched as CUDA graphs and from Python, taking turns in one run over one engine.

    python -m bench.cuda_graphs --shape llama-3-8b --lengths 256 --out FILE     # the options of bench.throughput that describe the jobs

What graphs save is the host's work; where that hides behind the device's, the two are the same. Medians of windows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from bench import machine, throughput
from bench.shapes import SHAPES, make_model, matmul_parameters
from bench.together import open_engine, run_window, window_tokens
from bench.workload import Order, describe, make_jobs
from tlora.supermodel.held_linear import hold
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import Base, make_base
from tlora.supermodel.supermodel import SuperModel

WARM_UP = 4  # windows of each kind, in which shapes are compiled and captured


@contextmanager
def _as_they_are(base: Base) -> Iterator[None]:
    """A hook in the decoder forbids graphs: they would not call it."""
    hook = base.decoder.register_forward_hook(lambda *_: None)
    try:
        yield
    finally:
        hook.remove()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every window, by kind, and how many times as fast graphs are."""
    device = torch.device(options.device)
    order = Order(options.jobs, options.ranks, options.batch_size, options.lengths, min(2048, throughput.most_tokens(options)))
    with tempfile.TemporaryDirectory() as directory:
        jobs = make_jobs(order, SHAPES[options.shape].vocab_size, options.data, Path(directory))
        budget = throughput.token_budget(options, jobs)
        weights = make_model(options.shape, device, throughput.dtype_of(options))
        parameters = matmul_parameters(weights)
        if options.base_precision is not None:
            hold(weights, list(find_linears(weights)), device, options.base_precision)
        base = make_base(weights, options.shape)
        engine, _ = open_engine(SuperModel(base, options.deterministic), jobs, budget)
        window = window_tokens(jobs, budget)
        speeds: dict[str, list[float]] = {"graphs": [], "as they are": []}
        turn = 0
        while turn < WARM_UP + 3 or sum(window / speed for found in speeds.values() for speed in found) < options.seconds:
            for kind, found in speeds.items():
                with nullcontext() if kind == "graphs" else _as_they_are(base):
                    tokens, seconds = run_window(engine, window)
                if turn >= WARM_UP:
                    found.append(tokens / seconds)
            turn += 1
        engine.stop()
    medians = {kind: statistics.median(found) for kind, found in speeds.items()}
    return {
        "benchmark": "cuda_graphs",
        **machine.facts(device, options.commit),
        "setup": {"shape": options.shape, "lengths": options.lengths, "token_budget": budget, "jobs": describe(jobs)},
        "tokens_per_second": medians,
        "useful_tflops": {kind: 4 * parameters * speed / 1e12 for kind, speed in medians.items()},
        "times_as_fast": medians["graphs"] / medians["as they are"],
        "tokens_per_second_of_windows": speeds,
    }


def main() -> None:
    options = throughput.read_options()
    found = measure(options)
    machine.write(options.out, found)
    print(
        "   ".join(f"{kind} {speed:,.0f} tokens/s" for kind, speed in found["tokens_per_second"].items()),
        f"  {found['times_as_fast']:.3f} x",
    )


if __name__ == "__main__":
    main()
