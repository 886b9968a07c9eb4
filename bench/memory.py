"""Memory of a micro-batch: what the measured model predicts, what the counted estimate predicts, what a run takes; and its speed.

    python -m bench.memory --shape llama-3-8b --budgets 2048,8192,16384 --room-gib 30 --out FILE
    python -m bench.memory --shape tiny --device cpu --budgets 64 --lengths 32 --micro-batches 1   # runs, counts nothing

Eight jobs train through the engine, optimizer steps included, with no, half of and all layers recomputed. Then the fewest layers with
which the largest budget takes at most --room-gib beside the base and the adapters' state.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.shapes import SHAPES, make_model
from bench.together import open_engine
from bench.workload import Order, make_jobs
from tlora.batching.recompute_plan import same_for_all
from tlora.group.engine import Engine
from tlora.job import JobSpec
from tlora.planning.memory import measure
from tlora.planning.memory_probe import DeviceMeter, Meter, Probe, probe
from tlora.shape.memory import MemoryModel
from tlora.supermodel.load import make_base, outline
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.dtypes import dtype_name

WARM_UP = 2  # micro-batches; the first setting goes before all others once, until every job has stepped


class NoMeter:
    """A CPU counts nothing: shows that the program runs."""

    def allocated(self) -> int:
        return 0

    def peak(self) -> int:
        return 0

    def reset_peak(self) -> None: ...


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--ranks", type=_numbers, default=(8, 16, 32, 64), help="given to the jobs in turn")
    parser.add_argument("--lengths", type=int, default=2048, help="tokens per sample")
    parser.add_argument("--budgets", type=_numbers, default=(2048, 8192, 16384), help="tokens of a micro-batch")
    parser.add_argument("--room-gib", type=float, default=30.0)
    parser.add_argument("--micro-batches", type=int, default=6, help="measured for each setting")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="what to call this code where there is no git")
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def count_ahead(shape: str, dtype: torch.dtype, device: torch.device, specs: Sequence[JobSpec], directory: Path) -> MemoryModel:
    """The estimate that `tlora check` makes without weights; `directory` gets the config."""
    SHAPES[shape].save_pretrained(directory)
    base = outline(str(directory), dtype_name(dtype))
    return measure(SuperModel(base), sum(p.nbytes for p in base.model.parameters()), device, max(spec.r for spec in specs))


def run_setting(engine: Engine, budget: int, depth: int, count: int, meter: Meter) -> dict[str, Any]:
    """Peak and speed of `count` micro-batches of `budget` tokens with `depth` layers recomputed."""
    engine.share(budget, same_for_all(depth))
    for _ in range(WARM_UP):
        engine.run_micro_batch()
    machine.wait(engine.model.device)
    before, tokens, start = meter.allocated(), 0, time.perf_counter()
    meter.reset_peak()
    for _ in range(count):
        packed = engine.run_micro_batch()
        assert packed is not None
        tokens += packed.tokens
    machine.wait(engine.model.device)
    seconds = time.perf_counter() - start
    cuda = engine.model.device.type == "cuda"
    return {
        "token_budget": budget,
        "recomputed_layers": depth,
        "tokens_per_second": tokens / seconds,
        "fill": tokens / (count * budget),
        "peak_bytes": meter.peak(),
        "activation_bytes": meter.peak() - before,
        "reserved_bytes": torch.cuda.memory_reserved(engine.model.device) if cuda else 0,
    }


def compare(row: dict[str, Any], found: Probe, counted: MemoryModel, engine: Engine) -> dict[str, Any]:
    """`row` with both predictions, and their errors as shares of the measured peak (None where nothing was measured)."""
    layouts = [engine.model.layout(run.spec) for run in engine.runs.values()]
    for name, memory in (("predicted", found.memory), ("estimated", counted)):
        total = memory.total_bytes(layouts, row["token_budget"], row["recomputed_layers"])
        row[f"{name}_bytes"] = total
        row[f"{name}_activation_bytes"] = memory.activation_bytes(row["token_budget"], row["recomputed_layers"])
        row[f"{name}_error"] = total / row["peak_bytes"] - 1 if row["peak_bytes"] else None
    return row


def fewest_layers(memory: MemoryModel, budget: int, room_bytes: float) -> int:
    """Recomputed layers with which activations of `budget` tokens are predicted to take at most `room_bytes`."""
    fitting = (k for k in range(memory.num_layers + 1) if memory.activation_bytes(budget, k) <= room_bytes)
    return next(fitting, memory.num_layers)


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    dtype, meter = (torch.bfloat16, DeviceMeter(device)) if cuda else (torch.float32, NoMeter())
    with tempfile.TemporaryDirectory() as directory:
        jobs = make_jobs(Order(options.jobs, options.ranks, 4, options.lengths), SHAPES[options.shape].vocab_size, None, Path(directory))
        specs = [job.spec for job in jobs]
        counted = count_ahead(options.shape, dtype, device, specs, Path(directory) / "outline")
        model = SuperModel(make_base(make_model(options.shape, device, dtype), options.shape))
        measured = probe(model, specs, counted, meter)
        assert measured is not None, "out of memory in the probe"
        found: dict[str, Any] = {"benchmark": "memory", **machine.facts(device, options.commit), "shape": options.shape}
        found |= {"probe_seconds": measured.seconds, "probe_error": measured.error_share, "measured": asdict(measured.memory)}
        found |= {"counted": asdict(counted), "probe_peaks": [asdict(peaks) for peaks in measured.peaks]}
        before = meter.allocated()
        engine, _ = open_engine(model, jobs, max(options.budgets))
        found["adapters_bytes"] = meter.allocated() - before
        found["adapters_predicted_bytes"] = sum(counted.job_bytes(model.layout(spec)) for spec in specs)
        base_gib = measured.memory.base_bytes / 2**30
        print(f"probe: {measured.seconds:.1f} s, error {measured.error_share:.2%}, base {base_gib:.2f} GiB", flush=True)
        found["rows"], room = [], options.room_gib * 2**30
        largest, most = max(options.budgets), model.num_layers
        settings = [(budget, depth) for budget in options.budgets for depth in (0, most // 2, most)]
        while not all(run.progress.step for run in engine.runs.values()):  # compiles what the probe has not met
            run_setting(engine, *settings[0], 1, meter)
        for budget, depth in [*settings, (largest, fewest_layers(measured.memory, largest, room))]:
            row = compare(run_setting(engine, budget, depth, options.micro_batches, meter), measured, counted, engine)
            found["rows"].append(row)
            print(format_row(row), flush=True)
            machine.write(options.out, found)
        engine.stop()
    return found


def format_row(row: dict[str, Any]) -> str:
    """A line of the table, in GiB."""
    errors = [f"{row[key]:+6.1%}" if row[key] is not None else "   n/a" for key in ("predicted_error", "estimated_error")]
    names = ("peak_bytes", "predicted_bytes", "estimated_bytes", "activation_bytes", "reserved_bytes")
    sizes = " ".join(f"{row[key] / 2**30:7.2f}" for key in names)
    return (
        f"{row['token_budget']:6} tokens, {row['recomputed_layers']:2} layers recomputed: {row['tokens_per_second']:8.0f} tokens/s; "
        f"peak, predicted, estimated, activations, reserved GiB {sizes}; errors {' '.join(errors)}"
    )


def main() -> None:
    machine.interpret_all_precisions()
    run_benchmark(read_options())


if __name__ == "__main__":
    main()
