"""What `tlora plan` predicts beside what was measured: points that its constants were not fitted to, as docs/reference/layouts.md has them.

    python -m bench.plan_points [--device-spec FILE] [--commit NAME] [--json FILE]

Short runs of `bench.plan_measurements`, each with its own jobs; and four jobs of rank 16 over a 70B's shape, with the tokens of a
micro-batch and the recomputed layers of the measurement. Nothing is measured here, and no GPU is needed. Of the latter, those without
optimizer steps, of 400 to 4,096 tokens a sample, are of samples of 2,048 here. `--device-spec`: what `tlora calibrate` wrote, for the GPU
of the short runs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import machine
from bench.cards import outline_base
from bench.plan_measurements import Work, spec_of
from bench.shapes import shape_of
from tlora.data.prepare import prepare
from tlora.data.request import prepare_requests
from tlora.job import BasePrecision, DataConfig, JobSpec, RunSpec
from tlora.planning.job_sketch import sketch_jobs
from tlora.planning.layout_units import Device
from tlora.planning.layouts import LayoutPlan, plan_layouts
from tlora.service.base_shapes import Precision, find_outline
from tlora.shape.base_shape import BaseShape
from tlora.shape.gpu_models import GpuModel, find_gpu, gpu_called
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


# Short runs on one GPU; those of `Work.fitted` and of `FITTED_LATER` are left out of the medians.
MEASUREMENTS = ("h200_f960408_plan_measurements_a.json", "h200_f960408_plan_measurements_b.json")
# Groups and tokens of micro-batches: the other ends of the slopes that `FEATURE_WEIGHTS` is from (src/tlora/shape/work.py).
FITTED_LATER = {("8b", 512), ("0.6b", 2048)}


class Bases:
    """Outlines of bases, each made once in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def outline(self, shape: str, layers: int | None, precision: BasePrecision | None, gpu: GpuModel) -> tuple[Path, BaseShape]:
        base = self._directory / f"{shape}-{layers}"
        if not base.is_dir():
            outline_base(shape_of(shape, layers), base)
        how = Precision("bfloat16", precision, gpu=gpu.name, capability=gpu.capability, rank=RANK)
        return base, find_outline(self._directory / "outlines", str(base), how)


def plan(run: RunSpec, shape: BaseShape, gpu: GpuModel, gpus: int, form: Form) -> LayoutPlan:
    """That of `form`. The measurement fitted: its memory is not judged by our limit, which leaves the allocator more."""
    sketches = sketch_jobs(run, shape, prepare(prepare_requests(run, shape.vocab_size)))
    plans = plan_layouts(run, sketches, [Device(gpu, shape.parts, 1 << 50)] * gpus)
    return next(each for each in plans.feasible if each.layout.form == form)


def predict(point: Point, bases: Bases, directory: Path) -> LayoutPlan:
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": "red green blue small large round " * 500 + str(row)}) + "\n" for row in range(64)))
    jobs = [
        JobSpec(name=f"j{number}", data=DataConfig(path=str(data), max_length=LENGTH), r=RANK, batch_size=16, max_steps=8)
        for number in range(JOBS)
    ]
    gpu = find_gpu(point.gpu)
    base, shape = bases.outline("llama-3-70b", None, point.precision, gpu)
    settings: dict[str, Any] = {
        "base_precision": point.precision,
        "token_budget": point.tokens,
        "recompute": point.recomputed,
        "layout": point.form,
    }
    run = RunSpec(base_model=str(base), output_dir=str(directory / "out"), jobs=jobs, dtype="bfloat16", **settings)
    return plan(run, shape, gpu, point.gpus, point.form)


