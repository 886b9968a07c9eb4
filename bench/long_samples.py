"""Speed and memory where some samples are much longer than the others: layers recomputed per micro-batch, as `tlora train` plans it.

    python -m bench.long_samples --shape llama-3-8b --limit-gib 30 --out FILE
    python -m bench.long_samples --shape llama-3-8b --limit-gib 22 --long-share 0 --arms planned,unlimited --out FILE
    python -m bench.long_samples --shape tiny --device cpu --dtype float32 --long 256 --short 16,64 --limit-gib 1 --rounds 1

Each arm trains the same jobs for one epoch over the same samples, in turns. planned: below the limit, as it is planned. one-plan: below the
limit, with micro-batches as large as the longest sample, which all recompute as many layers as that one needs. unlimited: with all memory
that is free. Tokens are useful ones; an arm's figure is that of its median round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import machine
from bench.memory import NoMeter
from bench.shapes import SHAPES, make_model
from tlora.batching.recompute_plan import same_for_all
from tlora.data.dataset import Dataset, Sample, Writer
from tlora.data.prepare import Prepared
from tlora.data.report import DataReport
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import Computed, Ended, Noted, Report
from tlora.job import DataConfig, JobSpec, RunSpec
from tlora.planning.memory import memory_limit
from tlora.planning.memory_probe import DeviceMeter, Meter, probe, rehearse
from tlora.planning.micro_batches import MicroBatches
from tlora.planning.plan import RunPlan, describe_plan, plan_memory, settle
from tlora.planning.planned_job import PlannedJob
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.supermodel import SuperModel

ARMS = ("planned", "one-plan", "unlimited")
_WARM_UP = 6  # micro-batches of an arm before its first round


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--short", type=_numbers, default=[128, 2048], metavar="LOW,HIGH", help="tokens of the short samples, evenly between"
    )
    parser.add_argument("--long", type=int, default=16384, help="tokens of a long sample; each job has one")
    parser.add_argument("--long-share", type=float, default=0.1, help="of all tokens that lie in long samples; 0: there are none")
    parser.add_argument("--tokens", type=int, help="of each job; default: as many as --long and --long-share make")
    parser.add_argument("--limit-gib", type=float, default=30.0)
    parser.add_argument("--arms", type=lambda text: text.split(","), default=ARMS[:2], help=f"of {','.join(ARMS)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.arms) - set(ARMS)):
        parser.error(f"--arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    options.tokens = options.tokens or int(options.long / (options.long_share or 0.1))
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@dataclass
class Heard:
    """Counts an arm's micro-batches, keeps no files, and lets no failure pass for a figure."""

    tokens: int = 0
    computed: int = 0
    micro_batches: int = 0

    def __call__(self, report: Report) -> None:
        match report:
            case Computed(packed, computed, _):
                self.tokens += packed.tokens
                self.computed += computed
                self.micro_batches += 1
            case Ended(name, _, "failed", reason):
                raise RuntimeError(f"{name} failed: {reason}")
            case Noted(line):
                raise RuntimeError(line)  # a smaller budget after running out of memory, among others
            case _:
                pass


def make_lengths(options: argparse.Namespace, seed: int) -> list[int]:
    """One long sample, and short ones with the rest of the tokens."""
    rng, lengths = np.random.default_rng(seed), [options.long] if options.long_share else []
    while (left := options.tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(rng.integers(options.short[0], options.short[1] + 1))))
    return lengths


