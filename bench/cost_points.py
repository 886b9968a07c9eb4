"""The points that the cost model's constants are fitted to: micro-batches of given jobs, ours, PEFT's and TRL's, one base a process.

    python -m bench.cost_points --shape llama-3-8b --data DIRECTORY --out FILE [--systems ours,peft,trl] [--points NAME,...]
    python -m bench.cost_points --shape llama-3-70b --base-precision fp8 --recompute 23 --points 2048,4096 --data DIR --out FILE
    python -m bench.cost_points --shape tiny --device cpu --seconds 0.2 --data DIRECTORY --out FILE

The list is fixed: single jobs of 128 to 2,048 tokens a step, equal and real lengths, ranks 8 and 64, with and without dropout, and groups.
Points that are held out (`held_out`) are not for fitting: `python -m bench.cost_fit` says how far off the fit is there. Random weights.
Ours: the engine's loop, warmed up until the shapes that the point has were seen; the median of chunks of whole micro-batches. PEFT: one
job alone in the setting that was fastest for such lengths so far (docs/benchmarks-history.md). TRL: PEFT as people run it, the samples of a
step packed into one row (of real texts, rows of 2,048 tokens), with what makes `bench.trl_baseline`'s packed settings fast.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import machine, peft_baseline, trainers, trl_baseline
from bench.base_files import write_tokenizer
from bench.shapes import SHAPES, make_model
from bench.together import open_engine
from bench.workload import ENDLESS, Job, Order, make_jobs
from tlora.batching.pack import auto_token_budget
from tlora.registry import BASE_PRECISIONS
from tlora.supermodel.held_linear import hold
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

SYSTEMS = ("ours", "peft", "trl")
LARGEST_BUDGET = 8192
LONGEST = 2048  # tokens of a real sample, and of TRL's rows of them
CHUNKS = 3  # of which the median counts
EQUAL_WARM_UP, REAL_WARM_UP = 8, 40  # micro-batches; real lengths bring new shapes for longer
PEFT_STEPS = 16
PEFT_SETTING = {True: "compiled + graphs", False: "compiled + liger"}  # the fastest, for equal lengths and for real ones


@dataclass(frozen=True)
class Point:
    """What trains: `jobs` jobs of one rank, each with `batch_size` samples a step of `length` tokens, or of real texts."""

    name: str
    jobs: int
    rank: int
    batch_size: int
    length: int | str
    token_budget: int | None = None  # None: as `tlora train` chooses
    dropout: float = 0.0
    peft: bool = False
    held_out: bool = False


POINTS = (
    Point("128", 1, 16, 1, 128, peft=True),
    Point("512", 1, 16, 4, 128, peft=True),
    Point("2048", 1, 16, 4, 512, peft=True),
    Point("2048-r64", 1, 64, 4, 512),
    Point("2048-r8-dropout", 1, 8, 4, 512, dropout=0.05),
    Point("512-of-8", 8, 16, 4, 128, 4096),
    Point("1024-of-8", 8, 16, 2, 512, 8192),
    Point("1024-of-8-r64-dropout", 8, 64, 2, 512, 8192, dropout=0.05),
    Point("real-of-4", 4, 16, 4, "real", 8192),
    Point("real", 1, 16, 4, "real", peft=True),
    Point("1024", 1, 16, 2, 512, peft=True, held_out=True),
    Point("1024-of-4", 4, 16, 2, 512, 4096, held_out=True),
    Point("real-of-8", 8, 16, 4, "real", 8192, held_out=True),
    Point("4096", 1, 16, 4, 1024, 4096),
)
USUAL = tuple(point.name for point in POINTS if point.name != "4096")


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, required=True, help="directory of the texts for real lengths")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=["ours", "peft"], help="of ours,peft,trl")
    parser.add_argument("--points", type=lambda text: tuple(text.split(",")), default=USUAL, help="default: all of a base")
    parser.add_argument("--seconds", type=float, default=1.5, help="measured of each point of ours")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds after which no further point is begun")
    parser.add_argument("--base-precision", choices=BASE_PRECISIONS, help="ours with such a base")
    parser.add_argument("--recompute", type=int, default=0, help="ours: decoder layers that backward runs again")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    known = [point.name for point in POINTS]
    if unknown := [name for name in options.points if name not in known]:
        parser.error(f"--points: there is no {unknown[0]!r}; there are {', '.join(known)}")
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        parser.error(f"--systems: there is no {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    return options


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, which is written to `options.out` after every point."""
    device, started = torch.device(options.device), time.perf_counter()
    setup = {"shape": options.shape, "base_precision": options.base_precision, "recompute": options.recompute}
    found: dict[str, Any] = {"benchmark": "cost_points", **machine.facts(device, options.commit), "setup": setup, "rows": []}
    points = [point for point in POINTS if point.name in options.points]
    with tempfile.TemporaryDirectory() as directory:
        jobs = _Jobs(SHAPES[options.shape].vocab_size, options.data, Path(directory))
        if "ours" in options.systems:
            _measure_ours(points, jobs, options, found)
            gc.collect()
            torch.compiler.reset()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        for point in [each for each in points if each.peft and "peft" in options.systems]:
            if time.perf_counter() - started > options.time_limit:
                break
            of_point, dtype = jobs.of(point), _dtype(device)
            target = peft_baseline.Target(options.shape, device, dtype, PEFT_STEPS, started + options.time_limit)
            mix = {job.spec.name: int(job.data.lengths.sum()) for job in of_point}
            (row,) = peft_baseline.measure(of_point, target, mix, [_peft_setting(of_point, device)])
            _keep(options, found, point, {"tokens_per_step": of_point[0].batch_tokens, **row})
        if "trl" in options.systems:
            _measure_trl(points, jobs, options, found, Path(directory))
    found["seconds"] = time.perf_counter() - started
    machine.write(options.out, found)
    return found


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _peft_setting(jobs: Sequence[Job], device: torch.device) -> str:
    return PEFT_SETTING[peft_baseline.equal_lengths(jobs)] if device.type == "cuda" else "plain"


