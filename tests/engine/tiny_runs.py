"""Short runs of `tlora.train` on a tiny base: the base, orders, and what they leave on disk."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tlora
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.tiny import make_model
from tlora.engine.train import Results
from tlora.store.recorder import Recorder

WORDS = re.findall(
    "[a-z]+", "red green blue small large round wooden boat house river stone bridge sings falls waits opens quickly never under over"
)


TWO_LINEARS = ["q_proj", "down_proj"]
"""`target_modules` of jobs that promise the same whichever linears have adapters: with all seven, a pass takes half as long again."""


def sentence(rng: random.Random, low: int = 2, high: int = 8) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))


def write_rows(path: Path, count: int, seed: int = 0, low: int = 2, high: int = 8) -> Path:
    """`count` rows of prompt and completion as JSON lines."""
    rng = random.Random(seed)
    rows = [{"prompt": sentence(rng, 1, 3), "completion": sentence(rng, low, high)} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def save_base(directory: Path, **changes: Any) -> Path:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(directory)
    shape = {"num_hidden_layers": 1, "max_position_embeddings": 2048, **changes}
    make_model("llama", vocab_size=len(tokenizer) + 3, **shape).save_pretrained(directory)
    return directory


def job(name: str, data: Any, **fields: Any) -> dict[str, Any]:
    """An order that is done in a few steps."""
    return {"name": name, "data": data, "r": 4, "learning_rate": 1e-2, "batch_size": 4, "max_steps": 6, **fields}


def light_job(name: str, data: Any, **fields: Any) -> dict[str, Any]:
    """`job` with adapters on two linears: for what is promised of any job."""
    return job(name, data, **{"target_modules": TWO_LINEARS, **fields})


def run_spec(base: Path, out: Path, jobs: list[dict[str, Any]], **settings: Any) -> tlora.RunSpec:
    specs = [tlora.JobSpec.model_validate(fields) for fields in jobs]
    return tlora.RunSpec(base_model=str(base), output_dir=str(out), jobs=specs, **settings)


def train(base: Path, out: Path, jobs: list[dict[str, Any]], **settings: Any) -> Results:
    """`tlora.train` on the CPU; `resume`, `overwrite` and `watcher` go to it, the rest to the RunSpec."""
    options = {key: settings.pop(key) for key in ("resume", "overwrite", "watcher") if key in settings}
    return tlora.train(run_spec(base, out, jobs, **settings), device="cpu", **options)


def die_with_checkpoints(out: Path, count: int = 3) -> None:
    """This process, made for it, gets SIGKILL before the first step that is logged when the jobs under `out` have `count` checkpoints."""
    log_step = Recorder._log_step

    def die(self: Recorder, *args: Any) -> None:
        if len(list(out.glob("*/checkpoint-*"))) >= count:
            os.kill(os.getpid(), signal.SIGKILL)
        log_step(self, *args)

    Recorder._log_step = die  # type: ignore[method-assign]


def train_killed(base: Path, out: Path, jobs: list[dict[str, Any]], **settings: Any) -> None:
    """`train` in a process that dies by SIGKILL once it has left three checkpoints."""
    child = os.fork()
    if not child:
        try:
            die_with_checkpoints(out)
            train(base, out, jobs, **settings)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def sha256(directory: Path) -> str:
    """Of the adapter in a job's directory."""
    return hashlib.sha256((directory / "adapter_model.safetensors").read_bytes()).hexdigest()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_bytes(out: Path, whole: Path, names: Iterable[str]) -> None:
    """The jobs' adapters under `out` are those under `whole`, and so are the steps that their metrics tell of."""
    for name in names:
        assert sha256(out / name) == sha256(whole / name), name
        assert steps_taken(out / name) == steps_taken(whole / name), name


def steps_taken(directory: Path) -> list[int]:
    """The steps in a job's metrics, in the order of their rows."""
    return [row["step"] for row in rows(directory / "metrics.jsonl") if "loss" in row]
