"""The output of `tlora plan`: a table, the fastest layout first; with --explain why each other is slower or not feasible; or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from tlora.cli.terminal import bytes_text, open_table, print_table, printable
from tlora.job import RunSpec
from tlora.planning.layout_choice import LayoutChoice, choose_form
from tlora.planning.layout_units import Device
from tlora.planning.layouts import LEAST_GAIN, LayoutPlan, LayoutPlans, is_trained
from tlora.planning.planned_job import PlannedJob
from tlora.shape.gpu_models import speeds_of
from tlora.shape.memory import StreamedBytes
from tlora.wording.numbers import count_text, duration_text, quantity


def print_plan(
    console: Console, run: RunSpec, jobs: Sequence[PlannedJob], devices: Sequence[Device], found: LayoutPlans, explain: bool
) -> None:
    named = " and ".join(f"{len(list(alike))} x {name}" for name, alike in groupby(device.gpu.name for device in devices))
    console.print(
        Text(printable(f"{run.base_model}, {quantity(len(jobs), 'job')}, {named}: predicted, nothing was measured here")), soft_wrap=True
    )
    table = open_table()
    table.add_column("layout", overflow="fold")
    for name in ("tokens per micro-batch", "recomputed", "predicted peak", "exposed", "time", "tokens/s"):
        table.add_column(name, justify="right")
    for each in found.feasible:
        unit = each.unit
        table.add_row(
            str(each.layout),
            f"{unit.token_budget:,}",
            str(unit.recomputed_layers),
            f"{bytes_text(unit.predicted_bytes)} of {bytes_text(unit.limit_bytes)}",
            f"{unit.exposed_seconds:.3f} of {unit.micro_batch_seconds:.3f} s",
            duration_text(each.seconds),
            count_text(each.tokens_per_second),
        )
    if found.feasible:
        print_table(console, table)
        exposed = "Exposed: seconds of a full micro-batch in which a GPU waits for a link or for work."
        console.print(Text(f"{exposed} {_rated(devices)}"), soft_wrap=True)
    if (taken := choose_form(found.feasible, len(devices))) is not None:
        console.print(Text(described_choice(taken, found, len(devices))), soft_wrap=True)
    if not explain:
        return
    for each in found.feasible:
        console.print(Text(f"{each.layout}: {explained(each, found.feasible[0], devices)}"), soft_wrap=True)
    for refused in found.refused:
        console.print(Text(f"{refused.name}: not feasible: {refused.why}"), soft_wrap=True)


def described_choice(taken: LayoutChoice, found: LayoutPlans, gpus: int) -> str:
    """Which of them `tlora train` takes on these GPUs, and why where that is not the fastest or not the simplest."""
    able, why = [each for each in found.feasible if is_trained(each.layout, gpus)], taken.why
    if not why and taken.plan is not able[0]:
        why = f"no other on all of these GPUs is {LEAST_GAIN[able[0].layout.form]} times as fast, by prediction"
    told = f"tlora train takes {taken.plan.layout}{f': {why}' if why else ''}"
    if taken.plan is found.feasible[0] or found.feasible[0] in able:
        return told
    rule = f"a run on {gpus} GPUs uses all of them, stages in one pipeline, and streams to one GPU alone"
    return f"{told}. {found.feasible[0].layout} is listed before it, but not for such a run: {rule}"


def explained(each: LayoutPlan, best: LayoutPlan, devices: Sequence[Device]) -> str:
    """Its speed against the best's, and where the rest goes."""
    share = each.tokens_per_second / best.tokens_per_second if best.tokens_per_second else 1.0
    said = ["the fastest" if each is best else f"{share:.0%} of the fastest", *each.why]
    if each.unit.layers:
        said.append(f"layers {' + '.join(map(str, each.unit.layers))}, head and loss on the last stage")
    streamed = devices[0].parts.streamed
    if each.unit.slots and isinstance(streamed, StreamedBytes):
        on_gpu = f"{each.unit.slots} of {streamed.num_layers} layers at a time on the GPU"
        said.append(f"{on_gpu}, {bytes_text(streamed.host_bytes)} of the host's memory")
    return "; ".join(said)


def _rated(devices: Sequence[Device]) -> str:
    each = dict.fromkeys(speeds_of(device.gpu) for device in devices)
    return f"Speeds are {', and '.join(each)}."


def plan_json(run: RunSpec, jobs: Sequence[PlannedJob], devices: Sequence[Device], found: LayoutPlans) -> str:
    """One object: the run, its GPUs, `layouts` (the fastest first), `taken` (that of a run on all of them) and `refused`."""
    content: dict[str, Any] = {
        "base_model": run.base_model,
        "jobs": [job.spec.name for job in jobs],
        "gpus": [device.gpu.name for device in devices],
        "layouts": [_layout_json(each, found.feasible[0], devices) for each in found.feasible],
        "taken": str(taken.plan.layout) if (taken := choose_form(found.feasible, len(devices))) is not None else None,
        "refused": [{"layout": each.name, "why": each.why} for each in found.refused],
    }
    return json.dumps(content, indent=2, ensure_ascii=True)


def _layout_json(each: LayoutPlan, best: LayoutPlan, devices: Sequence[Device]) -> dict[str, Any]:
    layout, unit = each.layout, each.unit
    return {
        "form": layout.form,
        "replicas": layout.replicas,
        "stages": layout.stages,
        "weights": list(layout.weights),
        "gpus": list(each.gpus),
        "tokens_per_second": each.tokens_per_second,
        "seconds": each.seconds,
        "token_budget": unit.token_budget,
        "recomputed_layers": unit.recomputed_layers,
        "layers": list(unit.layers),
        "predicted_bytes": unit.predicted_bytes,
        "limit_bytes": unit.limit_bytes,
        "micro_batch_seconds": unit.micro_batch_seconds,
        "exposed_seconds": unit.exposed_seconds,
        "bubble": unit.bubble,
        "waiting_jobs": unit.waiting,
        "why": explained(each, best, devices),
    }
