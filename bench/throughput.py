"""Speed of many jobs on one device, in one run: together, one by one with this program, and one after another with PEFT at its best.

    python -m bench.throughput --shape llama-3-8b --jobs 8 --ranks 8,16,32,64 --batch-size 4 --lengths 2048 --token-budget 8192 --out FILE
    python -m bench.throughput --shape qwen3-0.6b --batch-size 2 --lengths 512 --out FILE
    python -m bench.throughput --shape qwen3-1.7b --dtype float32 --lengths 512 --peft-settings compiled,plain --out FILE
    python -m bench.throughput --shape llama-3-8b --lengths real --data DIRECTORY --token-budget auto --out FILE
    python -m bench.throughput --shape qwen3-30b-a3b --ranks 32 --batch-size 2 --lengths 512 --systems together,one-by-one --out FILE
    python -m bench.throughput --shape tiny --device cpu --lengths 64 --token-budget 512 --seconds 1 --peft-steps 3

Random weights; tokens are useful ones, without padding, and seconds those of whole windows in which every job takes its optimizer
steps; medians. All systems get the same samples in the same order. `--lengths real` trains on the .json and .jsonl files of --data.
Over a mixture all adapters are at its experts too, with their rank divided by the experts of a token.
With `--dtype float32` torch does not use TF32, for ours and for PEFT alike; our own kernels multiply as `kernels/triton_dot.py` says.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import machine, peft_baseline
from bench.shapes import SHAPES, experts_per_token, make_model, matmul_parameters, shape_of
from bench.together import Plan, as_row, gib, train_one_by_one, train_together
from bench.workload import Job, Order, describe, make_jobs
from tlora.batching.pack import auto_token_budget
from tlora.registry import BASE_PRECISIONS
from tlora.supermodel.held_linear import hold
from tlora.supermodel.inject import find_linears
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

SYSTEMS = ("together", "one-by-one", "peft")
_LARGEST_AUTO = 8192  # as on every GPU with room for it


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="of the shape's decoder; default: the shape's own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--ranks", type=_numbers, default=(8, 16, 32, 64), help="given to the jobs in turn")
    parser.add_argument("--batch-size", type=int, default=4, help="samples per optimizer step of each job")
    parser.add_argument("--lengths", type=_lengths, default=2048, help="tokens per sample, or real")
    parser.add_argument("--data", type=Path, help="directory of the texts for --lengths real")
    parser.add_argument(
        "--token-budget", type=_budget, default=8192, help="tokens of a micro-batch of ours; auto: as `tlora train` chooses on a large GPU"
    )
    parser.add_argument("--deterministic", action="store_true", help="ours in deterministic mode")
    parser.add_argument("--base-precision", choices=BASE_PRECISIONS, help="ours with such a base")
    parser.add_argument("--recompute", type=int, default=0, help="ours: decoder layers that backward runs again")
    parser.add_argument("--systems", type=_systems, default=SYSTEMS, help="of together,one-by-one,peft")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured for each system of ours, after its warm-up")
    parser.add_argument("--warm-up", type=int, default=2, help="windows before those; mixed lengths bring new shapes for longer")
    parser.add_argument(
        "--peft-steps", type=int, default=32, help="measured for each of PEFT's settings, of each job where jobs differ, its shapes warmed"
    )
    parser.add_argument(
        "--peft-settings", type=lambda text: text.split(","), default=(), metavar="NAME,...", help="only these, as compiled + liger; all"
    )
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds after which no further setting of PEFT is begun")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    options = parser.parse_args(arguments)
    if options.lengths != "real" and options.lengths > most_tokens(options):
        parser.error(f"samples of {options.lengths} tokens do not fit into a token budget of {options.token_budget}")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _budget(text: str) -> int | str:
    return text if text == "auto" else int(text)


def most_tokens(options: argparse.Namespace) -> int:
    """Of one sample, and of a micro-batch."""
    return _LARGEST_AUTO if options.token_budget == "auto" else options.token_budget


def token_budget(options: argparse.Namespace, jobs: Sequence[Job]) -> int:
    """Of our micro-batches."""
    if options.token_budget != "auto":
        return options.token_budget
    longest = max(int(job.data.lengths.max()) for job in jobs)
    return auto_token_budget(longest, [job.batch_tokens for job in jobs], _LARGEST_AUTO)


def _lengths(text: str) -> int | str:
    return text if text == "real" else int(text)


def _systems(text: str) -> tuple[str, ...]:
    wrong = sorted(set(text.split(",")) - set(SYSTEMS))
    if wrong:
        raise argparse.ArgumentTypeError(f"no system {wrong[0]!r}; there are {', '.join(SYSTEMS)}")
    return tuple(text.split(","))


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    return getattr(torch, options.dtype or ("float32" if options.device == "cpu" else "bfloat16"))


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, which is written to `options.out` after every system."""
    started = time.perf_counter()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("highest")  # torch's default: no product of its own in TF32
    experts = experts_per_token(SHAPES[options.shape]) > 0
    order = Order(options.jobs, options.ranks, options.batch_size, options.lengths, min(2048, most_tokens(options)), experts)
    with tempfile.TemporaryDirectory() as directory:
        jobs = make_jobs(order, SHAPES[options.shape].vocab_size, options.data, Path(directory))
        keys = ("shape", "batch_size", "lengths", "token_budget", "deterministic", "base_precision", "recompute")
        setup = {key: getattr(options, key) for key in keys} | {"dtype": str(dtype_of(options)), "jobs": describe(jobs)}
        setup["float32_matmul_precision"] = torch.get_float32_matmul_precision()
        setup["token_budget"] = token_budget(options, jobs)
        setup["layers"] = shape_of(options.shape, options.layers).num_hidden_layers
        found: dict[str, Any] = {"benchmark": "throughput", **machine.facts(device, options.commit), "setup": setup, "rows": []}
        mix = {job.spec.name: int(job.data.lengths.sum()) for job in jobs}
        if {"together", "one-by-one"} & set(options.systems):
            mix = _run_ours(options, jobs, found) or mix
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if "peft" in options.systems:
            target = peft_baseline.Target(
                options.shape, device, dtype_of(options), options.peft_steps, started + options.time_limit, options.layers
            )
            found["rows"] += peft_baseline.measure(jobs, target, mix, options.peft_settings)
    found["seconds"] = time.perf_counter() - started
    machine.write(options.out, found)
    return found


