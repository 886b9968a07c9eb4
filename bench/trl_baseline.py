"""TRL on the work of bench/real_jobs.yaml, as its users run it: SFTTrainer, one job after another, in several settings.

    python -m bench.trl_baseline --shape llama-3-8b --seconds 10 --out FILE
    python -m bench.trl_baseline --shape tiny --device cpu --max-steps 4 --settings documented,padded

The samples are those of `tlora train`: the same files, tokenizer, max_length and trained tokens, ranks and batches. Weights are bf16 on a
GPU and as random as in bench.real_jobs; attention is sdpa. Neither loading the base nor preparing data counts, to TRL's advantage.

documented: SFTConfig's defaults (padded batches, fp32 adapters under autocast, gradient checkpointing). padded, padding-free and packed
have Liger's kernels, bf16 adapters, no autocast, and gradient checkpointing only where the memory does not suffice without. packed: rows
of max_length, best-fit decreasing, so that a batch holds more samples than the job asks for. packed-by-2 and packed-by-1 accumulate that
batch, two rows or one at a time: the mask of sdpa over all rows of a forward pass grows with the square of their tokens.

Speeds are of the samples' own tokens, without padding; `tokens_per_second` is that of doing the eight jobs' tokens one job after another,
each at its own speed.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, TrainerCallback

from bench import machine
from bench.base_files import write_tokenizer
from bench.real_jobs import JOBS_FILE
from bench.shapes import SHAPES, make_model
from bench.together import gib
from tlora.data.dataset import Dataset, Sample
from tlora.data.order import global_batch
from tlora.data.prepare import PrepareRequest, prepare
from tlora.errors import DataError
from tlora.job import JobSpec
from tlora.jobs_file import read_jobs_file

WARM_UP_STEPS = 3
_IGNORED = -100


@dataclass(frozen=True)
class Setting:
    """One way to run SFTTrainer."""

    name: str
    packing: bool = False
    padding_free: bool = False
    best: bool = True  # Liger, bf16 adapters without autocast, no checkpointing; else TRL's and PEFT's defaults
    checkpointing: bool = False
    rows: int | None = None  # of one forward, at most; the others of the batch are accumulated


SETTINGS = (
    Setting("packed", packing=True),
    Setting("packed-by-2", packing=True, rows=2),
    Setting("packed-by-1", packing=True, rows=1),
    Setting("padded"),
    Setting("padding-free", padding_free=True),
    Setting("documented", best=False, checkpointing=True),
)


@dataclass(frozen=True)
class Task:
    """One job: its samples, and the tokens that its optimizer steps take in `tlora train`."""

    spec: JobSpec
    data: Dataset
    tokens: int


@dataclass(frozen=True)
class Target:
    """What is measured where: `steps` at most per job, of which the first do not count; after `seconds` none is begun."""

    shape: str
    device: torch.device
    tokenizer: Path
    steps: int
    seconds: float
    directory: Path


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--settings", default=",".join(setting.name for setting in SETTINGS))
    parser.add_argument("--jobs", help="names of jobs in bench/real_jobs.yaml; default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured of each job in each setting, after its warm-up")
    parser.add_argument("--max-steps", type=int, help="of each job; default: as in the jobs file")
    parser.add_argument("--max-length", type=int, help="default: as in the jobs file")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    known = {setting.name: setting for setting in SETTINGS}
    unknown = sorted(set(options.settings.split(",")) - set(known))
    if unknown:
        parser.error(f"--settings: there is no {unknown[0]!r}; there are {', '.join(known)}")
    options.settings = [known[name] for name in options.settings.split(",")]
    return options


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, which is written to `options.out` after every job."""
    if importlib.util.find_spec("trl") is None:
        raise SystemExit("TRL is not installed. Install it with: pip install trl liger-kernel")
    device = torch.device(options.device)
    facts = machine.facts(device, options.commit)
    with tempfile.TemporaryDirectory(prefix="trl-baseline-") as name:
        os.environ["HF_DATASETS_CACHE"] = str(Path(name) / "datasets")
        tokenizer = Path(name) / "tokenizer"
        write_tokenizer(options.shape, tokenizer)
        tasks = make_tasks(options, tokenizer, Path(name))
        versions = {package: importlib.metadata.version(package) for package in ("trl", "accelerate", "datasets")}
        setup = {"shape": options.shape, "jobs": [_describe(task) for task in tasks], "seconds": options.seconds}
        found: dict[str, Any] = {"benchmark": "trl_baseline", **facts, "setup": setup, "rows": []}
        found["versions"] |= versions
        print(
            f"{facts['device']}, torch {facts['versions']['torch']}, trl {versions['trl']}, commit {facts['commit']}: {facts['command']}",
            flush=True,
        )
        for setting in options.settings:
            row: dict[str, Any] = {"setting": setting.name, "jobs": {}}
            found["rows"].append(row)
            for task in tasks:
                target = Target(
                    options.shape, device, tokenizer, options.max_steps or task.spec.max_steps or 0, options.seconds, Path(name) / "out"
                )
                row["jobs"][task.spec.name] = measure(setting, task, target)
                print(setting.name, task.spec.name, row["jobs"][task.spec.name], flush=True)
                machine.write(options.out, found)
            row["tokens_per_second"] = speed_of(tasks, row["jobs"])
            machine.write(options.out, found)
    return found


