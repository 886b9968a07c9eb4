"""A lone job over two stages: the seconds of a step by the number of nano-batches, and the number that is found.

    python -m bench.nano_batches [--rounds 20] [--searches 5] [--json FILE]
    python -m bench.nano_batches --device cuda --base DIRECTORY --lengths 512 2048

A job of rank 16 with 8 samples a step of the given lengths, over `--base`, or a Llama of 4 layers 256 wide that is made here. Each stage is
a process, with one thread of a CPU or with a GPU; hidden states go through memory that both map, as with `links: host`. Every round takes
one step with each fixed number, in another order; searches are made between the rounds. Seconds are medians, of a step of average work. No
other program should want the two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import FileStore
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from bench import machine
from tlora.batching.nano_batches import SliceCount
from tlora.data.dataset import Dataset, Sample, Writer
from tlora.engine.messages import StageOrder, Stop
from tlora.engine.ranks.early_stage import EarlyStage
from tlora.engine.ranks.last_stage import StagePipeline
from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.job import JobSpec, LoraConfig
from tlora.shape.stages import LayerRange, cut_layers
from tlora.sharing.peers import Peers, Sharing
from tlora.supermodel.multiply_adds import work_of_samples
from tlora.supermodel.supermodel import SuperModel

STAGES, SAMPLES, LAYERS, WIDTH, VOCABULARY = 2, 8, 4, 256, 1024
WARM_STEPS = 2  # with each number of slices


@dataclass(frozen=True)
class Setting:
    """What both processes work on. `store`: a file through which they meet."""

    base: Path
    store: Path
    device_type: str
    longest: int

    @property
    def budget(self) -> int:
        return SAMPLES * self.longest

    def ranges(self) -> list[LayerRange]:
        """Layers of each stage; the head counts as layers of as many weights."""
        config = AutoConfig.from_pretrained(self.base)
        layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        head = config.vocab_size / (4 * hidden + 3 * inner)
        return [LayerRange(first, stop, layers) for first, stop in cut_layers([1.0] * layers, head, [1.0] * STAGES)]

    def open_stage(self, rank: int) -> tuple[SuperModel, StageLinks]:
        torch.set_num_threads(1)
        place = torch.device(self.device_type, rank) if self.device_type == "cuda" else torch.device("cpu")
        if place.type == "cuda":
            torch.cuda.set_device(place)
        dtype = "bfloat16" if place.type == "cuda" else "float32"
        model = SuperModel.from_pretrained(str(self.base), dtype, str(place), shared=self.ranges()[rank])
        peers = Peers(Sharing(FileStore(str(self.store), STAGES), rank, STAGES, timeout_seconds=300))
        width, adapter = model.base.head.weight_VH.shape[1], model.layout(LoraConfig(r=16)).numel
        sizes = StageSizes(self.budget + 128, width, adapter, model.bank.dtype, model.bank.sum_dtype)
        return model, StageLinks(peers, sizes, place, through_host=True)


def make_base(directory: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, int] = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)).save_pretrained(directory)  # type: ignore[arg-type]


def make_data(directory: Path, lengths: Sequence[int]) -> Dataset:
    return make_samples(directory, np.random.default_rng(0).integers(lengths[0], lengths[1] + 1, 8 * SAMPLES))


def make_samples(directory: Path, lengths: Iterable[int]) -> Dataset:
    """One of each length."""
    rng, writer = np.random.default_rng(1), Writer(directory)
    for length in lengths:
        writer.add(Sample(rng.integers(5, VOCABULARY, length).astype(np.int32), np.ones(length, np.float32)))
    writer.finish({})
    return Dataset(directory)


def train_first_stage(setting: Setting, inbox: Any) -> None:
    model, links = setting.open_stage(0)
    EarlyStage(model, links, inbox).run()


class LoneJob:
    """The last stage, whose group has one job that never ends."""

    def __init__(self, setting: Setting, data: Dataset, send: Callable[[StageOrder], None]) -> None:
        model, links = setting.open_stage(STAGES - 1)
        pipeline = StagePipeline(model, links, setting.ranges(), send)
        self.engine = Engine(model, setting.budget, lambda _: None, pipeline=pipeline)
        spec = {"name": "lone", "data": "-", "r": 16, "batch_size": SAMPLES, "max_steps": 1 << 20, "learning_rate": 1e-4}
        self.run = JobRun(JobSpec(**spec), data, None)
        self.engine.join(self.run)
        self._nano = self.engine.nano_batching
        self._sample = work_of_samples(model, self.run.spec)

    def cut_by(self, choice: SliceCount) -> None:
        """From the next step on."""
        self._nano._choice = choice
        self._nano.forget_time()

    def step(self) -> float:
        """Seconds of a step, in proportion to a batch of average work. The next batch is cut by what is chosen after it."""
        work = sum(self._sample.of(item.tokens) for item in self.run.flow.pending)
        before, begun = self.run.progress.step, time.perf_counter()
        while self.run.progress.step == before:
            self.engine.run_micro_batch(packs=self.run.flow.runnable)
        return (time.perf_counter() - begun) * self._nano._all_work / work

    def search(self) -> tuple[SliceCount, int]:
        """What was found, and after how many steps."""
        choice, steps = SliceCount(SAMPLES, STAGES), 0
        self.cut_by(choice)
        while not choice.settled:
            self.step()
            steps += 1
        return choice, steps


@contextmanager
def lone_job(setting: Setting, data: Dataset) -> Iterator[LoneJob]:
    context = multiprocessing.get_context("spawn")
    inbox: Any = context.SimpleQueue()
    first = context.Process(target=train_first_stage, args=(setting, inbox), daemon=True)
    first.start()

    def send(order: StageOrder) -> None:
        inbox.put(order)

    try:
        yield LoneJob(setting, data, send)
    finally:
        inbox.put(Stop())
        first.join(30)
        first.kill()


def measure(job: LoneJob, rounds: int, searches: int, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """`keep` gets what is known after each search, of which a run that is cut off leaves the last."""
    rng, counts = random.Random(0), range(1, SAMPLES + 1)
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    found: list[dict[str, Any]] = []
    for count in counts:
        job.cut_by(SliceCount(SAMPLES, count, trials=0))
        for _ in range(WARM_STEPS):
            job.step()
    for number in range(rounds):
        for count in rng.sample(counts, len(counts)):
            job.cut_by(SliceCount(SAMPLES, count, trials=0))
            seconds[count].append(job.step())
        if number * searches // rounds != (number + 1) * searches // rounds:
            choice, steps = job.search()
            found.append({"slices": choice.count, "steps": steps, "tried": choice.tried})
            keep(summary(seconds, found))
    return summary(seconds, found)


def summary(seconds: Mapping[int, Sequence[float]], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    medians = {count: statistics.median(of) for count, of in seconds.items()}
    best, own = min(medians, key=medians.__getitem__), [medians[each["slices"]] for each in found]
    return {
        "step_seconds": {count: {"median": medians[count], "all": list(of)} for count, of in seconds.items()},
        "best_slices": best,
        "searches": list(found),
        "found_over_best": {"median": medians[best] / statistics.median(own), "worst": medians[best] / max(own)},
        "found_over_two": {"median": medians[2] / statistics.median(own), "worst": medians[2] / max(own)},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--searches", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="two GPUs of this host")
    parser.add_argument("--base", type=Path, help="a directory; by default a small Llama is made")
    parser.add_argument("--lengths", type=int, nargs=2, default=(32, 96), metavar="TOKENS", help="of the shortest and the longest sample")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.rounds < 2 or not 1 <= args.searches <= args.rounds:
        parser.error(f"{args.searches} searches in {args.rounds} rounds. Give 2 rounds or more, and no more searches than rounds")
    load = os.getloadavg()[0]  # of the machine before: on busy cores stages gain nothing by one another
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if args.base is None:
            make_base(directory / "base")
        setting = Setting(args.base or directory / "base", directory / "store", args.device, args.lengths[1])
        facts = {"benchmark": "nano_batches", **machine.facts(torch.device(args.device), args.commit)}
        facts |= {"lengths": list(args.lengths), "load_average": load}
        with lone_job(setting, make_data(directory / "data", args.lengths)) as job:
            measured = measure(job, args.rounds, args.searches, lambda known: machine.write(args.json, facts | known))
    for count, of in measured["step_seconds"].items():
        print(f"{count} slices: {of['median']:.3f} s ({min(of['all']):.3f} to {max(of['all']):.3f})")
    for each in measured["searches"]:
        print(f"found {each['slices']} in {each['steps']} steps: " + ", ".join(f"{count}: {s:.3f}" for count, s in each["tried"].items()))
    speeds = {name: measured[f"found_over_{name}"] for name in ("best", "two")}
    print(", ".join(f"found over {name}: {of['median']:.3f} (worst {of['worst']:.3f})" for name, of in speeds.items()))
    machine.write(args.json, facts | measured)


if __name__ == "__main__":
    main()
