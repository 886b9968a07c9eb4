"""Which of the families that bench.families finds trained on a CPU are trained on a GPU, by `tlora.train` over a tiny base in files.

    python -m bench.family_runs [--only llama,mixtral] [--workers 12] [--seconds 480] [--json FILE]
    python -m bench.family_runs --device cpu --only llama,jamba --workers 2

Jobs with `all-linear`, one of them with dropout, and one at the experts where a family has some, take five steps together in bf16, in
batches of one shape, so that the second is captured as a graph. Then two jobs are trained again in deterministic mode, together and one of
them alone, whose bytes have to be the same. A row says by which path (kernels, or why not), what was noted, and how a run ended that did
not. Several processes share the device; one that meets an error ends, as a GPU's error may stay in it, and another takes the rest.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import queue
import shutil
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import tlora
from bench.families import VOCABULARY, families, tiny
from bench.machine import facts, write
from bench.timm_towers import small_towers
from tlora.data.prepare import DataWorker, start_worker
from tlora.engine.watcher import Watcher
from tlora.errors import ModelError
from tlora.job import JobSpec, RunSpec
from tlora.supermodel.text_model import auto_class

(TABLE,) = (Path(__file__).parent / "results").glob("cpu_*_families.json")
STEPS, LENGTHS = 5, (5, 19, 33)  # tokens of the samples of each batch
MEMORY = 8 << 30  # bytes of each process, beside what CUDA takes
PATH = "kernels: "
State = Literal["trained", "failed", "not read", "not tried"]


@dataclass(slots=True)
class Row:
    """Of one family. `path`: what the run says of its kernels. `notes`: its other notes and warnings that tell of something slower or
    left out.
    """

    family: str
    state: State = "not tried"
    path: str = ""
    error: str = ""
    same_bytes: bool | None = None
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list[str])


@small_towers()
def look(family: str, experts: list[str], device: str, directory: Path, data_worker: DataWorker | None) -> Row:
    """Never raises: what a family's own code raises is a row."""
    row, start = Row(family), time.perf_counter()
    try:
        _save_base(family, directory / "base")
        _train(row, experts, device, directory, data_worker)
        row.state = "failed" if row.error else "trained"
    except ModelError as error:
        row.state, row.error = "not read" if "checkpoint" in str(error) else "failed", str(error)
    except Exception as error:  # a library's border: it depends on the family
        row.state, row.error = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    row.seconds = time.perf_counter() - start
    return row


def _save_base(family: str, directory: Path) -> None:
    config = tiny(families()[family])
    kind = auto_class(config)
    assert kind is not None, family
    torch.manual_seed(0)
    kind.from_config(config, dtype=torch.float32).save_pretrained(directory)
    words = Tokenizer(BPE({"<unk>": 0, "<s>": 1, "</s>": 2, "x": 3}, [], unk_token="<unk>"))  # rows have ids
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", bos_token="<s>", eos_token="</s>").save_pretrained(directory)


def _train(row: Row, experts: list[str], device: str, directory: Path, data_worker: DataWorker | None) -> None:
    shared = {"batch_size": len(LENGTHS), "max_steps": STEPS, "learning_rate": 1e-3, "max_length": 64}
    jobs = [{"name": "plain", "r": 4}, {"name": "dropout", "r": 8, "lora_dropout": 0.1}]
    jobs += [{"name": "experts", "r": 4, "target_parameters": experts, "target_modules": []}] if experts else []
    specs = [JobSpec.model_validate(shared | job | {"data": str(_write_data(directory, job["name"]))}) for job in jobs]
    dtype = "float32" if row.family == "xlstm" else "bfloat16"

    def run(name: str, chosen: list[JobSpec], deterministic: bool) -> Path:
        order = RunSpec(
            base_model=str(directory / "base"), output_dir=str(directory / name), dtype=dtype, jobs=chosen,
            deterministic=deterministic, memory_limit=MEMORY if device != "cpu" else "auto", unused_weights="ignore",
        )  # fmt: skip
        notes: list[str] = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", RuntimeWarning)
            results = tlora.train(order, device=device, watcher=Watcher(note=notes.append), data_worker=data_worker)
        notes += [str(each.message) for each in warned if issubclass(each.category, RuntimeWarning)]
        row.path = row.path or next((note.removeprefix(PATH) for note in notes if note.startswith(PATH)), "")
        row.notes += [f"{name}: {note}"[:300] for note in notes if any(word in note for word in ("captured", "slower", "ran out"))]
        for job, result in results.items():
            if result.status != "done" or result.train_loss is None or not math.isfinite(result.train_loss):
                row.error = row.error or f"{name}, {job}: {result.status}, loss {result.train_loss}, {result.reason}"[:900]
        return directory / name

    run("together", specs, False)
    if not row.error:
        together, alone = run("deterministic", specs[:2], True), run("alone", specs[1:2], True)
        weights = [path / "dropout" / "adapter_model.safetensors" for path in (together, alone)]
        row.same_bytes = not row.error and weights[0].read_bytes() == weights[1].read_bytes()