def make_tasks(options: argparse.Namespace, tokenizer: Path, directory: Path) -> list[Task]:
    """The jobs of the file, prepared as `tlora train` prepares them."""
    overrides = [f"defaults.max_length={options.max_length}"] if options.max_length else []
    overrides += [f"defaults.max_steps={options.max_steps}"] if options.max_steps else []
    jobs = read_jobs_file(JOBS_FILE, overrides).jobs
    if options.jobs:
        jobs = [job for job in jobs if job.name in options.jobs.split(",")]
    vocabulary = SHAPES[options.shape].vocab_size
    requests = [PrepareRequest(job.name, job.data, str(tokenizer), vocabulary, directory / "cache", directory) for job in jobs]
    tasks: list[Task] = []
    sets = prepare(requests)
    for job in jobs:
        found = sets[job.name]
        if isinstance(found, DataError):
            raise found
        batches = (global_batch(step, len(found.train), job.batch_size, job.seed) for step in range(job.max_steps or 0))
        tasks.append(Task(job, found.train, sum(int(found.train.lengths[i]) for batch in batches for i in batch)))
    return tasks


def _describe(task: Task) -> dict[str, Any]:
    return {"name": task.spec.name, "rank": task.spec.r, "batch_size": task.spec.batch_size, "tokens": task.tokens}


def measure(setting: Setting, task: Task, target: Target) -> dict[str, Any]:
    """Figures of one job, or why there are none: a library that cannot run a setting is a finding, not the end of the benchmark."""
    try:
        return _train(setting, task, target)
    except torch.OutOfMemoryError:
        pass
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip()}"[:300]}
    finally:
        gc.collect()
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
    if setting.checkpointing:
        return {"error": "out of memory with gradient checkpointing"}
    return measure(replace(setting, checkpointing=True), task, target)


