"""Which of the predicted layouts a run takes: the one rule of `tlora train`, `check` and `plan`. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tlora.job import RunSpec
from tlora.planning.layout_units import Device, OneGpu
from tlora.planning.layouts import LayoutPlan, is_trained, pays, plan_layouts
from tlora.planning.planned_job import PlannedJob
from tlora.shape.layout import FORMS, Form

_PREDICTED_FROM = 1024  # tokens of a micro-batch; what stages make of smaller ones is not known (docs/adr/041-nano-batches.md)


@dataclass(frozen=True)
class LayoutChoice:
    """`why` it is not the simplest, for a person; "" where it is."""

    plan: LayoutPlan
    why: str = ""

    @property
    def form(self) -> Form:
        return self.plan.layout.form


def choose_form(found: Collection[LayoutPlan], gpus: int, before: Form | None = None) -> LayoutChoice | None:
    """Of feasible layouts the one that a run on so many GPUs takes; None where there is none that it can.

    What stands is the form of an earlier run that is resumed (`before`), else the simplest: whole, shared, streamed, stages. The fastest of
    those that gain enough over it is taken, so that noise in what is predicted flips nothing.
    """
    able = [each for each in found if is_trained(each.layout, gpus)]
    stands = min(able, key=lambda each: (each.layout.form != before, FORMS.index(each.layout.form)), default=None)
    if stands is None:
        return None
    known = [each for each in able if each.layout.form != "stages" or each.unit.token_budget >= _PREDICTED_FROM]
    better = [each for each in known if pays(each.layout.form, each.seconds, stands.seconds)]
    best = min(better, key=lambda each: each.seconds, default=stands)
    if best is stands:
        return LayoutChoice(stands, f"as the run that is resumed: {stands.layout}" if stands.layout.form == before else "")
    return LayoutChoice(best, f"{stands.seconds / best.seconds:.2f} times as fast, by prediction, as {stands.layout}")


def predict_form(run: RunSpec, jobs: Sequence[PlannedJob], devices: Sequence[Device], before: Form | None = None) -> LayoutChoice | None:
    """`choose_form` of what is predicted for a run that is about to begin. Jobs with problems are left out, as they are not trained."""
    sound = [job for job in jobs if not job.problems and job.layout is not None and job.data is not None]
    if not sound:
        return None
    if before in (None, "whole"):
        whole = plan_layouts(run, sound, devices, ("whole",)).feasible
        if whole and not any(pays(form, _least_seconds(sound, devices), whole[0].seconds) for form in FORMS):
            return LayoutChoice(whole[0])  # however fast the others are
    return choose_form(plan_layouts(run, sound, devices, trained=True).feasible, len(devices), before)


def _least_seconds(jobs: Sequence[PlannedJob], devices: Sequence[Device]) -> float:
    """With ideal products on all GPUs, and all busy to the end."""
    first = devices[0]
    alone = sum(OneGpu(first, 0).seconds(job) for job in jobs)
    return alone * first.rate / sum(device.rate for device in devices)
