"""What `tlora plan` predicts beside what was measured: points that its constants were not fitted to, as docs/reference/layouts.md has them.

    python -m bench.plan_points [--commit NAME] [--json FILE]

Four jobs of rank 16 over a 70B's shape, with the tokens of a micro-batch and the recomputed layers of each measurement. Nothing is measured
here, and no GPU is needed. Measurements without optimizer steps, of 400 to 4,096 tokens a sample, are of samples of 2,048 here.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import machine
from bench.cards import make_base
from tlora.data.prepare import prepare
from tlora.data.request import prepare_requests
from tlora.job import BasePrecision, DataConfig, JobSpec, RunSpec
from tlora.planning.gpu_models import find_gpu
from tlora.planning.job_sketch import sketch_jobs
from tlora.planning.layout_units import Device
from tlora.planning.layouts import plan_layouts
from tlora.service.base_shapes import Precision, find_outline
from tlora.shape.layout import Form

RESULTS = Path(__file__).parent / "results"
RANK, JOBS, LENGTH = 16, 4, 2048


@dataclass(frozen=True)
class Point:
    """`place`: keys of the measured tokens a second in `file`."""

    form: Form
    gpu: str
    gpus: int
    precision: BasePrecision | None
    tokens: int
    recomputed: int
    file: str
    place: tuple[str | int, ...]

    def measured(self) -> float:
        found: Any = json.loads((RESULTS / self.file).read_text())
        for key in self.place:
            found = found[key]
        return float(found)


_BIG = "micro_batch", "tokens_per_second_of_all_ranks"
POINTS = (
    Point("shared", "h200", 4, None, 6144, 10, "h200x4_fb2f609_big_equal.json", ("parts", "big", 1, *_BIG)),
    Point("shared", "h200", 2, None, 4096, 23, "h200x2_86df76c_shared_base.json", ("parts", "big", 0, *_BIG)),
    Point("shared", "h200", 2, None, 4096, 19, "h200x2_fb2f609_big_bases.json", ("parts", "big", 0, *_BIG)),
    Point("whole", "h200", 4, "fp8", 4096, 19, "h200x4_4fbd0d2_fp8.json", ("parts", "fp8", 0, *_BIG)),
    Point("streamed", "h100", 1, "fp8", 6144, 38, "h100_71836d0_streamed_70b_fp8.json", ("arms", 0, "tokens_per_second")),
)


def predict(point: Point, base: Path, directory: Path) -> dict[str, float]:
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": "red green blue small large round " * 500 + str(row)}) + "\n" for row in range(64)))
    jobs = [
        JobSpec(name=f"j{number}", data=DataConfig(path=str(data), max_length=LENGTH), r=RANK, batch_size=16, max_steps=8)
        for number in range(JOBS)
    ]
    settings: dict[str, Any] = {"base_precision": point.precision, "token_budget": point.tokens, "recompute": point.recomputed}
    run = RunSpec(base_model=str(base), output_dir=str(directory / "out"), jobs=jobs, dtype="bfloat16", **settings)
    gpu = find_gpu(point.gpu)
    how = Precision("bfloat16", point.precision, gpu=gpu.name, capability=gpu.capability, rank=RANK)
    shape = find_outline(directory / "bases", str(base), how)
    sketches = sketch_jobs(run, shape, prepare(prepare_requests(run, shape.vocab_size)))
    limit = 1 << 50  # the measurement fitted: its memory is not judged by our limit, which leaves the allocator more
    plans = plan_layouts(run, sketches, [Device(gpu, shape.parts, limit)] * point.gpus)
    found = next(each for each in plans.feasible if each.layout.form == point.form)
    return {"tokens_per_second": found.tokens_per_second, "bytes": found.unit.predicted_bytes}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        base = make_base("70B", directory / "70B")
        for point in POINTS:
            predicted, measured = predict(point, base, directory), point.measured()
            error = predicted["tokens_per_second"] / measured - 1
            row: dict[str, Any] = {"form": point.form, "gpus": point.gpus, "gpu": point.gpu, "file": point.file}
            rows.append(row | {"measured": measured, "error": error} | predicted)
            print(f"{point.form:<9} {point.gpus} x {point.gpu}, {point.precision or 'bf16'}, {point.tokens:,} tokens: ", end="")
            print(f"predicted {predicted['tokens_per_second']:,.0f}, measured {measured:,.0f} tokens/s: {error:+.1%} ({point.file})")
    machine.write(args.json, {"benchmark": "plan_points", **machine.facts(torch.device("cpu"), args.commit), "rows": rows})


if __name__ == "__main__":
    main()