class _Jobs:
    """The jobs of each point. Texts are tokenized once: groups of them are the first of eight."""

    def __init__(self, vocab_size: int, data: Path, directory: Path) -> None:
        self._vocab_size, self._data, self._directory = vocab_size, data, directory
        self._real: list[Job] = []
        self._made = 0

    def of(self, point: Point) -> list[Job]:
        """Each job weighs its tokens a step, so that all of a group step in each round."""
        ranks = (point.rank,)
        if point.length == "real":
            if not self._real:
                self._real = make_jobs(
                    Order(8, ranks, point.batch_size, "real", LONGEST), self._vocab_size, self._data, self._directory / "real"
                )
            jobs = self._real[: point.jobs]
        else:
            self._made += 1
            order = Order(point.jobs, ranks, point.batch_size, point.length, LONGEST)
            jobs = make_jobs(order, self._vocab_size, None, self._directory / str(self._made))
        return [Job(job.spec.model_copy(update={"lora_dropout": point.dropout}), job.data) for job in jobs]


def _measure_ours(points: Sequence[Point], jobs: _Jobs, options: argparse.Namespace, found: dict[str, Any]) -> None:
    device, started = torch.device(options.device), time.perf_counter()
    weights = make_model(options.shape, device, _dtype(device))
    if options.base_precision is not None:
        hold(weights, list(find_linears(weights)), device, options.base_precision)
        torch.cuda.empty_cache()  # what the 16-bit weights took: a capture cannot give it back, and would run out of memory
    model = SuperModel(make_base(weights, options.shape))
    model.recomputed_layers = options.recompute
    for point in points:
        if time.perf_counter() - started > options.time_limit:
            return
        _keep(options, found, point, {"system": "ours", **measured(model, jobs.of(point), point, options.seconds)})


