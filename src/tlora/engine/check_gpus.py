"""The GPUs that a check is for, of this machine or of another one, alike or not, and what each of several would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tlora.engine.ranks.kinds import Gpus, gpus_of, place_on
from tlora.errors import CapacityError, ConfigError, ModelError
from tlora.job import LayoutSetting, RunSpec
from tlora.kernels.device import as_if_on, card_of, name_of
from tlora.planning.base_placement import BasePlacement, choose_form
from tlora.planning.job_work import choose_replicas, trained_tokens
from tlora.planning.memory import memory_limit
from tlora.planning.plan import RunPlan, place_job, plan_memory, settle
from tlora.planning.streaming import Machine, this_machine
from tlora.planning.work import known_here, predicted_seconds, rate_here
from tlora.shape.gpu_models import GpuModel, rated_as, speeds_of
from tlora.shape.work import TrainingRate
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import Memory


@dataclass(frozen=True)
class GpuCheck:
    """The predicted work of one of several GPUs: the jobs that it leads, their memory, how long they train and how fast
    (`planning/work.py`). `parts`: jobs that another rank leads, of which it computes some replicas; `longest_samples`: of those
    of which it has the shorter samples alone, the tokens up to which. `name`: where GPUs are of several
    kinds, or some of them hold jobs that others do not; then `limit_bytes` and `token_budget` are its own.
    """

    jobs: tuple[str, ...]
    predicted_bytes: int
    seconds: float
    tokens_per_second: float
    parts: tuple[str, ...] = ()
    longest_samples: Mapping[str, int] = field(default_factory=dict[str, int])
    name: str = ""
    limit_bytes: int = 0
    token_budget: int = 0


@dataclass(frozen=True)
class Devices:
    """`places`: one for each GPU, or process on a CPU; `elsewhere`: what they are where they are in another machine."""

    places: tuple[torch.device, ...]
    elsewhere: tuple[GpuModel, ...] = ()

    @property
    def place(self) -> torch.device:
        return self.places[0]

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def name(self) -> str:
        return " and ".join(dict.fromkeys(gpu.name for gpu in self.elsewhere)) or str(self.place)

    @contextmanager
    def on(self, number: int = 0) -> Iterator[None]:
        """Within it, what is planned is for GPU `number`."""
        if not self.elsewhere:
            yield
            return
        gpu = self.elsewhere[number]
        with as_if_on(gpu.name, gpu.capability, gpu.limit_bytes, gpu.fixed_work):
            yield

    @property
    def rate(self) -> TrainingRate:
        """Of the first."""
        return self.elsewhere[0].rate if self.elsewhere else rate_here(self.place)

    @property
    def rated_as(self) -> str:
        """What predicted speeds are those of; "" on a CPU."""
        if self.elsewhere:
            return ", and ".join(dict.fromkeys(speeds_of(gpu) for gpu in self.elsewhere))
        here = known_here(self.place)
        if here.model is None:
            return ""
        return speeds_of(here.model) if here.measured else rated_as(name_of(self.place), card_of(self.place) is None)

    def machine(self, layout: LayoutSetting) -> Machine:
        if not self.elsewhere:
            return this_machine(self.place, layout)
        gpu = self.elsewhere[0]
        return Machine(lambda: gpu.link_gb_per_second * 1e9, gpu.rate, True)

    def gpus(self, run: RunSpec, first_limit: int) -> Gpus:
        """As the ranks of a run report them. `first_limit`: bytes that may be planned for on the first."""
        found = dict[int, Memory]()
        for number, place in enumerate(self.places):
            with self.on(number):
                limit = memory_limit(place, run.memory_limit) if number and place.type == "cuda" else first_limit
                name = name_of(place) if place.type == "cuda" else place.type
                flops = self.elsewhere[number].flops if self.elsewhere else rate_here(place).flops
            found[number] = Memory((limit,), name, flops=flops or 0.0)
        return gpus_of(found, self.count)


def check_gpus(run: RunSpec, plan: RunPlan, model: SuperModel, where: Devices, problems: list[str]) -> dict[str, Any]:
    """Fields of a RunCheck, and the "plan" of each GPU. A base that fits in no form is one of the `problems`."""
    gpus = where.gpus(run, plan.limit_bytes)
    try:
        here = gpus.limits, run.links != "host", gpus.speeds, where.elsewhere or gpus.models
        form = choose_form(run, plan.jobs, model, model.base.num_bytes, where.place, *here)
    except (CapacityError, ConfigError, ModelError) as error:
        problems.append(str(error))
        return {}
    seconds = predicted_seconds(plan.jobs, model, where.place, where.rate)  # of jobs whose problems are those of the largest GPU by now
    unlike = len(gpus.kinds) > 1 or bool(form.holders.whole)
    replicas = choose_replicas(plan.jobs, seconds, where.count, run.deterministic)
    placement, _ = place_on(gpus, seconds, replicas, form.holders, run.deterministic, {})
    for job in plan.jobs:
        job.span = placement.spans.get(job.spec.name)
    trained = [frozenset((*names, *placement.parts(gpu))) for gpu, names in enumerate(placement.jobs)]
    own = _plans_of_unlike(run, form, model, where, gpus, trained) if unlike and not form.stages else []
    planned = settle(run, form.plan, form.plan.memory, where.place)
    tokens = {job.spec.name: trained_tokens(job) for job in plan.jobs}
    found: list[GpuCheck] = []
    for gpu, (names, needed) in enumerate(zip(placement.jobs, placement.seconds, strict=True)):
        each = own[gpu] if own else replace(planned, here=trained[gpu])
        shares = {name: placement.spans[name].part(gpu) if name in placement.spans else 1.0 for name in trained[gpu]}
        computed = sum(tokens[name] * share for name, share in shares.items())
        rate = computed / needed if needed else 0.0
        checked = GpuCheck(names, each.total_bytes(list(each.resident)), needed, rate, placement.parts(gpu), placement.longest_samples(gpu))
        if unlike:
            checked = replace(checked, name=gpus.names[gpu], limit_bytes=each.limit_bytes, token_budget=each.token_budget)
        found.append(checked)
    return {"plan": planned, "gpus": tuple(found), "form": form.why, "placement": placement.told}


def _plans_of_unlike(
    run: RunSpec, form: BasePlacement, model: SuperModel, where: Devices, gpus: Gpus, here: list[frozenset[str]]
) -> list[RunPlan]:
    """Of each GPU, with the kernels, the memory and the cost of a token that it has, and without the jobs for which it has no room."""
    jobs, base_bytes = form.plan.jobs, form.plan.memory.base_bytes
    found = list[RunPlan]()
    for number, (place, limit) in enumerate(zip(where.places, gpus.limits, strict=True)):
        for job in jobs:
            place_job(job, job.span, number, number not in form.holders.whole.get(job.spec.name, (number,)))
        with where.on(number):
            found.append(plan_memory(run, jobs, model, base_bytes, place, limit, here[number]))
    for job in jobs:
        place_job(job, job.span, job.span.lead_rank if job.span is not None else 0, False)
    return found
