"""TRL on the work of bench.real_jobs over a shape, as its users run it: SFTTrainer, one job after another, in several settings.

    python -m bench.trl_baseline --shape llama-3-8b --seconds 10 --out FILE
    python -m bench.trl_baseline --shape llama-3-8b --settings qlora --base DIRECTORY --pilot c4,alpaca --seconds 1.5 --warm-up 2 --out FILE
    python -m bench.trl_baseline --shape tiny --device cpu --max-steps 4 --settings documented,padded

The samples are those of `tlora train`: the same files, tokenizer, max_length and trained tokens, ranks and batches; over a mixture adapters
are at its experts too. Weights are bf16 on a GPU and as random as in bench.real_jobs; attention is sdpa, or eager where the family has
sinks; experts are transformers' own choice (grouped_mm). Neither loading the base nor preparing data counts, to TRL's advantage. Without
TRL, transformers' Trainer runs the settings that it has. Liger's kernels are used where they are installed.

documented: SFTConfig's defaults (padded batches, fp32 adapters under autocast, gradient checkpointing). padded, padding-free and packed
have Liger's kernels, bf16 adapters, no autocast, and gradient checkpointing only where the memory does not suffice without. packed: rows
of max_length, best-fit decreasing, so that a batch holds more samples than the job asks for. packed-by-2 and packed-by-1 accumulate that
batch, two rows or one at a time: the mask of sdpa over all rows of a forward pass grows with the square of their tokens.

qlora is five settings over the base of --base in four bits (bitsandbytes NF4, nested, computing in bf16): padded and padding-free as
above, and with gradient checkpointing; qlora-documented is what its documentation shows: prepare_model_for_kbit_training (norms, embedding
and head in fp32), fp32 adapters under autocast, padded batches, gradient checkpointing; qlora-kept is that without checkpointing.

With --pilot all settings are measured on those jobs, and the fastest of them alone on the others: it is the one whose speed counts.

Speeds are of the samples' own tokens, without padding; `tokens_per_second` is that of doing the eight jobs' tokens one job after another,
each at its own speed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import machine, trainers
from bench.base_files import write_tokenizer
from bench.real_jobs import jobs_file_of
from bench.shapes import SHAPES
from bench.trainers import FourBitBase, Setting, Target, Task
from tlora.data.order import global_batch
from tlora.data.prepare import prepare
from tlora.data.request import PrepareRequest
from tlora.errors import DataError
from tlora.jobs_file import read_jobs_file

SETTINGS = (
    Setting("packed", packing=True),
    Setting("packed-by-2", packing=True, rows=2),
    Setting("packed-by-1", packing=True, rows=1),
    Setting("padded"),
    Setting("padding-free", padding_free=True),
    Setting("documented", best=False, checkpointing=True),
)
QLORA = (
    Setting("qlora-padding-free", padding_free=True, four_bit=True),
    Setting("qlora-padded", four_bit=True),
    Setting("qlora-documented", best=False, four_bit=True, checkpointing=True),
    Setting("qlora-kept", best=False, four_bit=True),
    Setting("qlora-padding-free-checkpointed", padding_free=True, four_bit=True, checkpointing=True),
)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="of the shape's decoder; default: the shape's own")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--settings", default=",".join(setting.name for setting in SETTINGS), help="with commas; qlora: all of qlora-*")
    parser.add_argument("--base", type=Path, help="directory of a base and its tokenizer; settings of four bits need it")
    parser.add_argument("--jobs", help="names of jobs in the jobs file of bench.real_jobs; default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured of each job in each setting, after its warm-up")
    parser.add_argument("--warm-up", type=int, default=trainers.WARM_UP_STEPS, help="steps of each job in each setting before those")
    parser.add_argument("--pilot", type=int, metavar="JOBS", help="jobs, those of the most tokens, by which the setting is chosen; all")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), help="seconds after which no other setting than the first is begun"
    )
    parser.add_argument("--max-steps", type=int, help="of each job; default: as in the jobs file")
    parser.add_argument("--max-length", type=int, help="default: as in the jobs file")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    known = {setting.name: (setting,) for setting in (*SETTINGS, *QLORA)} | {"qlora": QLORA}
    unknown = sorted(set(options.settings.split(",")) - set(known))
    if unknown:
        parser.error(f"--settings: there is no {unknown[0]!r}; there are {', '.join(known)}")
    options.settings = [setting for name in options.settings.split(",") for setting in known[name]]
    if options.base is None and (four_bit := [setting.name for setting in options.settings if setting.four_bit]):
        parser.error(f"--settings: {four_bit[0]} loads its base from files; name their directory with --base")
    return options


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, which is written to `options.out` after every job."""
    if not trainers.has_trl() and (packed := [setting.name for setting in options.settings if setting.packing]):
        raise SystemExit(f"{packed[0]}: TRL is not installed. Install it with: pip install trl liger-kernel; or leave it out of --settings")
    started, device = time.perf_counter(), torch.device(options.device)
    with tempfile.TemporaryDirectory(prefix="trl-baseline-") as name:
        os.environ["HF_DATASETS_CACHE"] = str(Path(name) / "datasets")
        tokenizer = options.base or Path(name) / "tokenizer"
        if not options.base:
            write_tokenizer(options.shape, tokenizer)
        tasks = make_tasks(options, tokenizer, Path(name))
        setup = {"shape": options.shape, "jobs": [_describe(task) for task in tasks], "seconds": options.seconds, "pilot": options.pilot}
        trainer = "trl.SFTTrainer" if trainers.has_trl() else "transformers.Trainer"
        found: dict[str, Any] = {"benchmark": "trl_baseline", **machine.facts(device, options.commit), "setup": setup, "trainer": trainer}
        found["versions"] |= machine.versions("trl", "accelerate", "datasets", "bitsandbytes")
        found["rows"] = []
        print(f"{found['device']}, torch {found['versions']['torch']}, {trainer}, commit {found['commit']}: {found['command']}", flush=True)
        base = FourBitBase(options.base, device) if options.base else None
        target = Target(options.shape, device, tokenizer, 0, options.seconds, Path(name) / "out", base, options.warm_up, options.layers)
        _measure_settings(options, tasks, target, started, found)
        found["whole_seconds"] = time.perf_counter() - started
        machine.write(options.out, found)
    return found


