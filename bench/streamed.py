"""Speed over a base of random weights that is streamed from the host's memory, and over the same base resident, in turns of one process.

    python -m bench.streamed --shape llama-3-8b --tokens 16384 --jobs 8 --recompute 0 --out FILE
    python -m bench.streamed --shape llama-3-70b --precision fp8 --arms streamed --tokens 8192 --lengths 256,2048 --recompute 79 --out FILE
    python -m bench.streamed --shape tiny --device cpu --tokens 64

No files are made: layers are drawn on the device, quantised there, and put into the host's memory, all of them (`--layers` for fewer).
Speeds are of whole micro-batches, without optimizer steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench import machine
from bench.shapes import SHAPES, shape_of
from bench.shared_models import random_rows
from tlora.job import LoraConfig, TrainConfig
from tlora.planning.allocator import tighten_allocator
from tlora.registry import BASE_PRECISIONS
from tlora.sharing.host_memory import Alone, Streaming
from tlora.sharing.layout import lay_out
from tlora.sharing.link_speed import measure_link
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.held_linear import hold
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import Base, make_base
from tlora.supermodel.shared_base import Precision, assemble, share_linears, shared_weights, stand_in
from tlora.supermodel.supermodel import SuperModel

_STD = 0.01  # of random weights: with 0.02, 80 layers of a 70B's width would blow up what rounding does
_WARM_UP = 2  # micro-batches


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=BASE_PRECISIONS)
    parser.add_argument("--arms", type=lambda text: text.split(","), default=["streamed", "resident"])
    parser.add_argument("--slots", type=int, default=2, help="layers on the device at a time")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--lengths", type=lambda text: [int(part) for part in text.split(",")], default=[256, 2048], metavar="LOW,HIGH")
    parser.add_argument("--recompute", type=int, default=0, help="layers that backward runs again")
    parser.add_argument("--repeats", type=int, default=8, help="micro-batches of an arm, after its warm-up")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.arms) - {"streamed", "resident"}):
        parser.error(f"--arms: {unknown[0]!r} is none of streamed, resident")
    return options


def make_arm(options: argparse.Namespace, arm: str) -> Base:
    """Random weights; the same ones in both arms but for the order in which they are drawn."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = shape_of(options.shape, options.layers)
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config, dtype=dtype).state_dict()
    stand_ins = {name: stand_in(tensor.shape, dtype) for name, tensor in names.items()}
    model: Any = assemble(config, dtype, stand_ins, options.shape)
    layout = lay_out(shared_weights(model, options.shape), 1)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in layout.places:
            drawn = torch.empty(parameter.shape, dtype=dtype, device=device)
            parameter.data = drawn.fill_(1.0) if parameter.ndim == 1 else drawn.normal_(0.0, 0.02)
    rows = random_rows(0, layout, dtype, device, std=_STD)
    if arm == "streamed":
        form = Precision(options.precision, dtype)
        stream = share_linears(model, options.shape, form, rows, Alone(Streaming(options.slots)), device)
        return make_base(model, options.shape, stream)
    for name, linear in find_linears(model).items():
        linear.weight.data = rows(name, 0, linear.out_features)
        if options.precision is not None:
            hold(model, [name], device, options.precision)
    return make_base(model.to(device), options.shape)


def make_batches(options: argparse.Namespace, vocab_size: int) -> list[PackedBatch]:
    """Of mixed samples, each job's next to each other; the last sample fills the micro-batch."""
    rng, found = np.random.default_rng(0), list[PackedBatch]()
    low, high = options.lengths
    for _ in range(options.repeats):
        lengths, left = list[int](), options.tokens
        while left > 0:
            lengths.append(min(left, int(rng.integers(low, high + 1))))
            left -= lengths[-1]
        jobs = sorted(f"job{number % options.jobs}" for number in range(len(lengths)))
        rows = [
            BatchRow(job, rng.integers(3, vocab_size, length, dtype=np.int32), np.ones(length, np.float32), float(length))
            for job, length in zip(jobs, lengths, strict=True)
        ]
        found.append(collate(rows, torch.device(options.device)))
    return found


def run_arm(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    device, started = torch.device(options.device), time.perf_counter()
    model = SuperModel(make_arm(options, arm))
    setup = time.perf_counter() - started
    for number in range(options.jobs):
        model.join(f"job{number}", LoraConfig(r=options.rank), TrainConfig(max_steps=1000))
    model.recomputed_layers = min(options.recompute, model.num_layers)
    batches = make_batches(options, model.base.vocab_size)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds, exposed = list[float](), list[float]()
    for turn, batch in enumerate([*batches[:1] * _WARM_UP, *batches]):
        before, start = _exposed(model), time.perf_counter()
        model.forward_backward(batch)
        machine.wait(device)
        if turn >= _WARM_UP:
            seconds.append(time.perf_counter() - start)
            exposed.append(_exposed(model) - before)
    fetched = model.fetches
    return {
        "arm": arm,
        "tokens_per_second": options.tokens / statistics.median(seconds),
        "seconds": statistics.median(seconds),
        "exposed_seconds": statistics.median(exposed),
        "fetched_bytes_per_micro_batch": fetched.bytes / (_WARM_UP + len(batches)) if fetched is not None else 0.0,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "setup_seconds": setup,
    }


def _exposed(model: SuperModel) -> float:
    return model.fetches.exposed_seconds if model.fetches is not None else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    device = torch.device(options.device)
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "commit")}
    found: dict[str, Any] = {**machine.facts(device, options.commit), "settings": settings, "arms": []}
    tighten_allocator(device, "auto")
    found["link_bytes_per_second"] = measure_link(device)
    for arm in options.arms:
        found["arms"].append(run_arm(options, arm))
        gc.collect()  # the arm's base before the next one's
        print(found["arms"][-1], flush=True)
        machine.write(options.out, found)
    rates = {each["arm"]: each["tokens_per_second"] for each in found["arms"]}
    if len(rates) == 2:
        found["ratio"] = rates["streamed"] / rates["resident"]
        print(f"streamed over resident: {found['ratio']:.3f}")
        machine.write(options.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