def _write_data(directory: Path, name: str) -> Path:
    rng, path = np.random.default_rng(len(name)), directory / f"{name}.jsonl"
    rows = [{"input_ids": rng.integers(3, VOCABULARY - 10, length).tolist()} for _ in range(STEPS) for length in LENGTHS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _work(todo: Any, done: Any, device: str, until: float) -> None:
    """Until none is left, or one has failed."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with start_worker() as data_worker, tempfile.TemporaryDirectory(prefix="families-") as name:
        os.environ["TLORA_CACHE"] = f"{name}/cache"
        while time.time() < until:
            try:
                family, experts = todo.get(timeout=1)
            except queue.Empty:
                return
            directory = Path(name, family)
            directory.mkdir()
            row = look(family, experts, device, directory, data_worker)
            shutil.rmtree(directory)
            done.put(row)
            torch._dynamo.reset()
            gc.collect()
            if row.state == "failed" and device != "cpu":
                return


def run_all(chosen: dict[str, list[str]], workers: int, device: str, seconds: float, path: Path | None) -> dict[str, Row]:
    """Rows of the families `chosen`, written to `path` as they come."""
    context, until = multiprocessing.get_context("spawn"), time.time() + seconds
    todo, done, found = context.Queue(), context.Queue(), {family: Row(family) for family in chosen}
    for item in chosen.items():
        todo.put(item)
    running, left = [], len(chosen)
    while left and time.time() < until + 30:
        running = [process for process in running if process.is_alive()]
        while len(running) < min(workers, left) and time.time() < until:
            process = context.Process(target=_work, args=(todo, done, device, until))
            process.start()
            running.append(process)
        try:
            row = done.get(timeout=1)
        except queue.Empty:
            continue
        left -= 1
        found[row.family] = row
        told = " ".join(row.error.split())[:200]
        print(f"{row.family:28} {row.state:9} {row.seconds:6.1f} s  {row.path[:60]:60} {row.same_bytes} {told}", flush=True)
        if path is not None:
            counts = Counter(each.state for each in found.values())
            write(path, facts(torch.device(device), None) | {"counts": counts, "rows": [asdict(each) for each in found.values()]})
    for process in running:
        process.kill()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families, with commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no further family is begun")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    only, here = [name for name in arguments.only.split(",") if name], families()
    rows = [row for row in json.loads(TABLE.read_text(encoding="utf-8"))["rows"] if row["state"] == "trained"]
    rows.sort(key=lambda row: ("one sample" not in row["note"], not row["experts"]))  # what a GPU has seen least comes first
    frozen = {row["family"]: not row["experts"] or row["experts"].startswith("frozen") for row in rows}
    chosen = {
        row["family"]: [] if frozen[row["family"]] else row["experts"].split(", ")
        for row in rows
        if row["family"] in here and (not only or row["family"] in only)
    }
    found = run_all(chosen, arguments.workers, arguments.device, arguments.seconds, arguments.json)
    print(", ".join(f"{count} {state}" for state, count in Counter(row.state for row in found.values()).items()))


if __name__ == "__main__":
    main()