def _run_ours(options: argparse.Namespace, jobs: Sequence[Job], found: dict[str, Any]) -> dict[str, int]:
    """Rows of this program; returns the tokens of each job in the time that was measured together."""
    device, start = torch.device(options.device), time.perf_counter()
    weights = make_model(options.shape, device, dtype_of(options), options.layers)
    parameters = matmul_parameters(weights)
    if options.base_precision is not None:
        hold(weights, list(find_linears(weights)), device, options.base_precision)
    machine.wait(device)
    found["build_seconds"] = time.perf_counter() - start
    start = time.perf_counter()
    model = SuperModel(make_base(weights, options.shape), options.deterministic)
    model.recomputed_layers = options.recompute
    machine.wait(device)
    found["super_model_seconds"] = time.perf_counter() - start
    found["base_gib"] = gib(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
    plan, mix = Plan(found["setup"]["token_budget"], options.seconds, options.warm_up), dict[str, int]()
    if "together" in options.systems:
        run = train_together(model, jobs, plan)
        mix = run.tokens
        found["rows"].append(as_row(run, "together", parameters))
        machine.write(options.out, found)
        print(found["rows"][-1], flush=True)
    if "one-by-one" in options.systems:
        stand_ins = {job.spec.name: job if options.lengths == "real" else _first_of_rank(jobs, job.spec.r) for job in jobs}
        runs = train_one_by_one(model, list({job.spec.name: job for job in stand_ins.values()}.values()), plan)
        wanted = mix or {job.spec.name: int(job.data.lengths.sum()) for job in jobs}
        alone = {name: runs[job.spec.name].tokens_per_second for name, job in stand_ins.items()}
        seconds = sum(tokens / alone[name] for name, tokens in wanted.items())
        row = {"system": "one-by-one", "tokens_per_second": sum(wanted.values()) / seconds, "tokens_per_second_of_jobs": alone}
        row |= {"graphs_compiled": sum(run.graphs for run in runs.values())}
        found["rows"].append(row | {"activations_gib": gib(max(run.activation_bytes for run in runs.values()))})
        machine.write(options.out, found)
    return mix


def _first_of_rank(jobs: Sequence[Job], rank: int) -> Job:
    """Of jobs of equal samples, those of one rank are as fast as each other."""
    return next(job for job in jobs if job.spec.r == rank)


def format_table(found: dict[str, Any]) -> str:
    """What was measured, as lines for a terminal."""
    best = next((row["tokens_per_second"] for row in found["rows"] if row.get("best")), None)
    lines = [f"{found['device']}, torch {found['versions']['torch']}, commit {found['commit']}: {found['command']}"]
    lines.append(f"{'':32} {'tokens/s':>10} {'x PEFT':>7} {'TFLOP/s':>8} {'activations GiB':>16} {'peak GiB':>9}")
    for row in found["rows"]:
        name = f"PEFT {row['setting']}{' (best)' if row.get('best') else ''}" if row["system"] == "peft" else row["system"]
        speed = row.get("tokens_per_second")
        if speed is None:
            lines.append(f"{name:32} {row.get('skipped') or row.get('error')}")
            continue
        ratio = f"{speed / best:7.2f}" if best else f"{'':7}"
        tflops = f"{row['useful_tflops']:8.1f}" if "useful_tflops" in row else f"{'':8}"
        memory = "" if row["activations_gib"] is None else f"{row['activations_gib']:16.1f}"
        if row.get("peak_gib") is not None:
            memory = f"{memory:16} {row['peak_gib']:9.1f}"
        lines.append(f"{name:32} {speed:10,.0f} {ratio} {tflops} {memory}".rstrip())
        if "first_step_seconds" in row:
            compiled = f"graphs compiled: {row['graphs_compiled']}, after the warm-up: {row['graphs_compiled_after_warm_up']}"
            lines.append(f"  first step after {row['first_step_seconds']:.1f} s; {compiled}")
    return "\n".join(lines)


def main() -> None:
    print(format_table(run_benchmark(read_options())))


if __name__ == "__main__":
    main()
