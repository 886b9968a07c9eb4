"""Short measured runs that `bench.plan_points` compares plans with: shapes, lengths, budgets, precisions, recomputed layers, streams.

    python -m bench.plan_measurements --groups 8b,8b-nf4 --out FILE
    TLORA_CARD_CLASS=sm_80 python -m bench.plan_measurements --groups 8b-short --out FILE
    python -m bench.plan_measurements --groups tiny --device cpu --seconds 0.1 --out FILE

The engine's own loop with optimizer steps, after a warm-up, over random weights; shapes have fewer layers than their models, so that
they are made in seconds. Bytes are the peak of the allocator.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench import machine
from bench.streamed import make_arm
from bench.together import Plan, train_together
from bench.workload import ENDLESS, Job
from tlora.data.dataset import Dataset, Sample, Writer
from tlora.job import BasePrecision, DataConfig, JobSpec
from tlora.kernels.device import FORCED
from tlora.planning.allocator import tighten_allocator
from tlora.sharing.link_speed import measure_link
from tlora.supermodel.supermodel import SuperModel


@dataclass(frozen=True)
class Work:
    """`jobs` jobs of `rank`, each with `batch_size` samples a step, of one length or of any between two."""

    jobs: int
    batch_size: int
    lengths: int | tuple[int, int]
    token_budget: int
    recompute: int = 0
    rank: int = 16
    fitted: bool = False  # constants of the plan are fitted to it

    def lengths_of(self, job: int) -> list[int]:
        """Tokens of each sample of a job."""
        count = 48 * self.batch_size
        if isinstance(self.lengths, int):
            return [self.lengths] * count
        low, high = self.lengths
        return np.random.default_rng(job).integers(low, high + 1, count).tolist()


@dataclass(frozen=True)
class Group:
    """Works over one base: of a shape of `bench.shapes` with so many layers, of which `slots` are on the device where it is streamed."""

    shape: str
    layers: int
    works: tuple[Work, ...]
    precision: BasePrecision | None = None
    slots: int = 0


_EIGHT, _FOUR = Work(8, 2, 512, 8192), Work(4, 4, (64, 1024), 4096)
GROUPS: dict[str, Group] = {
    "8b": Group(
        "llama-3-8b",
        16,
        (
            replace(_EIGHT, fitted=True),
            Work(1, 8, 512, 4096),
            _FOUR,
            Work(4, 2, 2048, 8192, recompute=8),
            Work(2, 2, 4096, 8192, recompute=16),
            Work(1, 1, 512, 512),
        ),
    ),
    "8b-nf4": Group("llama-3-8b", 16, (_EIGHT, _FOUR, Work(1, 2, 512, 1024)), "nf4"),
    "8b-fp8": Group("llama-3-8b", 16, (_EIGHT, _FOUR), "fp8"),
    "8b-streamed": Group("llama-3-8b", 16, (Work(8, 4, 512, 16384), _EIGHT), slots=2),
    "0.6b": Group("qwen3-0.6b", 28, (replace(_EIGHT, fitted=True), Work(1, 4, 512, 2048), _FOUR)),
    "1.7b": Group("qwen3-1.7b", 28, (_EIGHT, Work(1, 4, 512, 2048), Work(4, 4, (64, 2048), 8192), Work(4, 2, 2048, 8192, recompute=14))),
    "32b": Group("qwen2.5-32b", 6, (_EIGHT, _FOUR)),
    "70b": Group("llama-3-70b", 6, (Work(4, 2, 2048, 8192), _FOUR)),
    "70b-fp8": Group("llama-3-70b", 6, (Work(4, 2, 2048, 8192),), "fp8"),
    "8b-short": Group("llama-3-8b", 8, (_EIGHT, _FOUR, Work(1, 4, 512, 2048))),
    "tiny": Group("tiny", 2, (Work(2, 2, (8, 32), 128, rank=4),)),
}


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=lambda text: text.split(","), default=[name for name in GROUPS if name != "tiny"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.5, help="measured of each work")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds after which no further work is begun")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.groups if name not in GROUPS]:
        parser.error(f"--groups: there is no {unknown[0]!r}; there are {', '.join(GROUPS)}")
    return options


def make_jobs(work: Work, vocab_size: int, directory: Path) -> list[Job]:
    jobs = list[Job]()
    for number in range(work.jobs):
        rng, writer = np.random.default_rng(number), Writer(directory / str(number))
        for length in work.lengths_of(number):
            writer.add(Sample(rng.integers(3, vocab_size, length).astype(np.int32), np.ones(length, np.float32)))
        writer.finish({})
        jobs.append(Job(spec_of(work, number, "-"), Dataset(directory / str(number))))
    return jobs


def spec_of(work: Work, number: int, data: str, steps: int = ENDLESS) -> JobSpec:
    most = work.lengths if isinstance(work.lengths, int) else work.lengths[1]
    data_config = DataConfig(path=data, max_length=most)
    return JobSpec(name=f"job{number}", data=data_config, r=work.rank, batch_size=work.batch_size, max_steps=steps, seed=number)


def measure(model: SuperModel, work: Work, seconds: float) -> dict[str, Any]:
    model.recomputed_layers = min(work.recompute, model.num_layers)
    with TemporaryDirectory() as directory:
        jobs = make_jobs(work, model.base.vocab_size, Path(directory))
        run = train_together(model, jobs, Plan(work.token_budget, seconds))
    model.release_memory()
    useful = sum(tokens for tokens, _ in run.windows)
    return {
        "tokens_per_second": run.tokens_per_second,
        "tokens_per_second_of_windows": [tokens / seconds for tokens, seconds in run.windows],
        "padding_share": 1 - useful / run.computed_tokens,
        "steps": run.steps,
        "peak_bytes": run.peak_bytes,
        "first_step_seconds": run.first_step_seconds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options, started = read_options(arguments), time.perf_counter()
    device = torch.device(options.device)
    found: dict[str, Any] = {"benchmark": "plan_measurements", **machine.facts(device, options.commit), "rows": []}
    found["card_class"] = os.environ.get(FORCED)
    tighten_allocator(device, "auto")
    found["link_bytes_per_second"] = measure_link(device)
    for name in options.groups:
        group = GROUPS[name]
        form = {"shape": group.shape, "layers": group.layers, "precision": group.precision, "slots": group.slots}
        made = make_arm(SimpleNamespace(**form, device=options.device), "streamed" if group.slots else "resident")  # type: ignore[arg-type]
        model = SuperModel(made)
        for work in group.works:
            if time.perf_counter() - started > options.time_limit:
                return 1
            found["rows"].append({"group": name, **form, "work": asdict(work), **measure(model, work, options.seconds)})
            machine.write(options.out, found)
            row = found["rows"][-1]
            rate = f"{row['tokens_per_second']:10,.0f} tokens/s, {row['peak_bytes'] / 2**30:.2f} GiB"
            print(f"{time.perf_counter() - started:5.0f} s {name:12} {asdict(work)}: {rate}", flush=True)
        del model, made
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