def _measure_settings(options: argparse.Namespace, tasks: Sequence[Task], target: Target, started: float, found: dict[str, Any]) -> None:
    """A row per setting into `found`. The others than the pilot jobs are trained in the setting that was fastest on those."""
    pilots = sorted(tasks, key=lambda task: -task.tokens)[: options.pilot]
    for number, setting in enumerate(options.settings):
        row: dict[str, Any] = {"setting": setting.name, "jobs": {}}
        found["rows"].append(row)
        if number and time.perf_counter() - started > options.time_limit:
            row["skipped"] = "the time limit was reached"
            continue
        _measure_tasks(options, setting, pilots, target, row, found)
        row["pilot_tokens_per_second"] = speed_of(pilots, row["jobs"])
    best = max(found["rows"], key=lambda row: row.get("pilot_tokens_per_second") or 0.0)
    if best.get("pilot_tokens_per_second"):
        (setting,) = [each for each in options.settings if each.name == best["setting"]]
        _measure_tasks(options, setting, [task for task in tasks if task not in pilots], target, best, found)
    for row in found["rows"]:
        row["tokens_per_second"] = speed_of(tasks, row["jobs"])
    best["best"] = best["tokens_per_second"] is not None


def _measure_tasks(
    options: argparse.Namespace, setting: Setting, tasks: Sequence[Task], target: Target, row: dict[str, Any], found: dict[str, Any]
) -> None:
    for task in tasks:
        row["jobs"][task.spec.name] = measure(setting, task, replace(target, steps=options.max_steps or task.spec.max_steps or 0))
        print(setting.name, task.spec.name, row["jobs"][task.spec.name], flush=True)
        machine.write(options.out, found)


def make_tasks(options: argparse.Namespace, tokenizer: Path, directory: Path) -> list[Task]:
    """The jobs of the file, prepared as `tlora train` prepares them."""
    overrides = [f"defaults.max_length={options.max_length}"] if options.max_length else []
    overrides += [f"defaults.max_steps={options.max_steps}"] if options.max_steps else []
    jobs = read_jobs_file(jobs_file_of(options.shape), overrides).jobs
    if options.jobs:
        asked, known = options.jobs.split(","), [job.name for job in jobs]
        if unknown := [name for name in asked if name not in known]:
            raise SystemExit(f"--jobs: there is no {unknown[0]!r}; there are {', '.join(known)}")
        jobs = [job for job in jobs if job.name in asked]
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
        return trainers.train(setting, task, target)
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


def speed_of(tasks: Sequence[Task], jobs: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Tokens per second of one job after another; None where one of them could not be run."""
    if any("tokens_per_second" not in jobs.get(task.spec.name, {}) for task in tasks):
        return None
    seconds = sum(task.tokens / jobs[task.spec.name]["tokens_per_second"] for task in tasks)
    return sum(task.tokens for task in tasks) / seconds


def format_table(found: dict[str, Any]) -> str:
    """Settings in rows, jobs in columns."""
    names = [job["name"] for job in found["setup"]["jobs"]]
    width = max(len(row["setting"]) for row in found["rows"])
    lines = [" ".join([f"{'':{width}} {'all jobs':>9}", *(f"{name[:13]:>13}" for name in names)])]
    for row in found["rows"]:
        speeds = [row.get("tokens_per_second"), *(row["jobs"].get(name, {}).get("tokens_per_second") for name in names)]
        first, *others = ["—" if speed is None else f"{speed:,.0f}" for speed in speeds]
        lines.append(" ".join([f"{row['setting']:{width}} {first:>9}", *(f"{other:>13}" for other in others)]))
        lines += [f"  {name}: {job['error']}" for name, job in row["jobs"].items() if "error" in job]
    return "\n".join(lines)


def main() -> int:
    found = run_benchmark(read_options())
    print(format_table(found))
    whole = any(row.get("best") for row in found["rows"])
    return 0 if whole and not any("error" in job for row in found["rows"] for job in row["jobs"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
