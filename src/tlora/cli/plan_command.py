"""`tlora plan`: every layout of a jobs file on given GPUs, with what it is predicted to reach. Loads no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlora.cli.terminal import close_stdin, keep_interrupts, note, open_console, say_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tlora.data.prepare import PrepareProgress
    from tlora.job import RunSpec
    from tlora.planning.layout_units import Device
    from tlora.planning.planned_job import PlannedJob
    from tlora.shape.gpu_models import GpuModel


def plan(
    jobs_file: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The jobs file: base model, defaults, jobs.", show_default=False)],
    gpus: Annotated[
        int | None, typer.Option(metavar="N", help="How many GPUs to plan for.", show_default="those here, or one of each --gpu")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="rtx4090[,rtx3090]", help="Models of GPU, which need not be here: as many of each, in this order.", show_default=False
        ),
    ] = None,
    device_spec: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A model of GPU as a JSON file describes it.", show_default=False)
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Say why each other layout is slower or not feasible.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the file, such as defaults.r=8.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """List every layout of the run on given GPUs, the fastest first, with predicted tokens/s, memory and exposed seconds."""
    from tlora.cli.plan_gpus import asked_gpus
    from tlora.jobs_file import read_jobs_file

    models = asked_gpus(gpus, gpu, device_spec, note)
    run = read_jobs_file(jobs_file, settings or [])
    close_stdin()
    with keep_interrupts():
        from tlora.cli.plan_view import plan_json, print_plan
        from tlora.planning.layouts import no_layout, plan_layouts
    devices, jobs = _look(run, models)
    if problems := [f"{job.spec.name}: {problem}" for job in jobs for problem in job.problems]:
        for problem in problems:
            say_error(problem)
        raise typer.Exit(2)
    found = plan_layouts(run, jobs, devices)
    if as_json:
        open_console().print(plan_json(run, jobs, devices, found), soft_wrap=True)
    elif found.feasible or explain:
        print_plan(open_console(), run, jobs, devices, found, explain)
    if not found.feasible:
        raise no_layout(run, jobs, devices, found)


def _look(run: RunSpec, models: Sequence[GpuModel]) -> tuple[list[Device], tuple[PlannedJob, ...]]:
    """What the base takes on each GPU, counted by a process with torch where it was not before, and the jobs with their data."""
    from tlora.cache_directory import cache_dir, open_caches
    from tlora.data.base_download import fetch_base
    from tlora.data.prepare import prepare
    from tlora.data.request import prepare_requests
    from tlora.planning.job_sketch import largest_adapter, sketch_jobs
    from tlora.planning.layout_units import Device
    from tlora.service.base_shapes import Precision, find_outline

    open_caches(note)
    rank, experts = largest_adapter(run.jobs)
    held = Precision(
        run.dtype, run.base_precision, unused_weights=run.unused_weights, rank=rank, adapts_experts=experts, deterministic=run.deterministic
    )
    shapes = {
        model: find_outline(cache_dir() / "bases", run.base_model, replace(held, gpu=model.name, capability=model.capability))
        for model in dict.fromkeys(models)
    }
    fetch_base(run.base_model, note, weights=False)
    shape = shapes[models[0]]

    def tell(seen: PrepareProgress) -> None:
        if seen.rows:
            note(f"tokenizing {seen.key}: {seen.rows:,} rows, {seen.share:.0%}")

    data = prepare(prepare_requests(run, shape.vocab_size), tell)
    limit = run.memory_limit if run.memory_limit != "auto" else None
    devices = [Device(model, shapes[model].parts, min(model.limit_bytes, limit or model.limit_bytes)) for model in models]
    return devices, sketch_jobs(run, shape, data)