def make_planned_jobs(options: argparse.Namespace, layout_of: SuperModel, directory: Path) -> tuple[PlannedJob, ...]:
    """Random tokens, all of them trained, for one epoch."""
    jobs: list[PlannedJob] = []
    for number in range(options.jobs):
        rng, lengths = np.random.default_rng(number), make_lengths(options, number)
        writer = Writer(directory / f"job{number}")
        for length in lengths:
            writer.add(Sample(rng.integers(3, layout_of.base.vocab_size, length).astype(np.int32), np.ones(length, np.float32)))
        writer.finish({})
        data = Dataset(directory / f"job{number}")
        spec = JobSpec(
            name=f"job{number}",
            data=DataConfig(path="-", max_length=max(lengths)),
            r=options.rank,
            lora_alpha=2 * options.rank,
            batch_size=options.batch_size,
            max_steps=-(-len(lengths) // options.batch_size),
            learning_rate=1e-4,
            seed=number,
        )
        prepared = Prepared(data, None, DataReport("text", [], len(lengths)), spec.data)
        jobs.append(PlannedJob(spec, prepared, max(lengths), layout_of.layout(spec)))
    return tuple(jobs)


@dataclass(frozen=True)
class Arm:
    name: str
    micro_batches: MicroBatches
    predicted_bytes: int
    limit_bytes: int


def make_arms(run: RunSpec, plan: RunPlan, model: SuperModel, free_bytes: int, meter: Meter) -> dict[str, Arm]:
    """Of a plan by the memory that was measured."""
    layouts = [job.layout for job in plan.jobs if job.layout is not None]
    limited = rehearse(run, settle(run, plan, plan.memory, model.device), model, meter, print)
    whole = settle(run, replace(plan, limit_bytes=free_bytes), plan.memory, model.device)
    one = replace(limited, token_budget=limited.largest, recompute=same_for_all(limited.recomputed_layers))
    found: dict[str, Arm] = {}
    for name, each in zip(ARMS, (limited, one, whole), strict=True):
        print(f"{name}: {describe_plan(each)}", flush=True)
        found[name] = Arm(name, each.micro_batches, each.total_bytes(layouts), each.limit_bytes)
    return found


def run_arm(model: SuperModel, jobs: Sequence[PlannedJob], arm: Arm, meter: Meter, most: int | None = None) -> dict[str, Any]:
    """One epoch of all jobs, or as many micro-batches."""
    model.recompute, heard = arm.micro_batches.recompute, Heard()
    engine = Engine(model, arm.micro_batches.token_budget, heard)
    meter.reset_peak()
    machine.wait(model.device)
    start = time.perf_counter()
    for job in jobs:
        assert job.data is not None
        engine.join(JobRun(job.spec, job.data.train, None))
    while engine.runs and (most is None or heard.micro_batches < most):
        engine.run_micro_batch()
    machine.wait(model.device)
    seconds = time.perf_counter() - start
    engine.stop()
    cuda = model.device.type == "cuda"
    return {
        "arm": arm.name,
        "token_budget": arm.micro_batches.token_budget,
        "recomputed_layers_of_a_full_one": arm.micro_batches.recompute.layers(arm.micro_batches.token_budget),
        "recomputed_layers_of_the_longest": arm.micro_batches.recompute.layers(max(job.longest for job in jobs)),
        "tokens_per_second": heard.tokens / seconds,
        "tokens": heard.tokens,
        "computed_tokens": heard.computed,
        "micro_batches": heard.micro_batches,
        "seconds": seconds,
        "peak_bytes": meter.peak(),
        "reserved_bytes": torch.cuda.memory_reserved(model.device) if cuda else 0,
        "predicted_bytes": arm.predicted_bytes,
        "limit_bytes": arm.limit_bytes,
    }


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, which is written to `options.out` after every round."""
    device = torch.device(options.device)
    dtype, meter = getattr(torch, options.dtype), DeviceMeter(device) if device.type == "cuda" else NoMeter()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        SHAPES[options.shape].save_pretrained(directory / "outline")
        outlined = SuperModel(outline(str(directory / "outline"), options.dtype))
        jobs = make_planned_jobs(options, outlined, directory)
        fields = {"base_model": options.shape, "jobs": [job.spec for job in jobs], "deterministic": options.deterministic}
        run, limit, free = RunSpec.model_validate(fields), int(options.limit_gib * 2**30), memory_limit(device)
        plan = plan_memory(run, jobs, outlined, outlined.base.num_bytes, device, limit)
        print(f"before the load: {describe_plan(plan)}", flush=True)
        model = SuperModel(make_base(make_model(options.shape, device, dtype), options.shape), options.deterministic)
        model.expect([job.spec for job in jobs])
        measured = probe(model, [job.spec for job in jobs], plan.memory, meter) if device.type == "cuda" else None
        memory = measured.memory if measured is not None else plan.memory
        arms = make_arms(run, settle(run, plan, memory, device), model, free, meter)
        setup = {key: getattr(options, key) for key in ("shape", "jobs", "rank", "batch_size", "short", "long", "long_share", "limit_gib")}
        found: dict[str, Any] = {"benchmark": "long_samples", **machine.facts(device, options.commit), "setup": setup, "rows": []}
        for number in range(options.rounds):
            for arm in options.arms:
                if not number:
                    run_arm(model, jobs, arms[arm], meter, _WARM_UP)
                row = run_arm(model, jobs, arms[arm], meter) | {"round": number}
                found["rows"].append(row)
                print(format_row(row), flush=True)
                found["medians"] = medians(found["rows"])
                machine.write(options.out, found)
    return found


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Tokens a second of each arm, and the first arm's as a multiple of each other's."""
    speeds = {arm: [row["tokens_per_second"] for row in rows if row["arm"] == arm] for arm in ARMS}
    found = {arm: statistics.median(each) for arm, each in speeds.items() if each}
    first = rows[0]["arm"]
    return found | {f"{first} over {arm}": found[first] / speed for arm, speed in found.items() if arm != first}


def format_row(row: dict[str, Any]) -> str:
    """A line of the table, in GiB."""
    sizes = " ".join(f"{row[key] / 2**30:6.2f}" for key in ("peak_bytes", "predicted_bytes", "limit_bytes", "reserved_bytes"))
    layers = f"{row['recomputed_layers_of_a_full_one']} to {row['recomputed_layers_of_the_longest']}"
    return (
        f"{row['arm']:10} {row['token_budget']:6} tokens, {layers} layers recomputed: {row['tokens_per_second']:8.0f} tokens/s; "
        f"peak, predicted, limit, reserved GiB {sizes}"
    )


def main() -> None:
    found = run_benchmark(read_options())
    print(found["medians"])


if __name__ == "__main__":
    main()