class _Watch(TrainerCallback):
    """Notes when the steps that count begin and end; ends the training when the time is up."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self._device, self._seconds = device, seconds
        self.began = self.ended = 0.0
        self.steps = 0
        self.first = self.last = 0  # forward passes before those that count, and with them
        self._passes = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._passes += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._passes += 1
        if state.global_step == WARM_UP_STEPS:
            machine.wait(self._device)
            self.began, self.first = time.perf_counter(), self._passes
        elif state.global_step > WARM_UP_STEPS:
            self.steps = state.global_step - WARM_UP_STEPS
            late = time.perf_counter() - self.began >= self._seconds
            if late or state.global_step == state.max_steps:
                machine.wait(self._device)
                self.ended, self.last = time.perf_counter(), self._passes
                control.should_training_stop = True


def _train(setting: Setting, task: Task, target: Target) -> dict[str, Any]:
    start, cuda = time.perf_counter(), target.device.type == "cuda"
    trainer, watch = _make_trainer(setting, task, target)
    counts: list[int] = []
    trainer.data_collator = _counting(trainer.data_collator, counts)
    if cuda:
        torch.cuda.reset_peak_memory_stats(target.device)
    trainer.train()
    tokens, seconds = sum(counts[watch.first : watch.last]), watch.ended - watch.began
    if not watch.steps:
        return {"error": f"{trainer.state.global_step} steps, of which {WARM_UP_STEPS} warm up: none was left to be measured"}
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_step": tokens / watch.steps,
        "steps": watch.steps,
        "seconds": seconds,
        "whole_seconds": time.perf_counter() - start,
        "peak_gib": gib(torch.cuda.max_memory_allocated(target.device)) if cuda else None,
        "checkpointing": setting.checkpointing,
    }


def _make_trainer(setting: Setting, task: Task, target: Target) -> tuple[Any, _Watch]:
    from datasets import Dataset as Rows
    from trl import SFTConfig, SFTTrainer

    cuda, spec = target.device.type == "cuda", task.spec
    lora = LoraConfig(r=spec.r, lora_alpha=spec.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = make_model(target.shape, target.device, torch.bfloat16 if cuda else torch.float32)
    rows = min(spec.batch_size, setting.rows or spec.batch_size)
    if setting.best:
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    config = SFTConfig(
        output_dir=str(target.directory),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=spec.batch_size // rows,
        max_steps=target.steps,
        learning_rate=spec.learning_rate,
        max_length=spec.data.max_length if setting.packing or not setting.padding_free else None,
        packing=setting.packing,
        padding_free=setting.padding_free,
        gradient_checkpointing=setting.checkpointing,
        bf16=cuda and not setting.best,
        use_liger_kernel=cuda and setting.best,
        use_cpu=not cuda,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=spec.seed,
    )
    watch = _Watch(target.device, target.seconds)
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=Rows.from_list([_row(task.data[i]) for i in range(len(task.data))]),
        processing_class=AutoTokenizer.from_pretrained(target.tokenizer),
        peft_config=None if setting.best else lora,
        callbacks=[watch],
    )
    return trainer, watch


def _row(sample: Sample) -> dict[str, list[int]]:
    ids = sample.input_ids.tolist()
    return {"input_ids": ids, "labels": [token if weight > 0 else _IGNORED for token, weight in zip(ids, sample.loss_weights, strict=True)]}


def _counting(collate: Callable[..., Mapping[str, torch.Tensor]], counts: list[int]) -> Callable[..., Mapping[str, torch.Tensor]]:
    """`collate`, which also appends each batch's tokens without padding to `counts`."""

    def counted(rows: Any) -> Mapping[str, torch.Tensor]:
        batch = collate(rows)
        mask = batch.get("attention_mask")
        counts.append(int(mask.sum()) if mask is not None else batch["input_ids"].numel())
        return batch

    return counted


def speed_of(tasks: Sequence[Task], jobs: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Tokens per second of one job after another; None where one of them could not be run."""
    if any("tokens_per_second" not in jobs[task.spec.name] for task in tasks):
        return None
    seconds = sum(task.tokens / jobs[task.spec.name]["tokens_per_second"] for task in tasks)
    return sum(task.tokens for task in tasks) / seconds


def format_table(found: dict[str, Any]) -> str:
    """Settings in rows, jobs in columns."""
    names = [job["name"] for job in found["setup"]["jobs"]]
    lines = [" ".join([f"{'':14} {'all jobs':>9}", *(f"{name[:13]:>13}" for name in names)])]
    for row in found["rows"]:
        speeds = [row.get("tokens_per_second"), *(row["jobs"][name].get("tokens_per_second") for name in names)]
        first, *others = ["—" if speed is None else f"{speed:,.0f}" for speed in speeds]
        lines.append(" ".join([f"{row['setting']:14} {first:>9}", *(f"{other:>13}" for other in others)]))
        lines += [f"  {name}: {job['error']}" for name, job in row["jobs"].items() if "error" in job]
    return "\n".join(lines)


def main() -> int:
    found = run_benchmark(read_options())
    print(format_table(found))
    return 0 if all(row["tokens_per_second"] for row in found["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
