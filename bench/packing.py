"""What packing leaves: `pack` against an exact solver, and the order of batches over stages against LoRAFusion's groups.

    python -m bench.packing [--budgets 2048,4096,8192] [--micro-batches 240] [--windows 3] [--solver-seconds 5] [--json FILE]

Mixes of lengths are real data sets and drawn ones (`bench/length_mixes.py`). No GPU: a micro-batch takes what the cost model says of the 8B
shape on an H200.

Streams: `pack` forms micro-batches of endless jobs; what it consumed has a least number of micro-batches and of seconds that no packing
can beat (L2 of the samples, and of each batch of a job). Windows: from states of that stream, the most tokens that the next four
micro-batches can hold, by scipy's MILP in a time box, against what `pack` puts there. Rounds: one global batch of all jobs at a time,
packed exactly, as LoRAFusion does.
Stages: the share of its time that the last stage of a pipeline waits: with the stream, with one that is fair sample by sample as on one
GPU, with LoRAFusion's groups, and with a flush at each step.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.exact_packing import fewest_bins, most_tokens, pack_exactly
from bench.length_mixes import LengthJob, mixes, offered
from bench.pipeline_model import Groups
from tlora.batching.pack import MicroBatch, pack, prepared_budget
from tlora.batching.pipeline_model import Entry, EntryOrder, OfferedJob, Pipeline, Stream
from tlora.shape.hardware import LIVE_GPU, cost_model

BASE = "llama-3-8b"
WINDOW = 4  # micro-batches that the solver packs at a time
STAGES = (2, 4)
_WARM_UP = 16


def predicted_seconds(tokens: int, budget: int, members: int) -> float:
    """Of one micro-batch on one GPU, padded as the engine pads it."""
    return _COST.micro_batch_seconds(BASE, prepared_budget(tokens, budget), 1, 1, members)


_COST = cost_model(LIVE_GPU)


class _Streamed:
    """Endless jobs on one GPU: each micro-batch leaves before the next one is packed."""

    def __init__(self, jobs: Sequence[LengthJob], budget: int, in_order: bool) -> None:
        self.jobs, self._budget, self._in_order = offered(jobs), budget, in_order

    def next(self) -> tuple[MicroBatch, dict[str, int]]:
        """And which batch of each of its jobs it has samples of."""
        packed = pack([job.flow for job in self.jobs.values()], self._budget, in_order=self._in_order)
        assert packed is not None
        batches = {row.job_id: self.jobs[row.job_id].batch for row in packed.rows}
        for name in batches:
            if self.jobs[name].flow.complete:
                self.jobs[name].leave()
        return packed, batches


def measure_stream(jobs: Sequence[LengthJob], budget: int, micro_batches: int, in_order: bool) -> dict[str, Any]:
    """What `pack` made, and what no packing of the same samples can beat."""
    stream = _Streamed(jobs, budget, in_order)
    consumed: dict[tuple[str, int], list[int]] = defaultdict(list)
    tokens = padded = 0
    seconds = 0.0
    begun = time.perf_counter()
    made = [stream.next() for _ in range(micro_batches)]
    pack_seconds = time.perf_counter() - begun
    for packed, batches in made:
        tokens += packed.tokens
        padded += prepared_budget(packed.tokens, budget)
        seconds += predicted_seconds(packed.tokens, budget, len(batches))
        for row in packed.rows:
            consumed[row.job_id, batches[row.job_id]].append(row.tokens)
    least = max(
        fewest_bins([n for lengths in consumed.values() for n in lengths], budget),
        *(sum(fewest_bins(own, budget) for (name, _), own in consumed.items() if name == job.name) for job in jobs),
    )
    long = [n for lengths in consumed.values() for n in lengths if n > budget]
    shared, rest = least - len(long), tokens - sum(long)
    # t is convex in tokens, so equal micro-batches take the least, and their sum grows with their number
    least_seconds = sum(predicted_seconds(n, budget, 1) for n in long)
    least_seconds += shared * _COST.micro_batch_seconds(BASE, rest / shared, 1, 1, 1) if shared else 0.0
    return {
        "micro_batches": micro_batches,
        "fewest_possible": least,
        "fill": tokens / sum(max(budget, packed.tokens) for packed, _ in made),
        "padding": 1 - tokens / padded,
        "predicted_seconds": seconds,
        "least_seconds": least_seconds,
        "most_gain": seconds / least_seconds - 1,
        "pack_milliseconds": 1e3 * pack_seconds / micro_batches,
        "tokens": tokens,
    }


def measure_windows(jobs: Sequence[LengthJob], budget: int, windows: int, solver_seconds: float) -> dict[str, Any]:
    """Of states of the stream, the tokens of its next micro-batches, and the most that the solver finds and that there can be."""
    stream = _Streamed(jobs, budget, in_order=False)
    ours = best = bound = spent = 0.0
    proven = 0
    for _ in range(windows):
        for _ in range(_WARM_UP):
            stream.next()
        ahead = copy.deepcopy(stream)
        own = [packed.tokens for packed, _ in (ahead.next() for _ in range(8 * WINDOW)) if packed.budget == budget][:WINDOW]
        begun = time.perf_counter()
        found = most_tokens([_coming(job) for job in copy.deepcopy(stream).jobs.values()], budget, WINDOW, solver_seconds)
        spent += time.perf_counter() - begun
        ours, best, bound = ours + sum(own), best + max(found.value, sum(own)), bound + found.bound
        proven += found.value >= found.bound - 0.5
    return {
        "windows": windows,
        "solved": proven,
        "solver_gain": best / ours - 1,
        "most_gain": bound / ours - 1,
        "solver_seconds_a_micro_batch": spent / windows / WINDOW,
    }


def _coming(job: OfferedJob) -> list[list[int]]:
    """Lengths of what is pending, and of the batches that can enter within a window after it."""
    batches = [[item.tokens for item in job.flow.pending]]
    for _ in range(WINDOW - 1):
        while job.flow.pending:
            job.flow.take(0)
        job.leave()
        batches.append([item.tokens for item in job.flow.pending])
    return batches


def measure_rounds(jobs: Sequence[LengthJob], budget: int, rounds: int, solver_seconds: float) -> dict[str, Any]:
    """One global batch of all jobs at a time, in as few micro-batches as can be; nothing goes over into the next round."""
    tokens = bins = least = capacity = 0
    seconds = spent = 0.0
    for turn in range(rounds):
        samples = [(number, item.tokens) for number, job in enumerate(jobs) for item in job.batch(number, turn)]
        begun = time.perf_counter()
        packed, fewest = pack_exactly([n for _, n in samples], budget, solver_seconds)
        spent += time.perf_counter() - begun
        bins, least = bins + len(packed), least + fewest
        for bin in packed:
            own = sum(samples[at][1] for at in bin)
            tokens, capacity = tokens + own, capacity + max(own, budget)
            seconds += predicted_seconds(own, budget, len({samples[at][0] for at in bin}))
    return {
        "rounds": rounds,
        "micro_batches": bins,
        "fewest_possible": least,
        "fill": tokens / capacity,
        "predicted_tokens_per_second": tokens / seconds,
        "solver_seconds_a_micro_batch": spent / bins,
    }


def measure_stages(jobs: Sequence[LengthJob], budget: int, stages: int, micro_batches: int) -> dict[str, dict[str, float]]:
    """By order: tokens/s of the pipeline, the share of the last stage's time that it waits, and how often the rule made it wait."""
    orders: dict[str, Callable[[], EntryOrder]] = {
        "stream": lambda: Stream(offered(jobs), budget, stages),
        "fair": lambda: Stream(offered(jobs), budget, 1),
        "groups": lambda: Groups(jobs, budget, flush=False),
        "flush": lambda: Groups(jobs, budget, flush=True),
    }
    found: dict[str, dict[str, float]] = {}
    for name, order in orders.items():

        def seconds_of(entry: Entry) -> float:
            return predicted_seconds(entry.tokens, budget, len(entry.batches))

        through = Pipeline(order(), seconds_of, stages).run(micro_batches, _WARM_UP)
        found[name] = {
            "predicted_tokens_per_second": through.tokens / through.seconds,
            "waiting_share": through.waited_seconds / through.seconds,
            "stalls_per_100_micro_batches": 100 * through.stalls / through.micro_batches,
        }
    return found


