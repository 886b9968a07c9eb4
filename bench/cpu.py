"""Speed on a CPU, in one run: jobs together, the same jobs one after another, and the same jobs with plain PEFT.

    python bench/cpu.py [--steps 40] [--repeats 3] [--json FILE]

Part 1: eight jobs (ranks 4-64, batches of 1-4 short samples) over a 4-layer model of width 256; tokens/s of optimizer steps, without
start-up. Part 2: what the adapters add to forward and input gradients of the linears at width 1,024 with 2,048 tokens. The three
ways of part 1 take turns within each repeat, so that a change of the machine's speed meets all of them; medians are printed. On two idle
cores it takes about two minutes. On busy ones torch's threads wait for each other at every operation, and it takes hours: run it with
OMP_NUM_THREADS=1 there. Each repeat is printed, and FILE rewritten, as soon as it is through.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tlora.data.dataset import Dataset, Sample, Writer
from tlora.engine.driver import Records
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.job import DataConfig, JobSpec
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.multi_lora import LoraWeights, multi_lora_linear
from tlora.kernels.reference import Segment
from tlora.store.full_disk import DiskReserve
from tlora.store.metrics import Tracker
from tlora.store.recorder import Recorder, RunContext
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

RANKS, BATCHES = (4, 8, 16, 32, 64, 8, 16, 32), (1, 2, 4, 1, 2, 4, 1, 2)
VOCAB, TOKEN_BUDGET = 4096, 2048


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


def make_data(directory: Path, index: int, count: int) -> Dataset:
    """Short samples of 16 to 64 tokens, all of them trained but the first third."""
    rng = np.random.default_rng(index)
    writer = Writer(directory / f"data-{index}")
    for length in rng.integers(16, 65, count):
        weights = np.ones(length, np.float32)
        weights[: length // 3] = 0
        writer.add(Sample(rng.integers(3, VOCAB, length).astype(np.int32), weights))
    writer.finish({})
    return Dataset(directory / f"data-{index}")


def make_jobs(directory: Path, steps: int) -> list[tuple[JobSpec, Dataset]]:
    jobs: list[tuple[JobSpec, Dataset]] = []
    for i, (rank, batch) in enumerate(zip(RANKS, BATCHES, strict=True)):
        spec = JobSpec(
            name=f"job{i}",
            data=DataConfig(path="-"),
            r=rank,
            lora_alpha=2 * rank,
            batch_size=batch,
            max_steps=steps,
            learning_rate=1e-3,
            seed=i,
        )
        jobs.append((spec, make_data(directory, i, 64)))
    return jobs


def run_tlora(model: SuperModel, jobs: list[tuple[JobSpec, Dataset]], directory: Path) -> float:
    """Seconds to train `jobs` together, from joining to the last adapter on disk."""
    start = time.perf_counter()
    context = RunContext("-", time.perf_counter, print, DiskReserve(directory, {}, print))
    records = Records(print)
    engine = Engine(model, TOKEN_BUDGET, records.listen)
    for spec, data in jobs:
        (directory / spec.name).mkdir(parents=True, exist_ok=True)
        run = JobRun(spec, data, None)
        records.add(spec.name, Recorder(run, directory / spec.name, context, Tracker([], spec, directory, print), {}))
        engine.join(run)
    while engine.run_micro_batch():
        records.see_ended()
    records.see_ended(wait=True)
    assert all(result.status == "done" for result in records.results.values()), records.results
    return time.perf_counter() - start


def run_peft(spec: JobSpec, data: Dataset, directory: Path) -> float:
    """Seconds to train one job with PEFT and torch.optim.AdamW: samples padded to the longest of their batch."""
    model: Any = make_model()
    start = time.perf_counter()
    config = PeftConfig(r=spec.r, lora_alpha=int(spec.lora_alpha), target_modules="all-linear", task_type="CAUSAL_LM")
    peft = get_peft_model(model, config)
    peft.train()
    params = [p for p in peft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=spec.learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (spec.max_steps or 1))
    order = np.random.default_rng(0).permutation(len(data))
    for step in range(spec.max_steps or 0):
        samples = [data[int(order[(step * spec.batch_size + k) % len(data)])] for k in range(spec.batch_size)]
        longest = max(len(s.input_ids) for s in samples)
        ids, labels = torch.zeros(len(samples), longest, dtype=torch.long), torch.full((len(samples), longest), -100)
        mask = torch.zeros(len(samples), longest, dtype=torch.long)
        for row, s in enumerate(samples):
            n = len(s.input_ids)
            ids[row, :n], mask[row, :n] = torch.from_numpy(s.input_ids).long(), 1
            labels[row, :n] = torch.where(torch.from_numpy(s.loss_weights) > 0, ids[row, :n], -100)
        peft(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(params, spec.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    peft.save_pretrained(str(directory / f"peft-{spec.name}"))
    return time.perf_counter() - start


def trained_tokens(jobs: list[tuple[JobSpec, Dataset]]) -> int:
    from tlora.data.order import global_batch

    return sum(
        int(data.lengths[i])
        for spec, data in jobs
        for step in range(spec.max_steps or 0)
        for i in global_batch(step, len(data), spec.batch_size, spec.seed)
    )


def bench_jobs(steps: int, repeats: int, keep: Callable[[dict[str, float]], None]) -> dict[str, float]:
    """Tokens/s of the three ways; PEFT's count is of the same jobs, its own order of samples has the same mean length. `keep` gets the
    medians after each repeat.
    """
    seconds: dict[str, list[float]] = {"together": [], "one after another": [], "PEFT one after another": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        jobs = make_jobs(directory, steps)
        model = SuperModel(make_base(make_model(), "bench"))
        warm_up = [(spec.model_copy(update={"max_steps": 3}), data) for spec, data in jobs]
        run_tlora(model, warm_up, directory / "w")
        run_peft(*warm_up[0], directory)
        tokens, speeds = trained_tokens(jobs), dict[str, float]()
        for repeat in range(repeats):
            out = directory / str(repeat)
            seconds["together"].append(run_tlora(model, jobs, out / "together"))
            seconds["one after another"].append(sum(run_tlora(model, [job], out / "alone") for job in jobs))
            seconds["PEFT one after another"].append(sum(run_peft(*job, out) for job in jobs))
            print(
                f"repeat {repeat + 1} of {repeats}:", ", ".join(f"{way} {values[-1]:.1f} s" for way, values in seconds.items()), flush=True
            )
            speeds = {way: tokens / statistics.median(values) for way, values in seconds.items()}
            keep(speeds)
    return speeds


def bench_linears(repeats: int, width: int = 1024, tokens: int = 2048) -> dict[str, float]:
    """Seconds of forward and input gradients through the linears of one block, bare and with eight adapters (ranks add up to 240)."""
    ranks = (8, 16, 32, 64) * 2
    shapes = [(width, width)] * 4 + [(width, 2816)] * 2 + [(2816, width)]
    step, rows, segments = tokens // 8, 0, []
    for i, rank in enumerate(ranks):
        segments.append(Segment(i * step, (i + 1) * step, rows, rows + rank, 2.0))
        rows += -(-rank // 16) * 16
    work: list[tuple[torch.Tensor, torch.Tensor, LoraWeights]] = []
    for k, n in shapes:
        a, b = torch.randn(rows, k) * k**-0.5, torch.randn(rows, n) * 0.02
        weights = LoraWeights(a, b, torch.zeros_like(a), torch.zeros_like(b))
        work.append((torch.randn(tokens, k, requires_grad=True), torch.randn(n, k) * k**-0.5, weights))
    dys = [torch.randn(tokens, n) for _, n in shapes]

    def bare() -> None:
        for (x, w, lora), dy in zip(work, dys, strict=True):
            multi_lora_linear(x, partial(FrozenLinear, PlainWeight(w)), lora, ()).backward(
                dy
            )  # no segments: the base's own products, by the same library
            x.grad = None

    def torch_bare() -> None:
        for (x, w, _), dy in zip(work, dys, strict=True):
            torch.nn.functional.linear(x, w).backward(dy)
            x.grad = None

    def adapted() -> None:
        for (x, w, lora), dy in zip(work, dys, strict=True):
            multi_lora_linear(x, partial(FrozenLinear, PlainWeight(w)), lora, tuple(segments)).backward(dy)
            x.grad = None

    times: dict[str, list[float]] = {"torch": [], "bare": [], "with adapters": []}
    for _ in range(max(repeats, 5) + 1):
        times["torch"].append(_seconds(torch_bare))
        times["bare"].append(_seconds(bare))
        times["with adapters"].append(_seconds(adapted))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {**_facts(), "steps": options.steps, "repeats": options.repeats}

    def keep(name: str, values: dict[str, float]) -> None:
        found[name] = values
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n")

    speeds = bench_jobs(options.steps, options.repeats, partial(keep, "tokens_per_second"))
    peft = speeds["PEFT one after another"]
    for way, speed in speeds.items():
        print(f"{way:24} {speed:10,.0f} tokens/s   {speed / peft:5.2f} x PEFT", flush=True)
    linears = bench_linears(options.repeats)
    keep("linears_seconds", linears)
    print("adapters over the bare linears, forward and input gradients (width 1,024, 2,048 tokens, 8 jobs, ranks add up to 240):")
    for name, what in (("torch", "F.linear, as transformers runs them"), ("bare", "our own products without adapters")):
        print(f"  {linears['with adapters'] / linears[name] - 1:+7.1%} over {what} ({linears[name] * 1e3:.0f} ms)")


def _facts() -> dict[str, Any]:
    """Of the code and of the machine, as it is before the first measurement: how busy it is decides how long all takes."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    cpu = next((x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "?")
    machine = {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version()}
    return {"commit": commit, "machine": machine | {"load_average": os.getloadavg()[0]}}


if __name__ == "__main__":
    main()
