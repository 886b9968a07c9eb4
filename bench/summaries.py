"""Jobs in LoRAFusion's setting (arXiv 2510.00206): four adapters of rank 16, dropout 0.1, batches of 8, samples up to 4,096 tokens.

Samples are of random tokens, as theirs are, with lengths like those of XSum, CNN/DailyMail and WikiSum: log-normal, with the means that the
data sets' authors publish of an article and its summary together, in words, times what Llama-3's tokenizer makes of a word of such English.
The spreads and that factor are assumed. What it published is beside ours (its file benchmarks_paper/plots/evaluation-fig-1-end-to-end.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

_TOKENS_PER_WORD = 1.1
_LONGEST, _SHORTEST = 4096, 32
_JOBS, _BATCH = 4, 8


@dataclass(frozen=True)
class Lengths:
    """`words`: mean of article and summary together; `spread`: standard deviation of the logarithm."""

    words: float
    spread: float

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Tokens of samples, cut at the longest."""
        mean = _TOKENS_PER_WORD * self.words
        found = rng.lognormal(np.log(mean) - self.spread**2 / 2, self.spread, count)
        return [int(tokens) for tokens in np.clip(found, _SHORTEST, _LONGEST)]


SETS = {
    "xsum": Lengths(431.07 + 23.26, 0.6),  # Narayan et al. 2018, table 1
    "cnn-dailymail": Lengths(781 + 56, 0.5),  # See et al. 2017, section 4
    "wikisum": Lengths(1334.2 + 101.2, 0.5),  # Cohen et al. 2021, table 1
}
# Of each job, the sets that its samples are drawn from in turn.
WORKS: dict[str, tuple[tuple[str, ...], ...]] = {
    **{name: ((name,),) * _JOBS for name in SETS},
    "mixed": (tuple(SETS),) * _JOBS,
    "heterogeneous": (*((name,) for name in SETS), tuple(SETS)),
}
# Tokens a second, without its first 24 micro-batches and the seconds of its solver; with 32B on two H100s.
PUBLISHED: dict[str, dict[str, float]] = {
    "llama-3-8b": {"xsum": 14874.99, "cnn-dailymail": 14595.14, "wikisum": 13920.32, "mixed": 14403.5, "heterogeneous": 14157.83},
    "qwen2.5-32b": {"xsum": 4968.81, "cnn-dailymail": 4972.94, "wikisum": 4946.70, "mixed": 5120.85, "heterogeneous": 4955.23},
}


def write_jobs(work: str, steps: int, vocab_size: int, directory: Path) -> tuple[Path, dict[str, Any]]:
    """A jobs file in `directory` with its data, for `steps` steps of each job, and what its samples are like."""
    rng, jobs, facts = np.random.default_rng(0), list[dict[str, Any]](), dict[str, Any]()
    for number, sets in enumerate(WORKS[work]):
        each = -(-_BATCH * steps // len(sets))
        lengths = rng.permutation([tokens for name in sets for tokens in SETS[name].draw(each, rng)]).tolist()
        name = f"{'-'.join(sets) if len(sets) == 1 else 'mixed'}-{number}"
        data = directory / f"{name}.jsonl"
        with data.open("w") as file:
            file.writelines(json.dumps({"input_ids": rng.integers(3, vocab_size, tokens).tolist()}) + "\n" for tokens in lengths)
        jobs.append({"name": name, "data": str(data.resolve()), "seed": number})
        facts[name] = {"samples": len(lengths), "mean_tokens": float(np.mean(lengths)), "longest_tokens": max(lengths)}
    defaults = {"target_modules": "all-linear", "max_length": _LONGEST, "learning_rate": 1e-4, "batch_size": _BATCH}
    defaults |= {"r": 16, "lora_alpha": 32, "lora_dropout": 0.1}
    path = directory / f"{work}.yaml"
    path.write_text(yaml.safe_dump({"base_model": "base", "defaults": defaults, "jobs": jobs}), encoding="utf-8")
    return path, facts