def measure(name: str, jobs: Sequence[LengthJob], budget: int, args: argparse.Namespace) -> dict[str, Any]:
    stream = measure_stream(jobs, budget, args.micro_batches, in_order=False)
    row: dict[str, Any] = {
        "mix": name,
        "budget": budget,
        "offered_over_budget": sum(float(job.lengths.mean()) * job.batch_size for job in jobs) / budget,
        "stream": stream,
        "stream_in_order": measure_stream(jobs, budget, args.micro_batches, in_order=True),
        "rounds": measure_rounds(jobs, budget, args.rounds, args.solver_seconds),
        "stages": {str(stages): measure_stages(jobs, budget, stages, args.micro_batches) for stages in STAGES},
    }
    if args.windows:
        row["windows"] = measure_windows(jobs, budget, args.windows, args.solver_seconds)
    return row


def format_row(row: dict[str, Any]) -> str:
    own, rounds = row["stream"], row["rounds"]
    speed = own["tokens"] / own["predicted_seconds"] / rounds["predicted_tokens_per_second"]
    text = f"{row['mix']:<20} {row['budget']:>5}: fill {own['fill']:.1%}, at most {own['most_gain']:.1%} to gain; "
    if solved := row.get("windows"):
        text += f"solver {solved['solver_gain']:+.1%} (at most {solved['most_gain']:.1%}, {solved['solved']}/{solved['windows']} solved); "
    text += f"{speed:.2f} x exact rounds (fill {rounds['fill']:.1%})"
    for stages, orders in row["stages"].items():
        waits = ", ".join(f"{name} {found['waiting_share']:.1%}" for name, found in orders.items())
        text += f"; {stages} stages wait: {waits}"
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="2048,4096,8192")
    parser.add_argument("--micro-batches", type=int, default=240)
    parser.add_argument("--windows", type=int, default=3, help="0: none")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--solver-seconds", type=float, default=5.0)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if args.micro_batches <= _WARM_UP:
        parser.error(f"{args.micro_batches} micro-batches are too few. Give more than {_WARM_UP}")
    found: dict[str, Any] = {"benchmark": "packing", **machine.facts(torch.device("cpu"), args.commit), "rows": []}
    for (name, jobs), budget in itertools.product(mixes().items(), [int(text) for text in args.budgets.split(",")]):
        found["rows"].append(row := measure(name, jobs, budget, args))
        machine.write(args.json, found)
        print(format_row(row), flush=True)


if __name__ == "__main__":
    main()