def predict_work(row: dict[str, Any], gpu: GpuModel, bases: Bases, directory: Path) -> LayoutPlan:
    """Of a row of `bench.plan_measurements`."""
    work, rng = Work(**row["work"]), np.random.default_rng(0)
    base, shape = bases.outline(row["shape"], row["layers"], row["precision"], gpu)
    jobs = list[JobSpec]()
    for number in range(work.jobs):
        data = directory / f"{number}.jsonl"
        ids = [rng.integers(3, 500, length).tolist() for length in work.lengths_of(number)]
        data.write_text("".join(json.dumps({"input_ids": each}) + "\n" for each in ids))
        jobs.append(spec_of(work, number, str(data), steps=48))
    form: Form = "streamed" if row["slots"] else "whole"
    settings: dict[str, Any] = {"base_precision": row["precision"], "token_budget": work.token_budget, "recompute": work.recompute}
    run = RunSpec(base_model=str(base), output_dir=str(directory / "out"), jobs=jobs, dtype="bfloat16", layout=form, **settings)
    return plan(run, shape, gpu, 1, form)


def rows_of_layouts(bases: Bases, directory: Path) -> Iterator[dict[str, Any]]:
    for point in POINTS:
        predicted, measured = predict(point, bases, directory), point.measured()
        row: dict[str, Any] = {"form": point.form, "gpus": point.gpus, "gpu": point.gpu, "file": point.file}
        what = f"{point.form:<9} {point.gpus} x {point.gpu}, {point.precision or 'bf16'}, {point.tokens:,} tokens"
        yield _compared(row, what, predicted, measured)


def rows_of_works(spec: str | None, bases: Bases, directory: Path) -> Iterator[dict[str, Any]]:
    for file in MEASUREMENTS:
        content = json.loads((RESULTS / file).read_text())
        gpu = find_gpu(spec, "--device-spec") if spec is not None else gpu_called(content["device"])
        assert gpu is not None, content["device"]
        for row in content["rows"]:
            work, form = Work(**row["work"]), "streamed" if row["slots"] else "whole"
            fitted = work.fitted or (row["group"], work.token_budget) in FITTED_LATER
            own = {"form": form, "gpus": 1, "gpu": gpu.name, "file": file, "group": row["group"], "fitted": fitted}
            lengths = "-".join(map(str, work.lengths)) if isinstance(work.lengths, list | tuple) else work.lengths
            what = f"{form:<9} {row['group']:<12} {work.jobs} x {work.batch_size} x {lengths}, {work.token_budget:,} tokens"
            found = _compared(own, what, predict_work(row, gpu, bases, directory), row["tokens_per_second"])
            if row is next(each for each in content["rows"] if each["group"] == row["group"]):  # later ones have what earlier jobs left
                found["bytes_error"] = found["bytes"] / row["peak_bytes"] - 1
                print(f"    bytes: {found['bytes_error']:+.1%}")
            yield found


def _compared(row: dict[str, Any], what: str, predicted: LayoutPlan, measured: float) -> dict[str, Any]:
    error = predicted.tokens_per_second / measured - 1
    print(f"{what}: predicted {predicted.tokens_per_second:,.0f}, measured {measured:,.0f} tokens/s: {error:+.1%}", flush=True)
    found = {"measured": measured, "tokens_per_second": predicted.tokens_per_second, "error": error}
    return row | found | {"bytes": predicted.unit.predicted_bytes}


def summary(rows: Sequence[dict[str, Any]], key: str) -> dict[str, float]:
    """Of absolute errors."""
    errors = np.abs([row[key] for row in rows if key in row and not row.get("fitted")])
    return {"points": len(errors), "median": float(np.median(errors)), "p95": float(np.quantile(errors, 0.95)), "most": float(errors.max())}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device-spec", help="of the short runs' GPU, as `tlora calibrate` writes it; default: the table of GPUs")
    parser.add_argument("--bases", type=Path, help="where outlines are kept; default: nowhere")
    parser.add_argument("--commit", help="what to call this code where there is no git")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        directory, bases = Path(name), Bases(args.bases or Path(name))
        rows = [*rows_of_works(args.device_spec, bases, directory), *rows_of_layouts(bases, directory)]
    facts = {"device_spec": args.device_spec, "time": summary(rows, "error"), "memory": summary(rows, "bytes_error")}
    print(facts)
    machine.write(args.json, {"benchmark": "plan_points", **machine.facts(torch.device("cpu"), args.commit), **facts, "rows": rows})


if __name__ == "__main__":
    main()