def _measure_trl(points: Sequence[Point], jobs: _Jobs, options: argparse.Namespace, found: dict[str, Any], directory: Path) -> None:
    """Of the points of one plain job."""
    started = time.perf_counter()
    os.environ["HF_DATASETS_CACHE"] = str(directory / "datasets")
    write_tokenizer(options.shape, directory / "tokenizer")
    (setting,) = [each for each in trl_baseline.SETTINGS if each.name == "packed-by-1"]
    target = trainers.Target(
        options.shape, torch.device(options.device), directory / "tokenizer", ENDLESS, options.seconds, directory / "trl"
    )
    for point in points:
        if point.jobs > 1 or point.dropout or point.rank != 16:
            continue
        if time.perf_counter() - started > options.time_limit:
            return
        (job,) = jobs.of(point)
        row = LONGEST if isinstance(point.length, str) else point.length * point.batch_size
        spec = job.spec.model_copy(update={"batch_size": 1, "data": job.spec.data.model_copy(update={"max_length": row})})
        _keep(options, found, point, {"system": "trl", **trl_baseline.measure(setting, trainers.Task(spec, job.data, 0), target)})


def measured(model: SuperModel, jobs: Sequence[Job], point: Point, seconds: float) -> dict[str, Any]:
    """Tokens and seconds of a micro-batch. Chunks are whole micro-batches, with the optimizer steps that fall into them."""
    tokens = [job.batch_tokens for job in jobs]
    longest = max(int(job.data.lengths.max()) for job in jobs)
    budget = max(longest, point.token_budget or auto_token_budget(longest, tokens, LARGEST_BUDGET))
    began = time.perf_counter()
    engine, counts = open_engine(model, jobs, budget)
    try:
        for _ in range(REAL_WARM_UP if point.length == "real" else EQUAL_WARM_UP):
            engine.run_micro_batch()
        machine.wait(model.device)
        warm = time.perf_counter()
        _, one = _chunk(engine, 2, model.device)
        length = max(4, -(-int(1000 * seconds / CHUNKS) // max(1, int(1000 * one / 2))))
        computed = counts.computed
        chunks = [_chunk(engine, length, model.device) for _ in range(CHUNKS)]
        useful = sum(tokens for tokens, _ in chunks)
        return {
            "tokens_per_second": statistics.median(tokens / seconds for tokens, seconds in chunks),
            "tokens_per_micro_batch": useful / (CHUNKS * length),
            "seconds_per_micro_batch": statistics.median(seconds for _, seconds in chunks) / length,
            "token_budget": budget,
            "padding_share": 1 - useful / (counts.computed - computed),
            "tokens_per_step": tokens[0],
            "tokens_per_second_of_chunks": [tokens / seconds for tokens, seconds in chunks],
            "warm_up_seconds": warm - began,
        }
    finally:
        engine.stop()


def _chunk(engine: Any, micro_batches: int, device: torch.device) -> tuple[int, float]:
    """Useful tokens, and seconds."""
    machine.wait(device)
    start, tokens = time.perf_counter(), 0
    for _ in range(micro_batches):
        packed = engine.run_micro_batch()
        assert packed is not None, "nothing is on offer, though no job has an end"
        tokens += packed.tokens
    machine.wait(device)
    return tokens, time.perf_counter() - start


def _keep(options: argparse.Namespace, found: dict[str, Any], point: Point, row: dict[str, Any]) -> None:
    found["rows"].append({"point": asdict(point), **row})
    print(f"{options.shape:14} {row['system']:5} {point.name:20} {row.get('tokens_per_second', 0):10,.0f} tok/s", flush=True)
    machine.write(options.out, found)


def main() -> int:
    found = run_benchmark(read_options())
    return 0 if all("tokens_per_second" in row for row in found["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
