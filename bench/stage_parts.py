"""Seconds of each stage of a base, one after another on one GPU, and of the base whole; and what the host's link carries.

    python -m bench.stage_parts --base DIRECTORY --stages 2 --tokens 4096,8192 --out FILE

Where there is one GPU no pipeline can be timed. What two would make of these parts is computed, and says so: the slowest stage sets the
pace of a full pipeline, with its copies, which are queued between the products: hidden states one way, their gradient the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench import machine
from tlora.job import LoraConfig, TrainConfig
from tlora.planning.base_parts import count_parts
from tlora.shape.stages import LayerRange, cut_layers
from tlora.sharing.host_memory import HostMemory
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.load import layers_of, outline
from tlora.supermodel.supermodel import SuperModel

_WARM_UP = 3  # micro-batches


class _Before:
    """Of a stage behind the first: hidden states as they might come, and no one who takes gradients."""

    def __init__(self, model: SuperModel) -> None:
        self._width, self._device, self._dtype = model.base.head.weight_VH.shape[1], model.device, model.bank.dtype

    def receive(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self._width, device=self._device, dtype=self._dtype)

    def send_back(self, gradient_TH: Tensor) -> None:
        pass


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[4096], help="of a micro-batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    return parser.parse_args(arguments)


def micro_batch(options: argparse.Namespace, tokens: int, vocab_size: int, device: torch.device) -> PackedBatch:
    """Equal samples, the jobs' next to each other."""
    rng, count = np.random.default_rng(0), max(1, tokens // options.length)
    jobs = sorted(f"job{number % options.jobs}" for number in range(count))
    ids = [rng.integers(3, vocab_size, options.length, dtype=np.int32) for _ in jobs]
    return collate([BatchRow(job, row, np.ones(len(row), np.float32), float(len(row))) for job, row in zip(jobs, ids, strict=True)], device)


def passes_of(model: SuperModel, batch: PackedBatch) -> Callable[[], tuple[float, float]]:
    """What computes the batch, forward and backward, and gives the seconds of both; of the last stage and of a whole base these are one."""
    stage, device = model.base.stage, model.device

    def early() -> tuple[float, float]:
        before = time.perf_counter()
        backs = list[tuple[Callable[[Tensor], object], Tensor]]()
        for each in model.stage_passes(batch, (), True):
            hidden_TH, back = each.run()
            assert back is not None
            backs.append((back, torch.randn_like(hidden_TH)))
        machine.wait(device)
        middle = time.perf_counter()
        for back, gradient_TH in backs:
            back(gradient_TH)
        machine.wait(device)
        return middle - before, time.perf_counter() - middle

    def whole() -> tuple[float, float]:
        before = time.perf_counter()
        model.evaluate(batch)
        machine.wait(device)
        middle = time.perf_counter()
        model.forward_backward(batch)
        machine.wait(device)
        forward, both = middle - before, time.perf_counter() - middle
        return forward, both - forward

    return whole if stage is None or stage.layers.is_last else early


def measure(options: argparse.Namespace, layers: LayerRange | None) -> list[dict[str, Any]]:
    model = SuperModel.from_pretrained(options.base, "auto", options.device, shared=layers)
    if layers is not None and not layers.is_first:
        model.passes.upstream = _Before(model)
    for number in range(options.jobs):
        model.join(f"job{number}", LoraConfig(r=options.rank), TrainConfig(max_steps=1000))
    rows = list[dict[str, Any]]()
    for tokens in options.tokens:
        run = passes_of(model, micro_batch(options, tokens, model.base.vocab_size, model.device))
        found = [run() for _ in range(_WARM_UP + options.repeats)][_WARM_UP:]
        forward, backward = (statistics.median(each[i] for each in found) for i in range(2))
        place = {"first_layer": layers.first, "stop_layer": layers.stop} if layers is not None else {}
        rows.append({**place, "tokens": tokens, "forward_seconds": forward, "backward_seconds": backward, "seconds": forward + backward})
        print(rows[-1], flush=True)
    return rows


def measure_host_link(num_bytes: int, device: torch.device, repeats: int) -> dict[str, float]:
    """Bytes a second to pinned memory and back, each alone."""
    memory, there = HostMemory(num_bytes, device), torch.empty(num_bytes, dtype=torch.uint8, device=device)
    ways: dict[str, Callable[[], object]] = {
        "to_host": lambda: memory.own.copy_(there, non_blocking=True),
        "from_host": lambda: memory.read(0, 0, there),
    }
    found = dict[str, float]()
    for way, copy in ways.items():
        seconds = list[float]()
        for _ in range(_WARM_UP + repeats):
            machine.wait(device)
            before = time.perf_counter()
            copy()
            machine.wait(device)
            seconds.append(time.perf_counter() - before)
        found[f"{way}_bytes_per_second"] = num_bytes / statistics.median(seconds[_WARM_UP:])
    return found


def compute(whole: Sequence[dict[str, Any]], stages: Sequence[Sequence[dict[str, Any]]], link: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a full pipeline, for each number of tokens: its pace over that of as many GPUs with the whole base."""
    rows = list[dict[str, Any]]()
    for number, alone in enumerate(whole):
        slowest = max(stage[number]["seconds"] for stage in stages)
        copies = link["bytes_per_token"] * alone["tokens"] * sum(1 / link[f"{way}_bytes_per_second"] for way in ("to_host", "from_host"))
        rows.append(
            {
                "tokens": alone["tokens"],
                "computed_not_measured": True,
                "copy_seconds": copies,
                "seconds_of_slowest_stage": slowest,
                "over_gpus_alone": alone["seconds"] / len(stages) / (slowest + copies),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_options(arguments)
    device = torch.device(options.device)
    settings = {key: value for key, value in vars(options).items() if key not in ("out", "commit")}
    found: dict[str, Any] = {"benchmark": "stage_parts", **machine.facts(device, options.commit), "settings": settings}
    outlined = SuperModel(outline(options.base, "auto", None))
    parts = count_parts(outlined, device, options.rank)
    count = len(layers_of(outlined.base.decoder))
    cuts = cut_layers(parts.layer_weights, parts.head_weights, [1.0] * options.stages)
    width = parts.hidden_size * parts.memory.element_bytes
    link = {"bytes_per_token": width, **measure_host_link(width * max(options.tokens), device, options.repeats)}
    found |= {"link": link, "stages": [measure(options, LayerRange(first, stop, count)) for first, stop in cuts]}
    found["whole"] = measure(options, None)
    found["pipeline"] = compute(found["whole"], found["stages"], link)
    machine.write(options.out, found)
    for row in found["pipeline"]:
        print(f"computed, {row['tokens']:,} tokens: {row['over_gpus_alone']:.3f} of {options.stages} GPUs with the whole base")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
