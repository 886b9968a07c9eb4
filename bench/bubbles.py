"""The stream of all jobs over two stages beside the same pipeline with a flush at each optimizer step.

    python -m bench.bubbles [--rounds 12] [--json FILE]
    python -m bench.bubbles --device cuda --base DIRECTORY --tokens 2048

Jobs are alike: rank 16, `--micro-batches` samples a step of `--tokens` tokens each, every sample a micro-batch by itself. `stream`: all
jobs, so that the others fill the end of a job's batch. `flush`: one of them alone, whose next batch enters when its last has left, 1F1B
with a flush at each step. Both arms take as many steps of the same tokens, in turns, in the same processes. Bubbles of 1F1B are
(S - 1)/(m + S - 1) of the time with m micro-batches a step, so that on S = 2 stages a flush after 8 costs 1/9, and the stream can be 1.125
times as fast; `predict` gives what is predicted for two and for four stages.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import machine
from bench.length_mixes import LengthJob, offered
from bench.nano_batches import STAGES, Setting, make_base, make_samples, train_first_stage
from bench.pipeline_model import Groups
from tlora.batching.nano_batches import SliceCount
from tlora.batching.pipeline_model import Pipeline, Stream
from tlora.data.dataset import Dataset
from tlora.engine.messages import StageOrder, Stop
from tlora.engine.ranks.last_stage import StagePipeline
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.job import JobSpec

WARM_STEPS = 3  # of each arm
PREDICTED_STAGES = 2, 4


class Arms:
    """The last stage, with the two arms of its engine's jobs."""

    def __init__(self, setting: Setting, data: Dataset, jobs: int, micro_batches: int, send: Callable[[StageOrder], None]) -> None:
        model, self._links = setting.open_stage(STAGES - 1)
        self._engine = Engine(model, setting.longest, lambda _: None, pipeline=StagePipeline(model, self._links, setting.ranges(), send))
        # A lone job is cut into nano-batches: as many as it has samples, each step.
        self._engine.nano_batching.make_choice = lambda most, _: SliceCount(most, micro_batches, trials=0)
        self._data, self._jobs, self._samples = data, jobs, micro_batches

    def _run_of(self, number: int) -> JobRun:
        settings = {"data": "-", "r": 16, "batch_size": self._samples, "max_steps": 1 << 20, "learning_rate": 1e-4}
        return JobRun(JobSpec(name=f"job{number}", seed=number, **settings), self._data, None)

    def train(self, jobs: int, steps: int) -> dict[str, float]:
        """`steps` optimizer steps of `jobs` together, after some to warm up: tokens a second, and the share of the time that this
        stage has waited for hidden states.
        """
        engine, runs = self._engine, [self._run_of(number) for number in range(jobs)]
        for run in runs:
            engine.join(run)
        self._until(runs, WARM_STEPS * jobs)
        waited, before, begun = self._links.waited_seconds, sum(run.progress.num_tokens for run in runs), time.perf_counter()
        self._until(runs, sum(run.progress.step for run in runs) + steps)
        seconds = time.perf_counter() - begun
        tokens = sum(run.progress.num_tokens for run in runs) - before
        waiting = (self._links.waited_seconds - waited) / seconds
        engine.stop()
        return {"tokens_per_second": tokens / seconds, "waiting_share": waiting}

    def _until(self, runs: Sequence[JobRun], steps: int) -> None:
        while sum(run.progress.step for run in runs) < steps:
            self._engine.run_micro_batch()

    def measure(self, rounds: int, steps: int) -> dict[str, Any]:
        """Both arms in turns; each round is a ratio."""
        found: dict[str, list[dict[str, float]]] = {"flush": [], "stream": []}
        for _ in range(rounds):
            found["flush"].append(self.train(1, steps))
            found["stream"].append(self.train(self._jobs, steps))
        ratios = [
            stream["tokens_per_second"] / flush["tokens_per_second"] for stream, flush in zip(found["stream"], found["flush"], strict=True)
        ]
        medians = {
            arm: {key: statistics.median(each[key] for each in rows) for key in ("tokens_per_second", "waiting_share")}
            for arm, rows in found.items()
        }
        return {"arms": medians, "stream_over_flush": {"median": statistics.median(ratios), "rounds": ratios}}


def predict(jobs: int, micro_batches: int, tokens: int) -> dict[str, dict[str, float]]:
    """The same by `tlora.batching.pipeline_model`, where a micro-batch takes the same seconds whatever is beside it."""
    made = [LengthJob(f"job{number}", np.full(8 * micro_batches, tokens, np.int64), micro_batches) for number in range(max(jobs, 1))]
    found: dict[str, dict[str, float]] = {}
    for stages in PREDICTED_STAGES:
        orders = {"stream": Stream(offered(made), tokens, stages), "flush": Groups(made[:1], tokens, flush=True)}
        through = {
            name: Pipeline(order, lambda _: 3.0, stages).run(40 * micro_batches, 8 * micro_batches) for name, order in orders.items()
        }
        rates = {name: each.tokens / each.seconds for name, each in through.items()}
        found[str(stages)] = {
            "stream_over_flush": rates["stream"] / rates["flush"],
            **{f"{name}_waiting_share": each.waited_seconds / each.seconds for name, each in through.items()},
        }
    return found


@contextmanager
def open_arms(setting: Setting, data: Dataset, jobs: int, micro_batches: int) -> Iterator[Arms]:
    context = multiprocessing.get_context("spawn")
    inbox: Any = context.SimpleQueue()
    first = context.Process(target=train_first_stage, args=(setting, inbox), daemon=True)
    first.start()
    try:
        yield Arms(setting, data, jobs, micro_batches, inbox.put)
    finally:
        inbox.put(Stop())
        first.join(30)
        first.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of an arm in a round, of all its jobs together")
    parser.add_argument("--jobs", type=int, default=3, help="of the stream")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step")
    parser.add_argument("--tokens", type=int, default=96, help="of a micro-batch")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="two GPUs of this host")
    parser.add_argument("--base", type=Path, help="a directory; by default a small Llama is made")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.jobs < 2 or min(args.rounds, args.steps) < 1 or args.micro_batches < STAGES:
        parser.error(f"give 2 jobs or more, a round and a step or more, and {STAGES} micro-batches a step or more")
    load = os.getloadavg()[0]  # of the machine before: on busy cores stages gain nothing by one another
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if args.base is None:
            make_base(directory / "base")
        setting = Setting(args.base or directory / "base", directory / "store", args.device, args.tokens)
        data = make_samples(directory / "data", [args.tokens] * (8 * args.micro_batches))
        with open_arms(setting, data, args.jobs, args.micro_batches) as arms:
            measured = arms.measure(args.rounds, args.steps)
    predicted = predict(args.jobs, args.micro_batches, args.tokens)
    for arm, of in measured["arms"].items():
        print(f"{arm}: {of['tokens_per_second']:,.0f} tokens/s, the last stage waits {of['waiting_share']:.1%} of the time")
    print(f"stream over flush: {measured['stream_over_flush']['median']:.3f} on {STAGES} stages")
    for stages, of in predicted.items():
        print(f"predicted on {stages} stages: {of['stream_over_flush']:.3f} (the flush waits {of['flush_waiting_share']:.1%})")
    settings = {key: getattr(args, key) for key in ("rounds", "steps", "jobs", "micro_batches", "tokens")}
    facts = machine.facts(torch.device(args.device), args.commit)
    machine.write(args.json, {"benchmark": "bubbles", **facts, **settings, "load_average": load, **measured, "predicted": predicted})


if __name__ == "__main__":
    main()
