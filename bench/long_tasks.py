"""LobRA's tasks (bench.lobra) for `tlora train`: six jobs with samples of up to 16,384 tokens, as they are or padded to buckets of 2^k.

A step has an eighth of the samples that sixteen GPUs share there: what two of them have. Samples are of random tokens, with drawn lengths.
Padding has no loss. Both kinds of one mix train the same samples in the same order, so that steps compare.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.length_mixes import LengthJob, drawn_job
from bench.lobra import GPUS, LONGEST, MIXES, RANK, TASKS, bucket_of

_CARDS, _PADDED = 2, "-padded"
_MIXES = {name.replace(" samples", "").replace(" ", "-"): bills for name, bills in MIXES.items()}  # bills of a step on sixteen GPUs
WORKS = tuple(name + kind for name in _MIXES for kind in ("", _PADDED))


def tasks_of(work: str) -> list[LengthJob]:
    """Lengths of the samples as they are, and a step's samples on two GPUs."""
    bills = _MIXES[work.removesuffix(_PADDED)]
    tasks = TASKS | {"bills": (*TASKS["bills"][:2], bills)}
    return [drawn_job(name, mean, sigma, LONGEST, batch * _CARDS // GPUS) for name, (mean, sigma, batch) in tasks.items()]


def write_jobs(work: str, vocab_size: int, directory: Path) -> tuple[Path, dict[str, Any]]:
    """A jobs file in `directory` with its data, and what a step of each job has on average."""
    rng, jobs, facts = np.random.default_rng(0), list[dict[str, Any]](), dict[str, Any]()
    for number, task in enumerate(tasks_of(work)):
        sizes = [bucket_of(n) if work.endswith(_PADDED) else n for n in task.lengths.tolist()]
        data = directory / f"{task.name}.jsonl"
        with data.open("w") as file:
            for length, size in zip(task.lengths.tolist(), sizes, strict=True):
                ids = [*rng.integers(3, vocab_size, length).tolist(), *[2] * (size - length)]
                labels = {"labels": [*ids[:length], *[-100] * (size - length)]} if size > length else {}
                file.write(json.dumps({"input_ids": ids} | labels) + "\n")
        jobs.append({"name": task.name, "data": str(data.resolve()), "batch_size": task.batch_size, "seed": number})
        means = {"tokens_a_step": task.batch_size * np.mean(sizes), "without_padding": task.batch_size * np.mean(task.lengths)}
        facts[task.name] = {"samples_a_step": task.batch_size} | {name: float(mean) for name, mean in means.items()}
    defaults = {"target_modules": "all-linear", "max_length": LONGEST, "learning_rate": 1e-4, "r": RANK, "lora_alpha": 2 * RANK}
    path = directory / f"{work}.yaml"
    path.write_text(yaml.safe_dump({"base_model": "base", "defaults": defaults, "jobs": jobs}), encoding="utf-8")
    return path, facts
