"""Eight jobs whose optimizer steps are small: two samples of 512 random tokens each. Alone, such a step mostly reads the base's weights.

Adapters and optimizer are those of the shape's real jobs. All jobs do equal work, so that what one of them makes alone is what all make
one after another: `--work small-steps` beside `--work small-steps --jobs 1`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

WORKS = ("small-steps",)
_JOBS, _SAMPLES, _TOKENS = 8, 2, 512  # samples of a step, tokens of a sample


def write_jobs(real_jobs: Path, steps: int, vocab_size: int, directory: Path) -> tuple[Path, dict[str, Any]]:
    """A jobs file in `directory` with its data, with the defaults of the file `real_jobs`, and what a step of each job has."""
    rng, jobs, facts = np.random.default_rng(0), list[dict[str, Any]](), dict[str, Any]()
    content = yaml.safe_load(real_jobs.read_text(encoding="utf-8"))
    for number in range(_JOBS):
        name, data = f"small-{number}", directory / f"small-{number}.jsonl"
        samples = rng.integers(3, vocab_size, (_SAMPLES * steps, _TOKENS)).tolist()
        data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in samples), encoding="utf-8")
        jobs.append({"name": name, "data": str(data.resolve()), "batch_size": _SAMPLES, "seed": number})
        facts[name] = {"tokens_a_step": _SAMPLES * _TOKENS}
    path = directory / "small-steps.yaml"
    path.write_text(yaml.safe_dump(content | {"jobs": jobs}), encoding="utf-8")
    return path, facts
