"""The last stage's side of a pipeline: what the group there tells the stages before it.

Each stage has the adapters of its own layers with their moments, and steps them as is said here (`stage_steps.py`). The state of a whole
adapter is cut when its job enters, and put together on the host where it is saved or handed over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tlora.adapters.layout import AdapterLayout
from tlora.adapters.state import AdapterState, init_state
from tlora.batching.flow import Kind
from tlora.batching.pipeline_model import PADDING
from tlora.batching.recompute_plan import RecomputePlan
from tlora.engine.messages import StageBatch, StageChange, StageOrder, StageRow
from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.engine.ranks.stage_steps import StageSteps
from tlora.group.pipeline import Pipeline, StageFailure
from tlora.job import JobSpec
from tlora.objectives import objective_of
from tlora.shape.stages import LayerRange
from tlora.sharing.channel import InterruptedWaitError
from tlora.sharing.peers import Peers
from tlora.supermodel.batch import BatchRow
from tlora.supermodel.load import layers_of
from tlora.supermodel.optimizer_steps import DueSteps
from tlora.supermodel.stage import AdapterCut, stage_of
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import place_names

if TYPE_CHECKING:
    from tlora.engine.session import Loaded


def meet_early_stages(peers: Peers, loaded: Loaded, device: torch.device, through_host: bool) -> StageLinks:
    """The last stage's links. It says what goes through them (`early_stage.meet_last_stage`). Raises RankError."""
    plan, model = loaded.plan, loaded.model
    adapter = max((job.layout.numel for job in plan.jobs if job.layout is not None), default=1)
    compares = any((objective := objective_of(job.spec)) is not None and objective.needs_reference for job in plan.jobs)
    tokens, width = (max(plan.token_budget, plan.longest) + PADDING) * (1 + compares), model.base.head.weight_VH.shape[1]
    peers.exchange("sizes", [tokens, adapter, loaded.threads])
    return StageLinks(peers, StageSizes(tokens, width, adapter, model.bank.dtype, model.bank.sum_dtype), device, through_host)


class StageError(RuntimeError):
    """A stage before the last has failed."""


class StagePipeline(Pipeline):
    """Of the last stage, which computes with `model`. `ranges`: the layers of each rank. `send` takes orders to all stages before."""

    def __init__(self, model: SuperModel, links: StageLinks, ranges: Sequence[LayerRange], send: Callable[[StageOrder], None]) -> None:
        layers = layers_of(model.base.decoder)
        self._stages = [stage_of(layers, model.model, each) for each in ranges]
        self._model, self._links, self._send = model, links, send
        self._cuts: dict[str, AdapterCut] = {}
        self._coming: dict[str, AdapterState] = {}  # whole, of jobs that are about to enter
        self._steps = StageSteps(model, links, self._cuts, self._change)
        self.depth = links.count
        model.passes.upstream = self
        self._changes = self._announced = 0
        self._entered: set[str] = set()
        self.recompute(model.recompute)

    # -- what the stages before are told -------------------------------------------------------------------------------

    def announce(
        self,
        kind: Kind,
        rows: Sequence[BatchRow],
        pad_to: int,
        most_tokens: int,
        compared: Collection[str],
        through: Mapping[str, bool],
    ) -> None:
        told = tuple(StageRow(row.job_id, tuple(row.input_ids.tolist()), row.lengths, row.normalizer, row.dropout_key) for row in rows)
        trains = kind == "train"
        whole = tuple(job_id for job_id, ends in through.items() if ends and trains)
        replicas = tuple(job_id for job_id, ends in through.items() if not ends and trains)
        self._send(StageBatch(trains, told, pad_to, most_tokens, tuple(compared), whole, replicas))
        self._announced += 1
        self._steps.announced(whole)

    def cut(self, spec: JobSpec, state: AdapterState | None) -> AdapterState:
        if state is None:
            state = init_state(self._model.layout(spec), spec.seed, self._model.bank.sum_dtype)
        self._cuts[spec.name], self._coming[spec.name] = AdapterCut(state.layout, self._stages), state
        return self._cuts[spec.name].state(self._links.last, state)

    def enter(self, spec: JobSpec, total_steps: int) -> None:
        self._entered.add(spec.name)
        whole = self._coming.pop(spec.name)
        self._change(StageChange("enter", spec.name, spec, total_steps, (whole.step, whole.updates, whole.skipped)))
        self._send_parts(spec.name, [whole.params, *([whole.exp_avg, whole.exp_avg_sq] if whole.updates else [])])
        self._wait_obeyed()

    def set_reference(self, job_id: str, params_P: Tensor) -> Tensor:
        self._change(StageChange("reference", job_id))
        self._send_parts(job_id, [params_P])
        self._wait_obeyed()
        return self._cuts[job_id].take(self._links.last, params_P)

    def state(self, job_id: str) -> AdapterState:
        """In the host's memory."""
        own, cut = self._model.state(job_id), self._cuts[job_id]
        *places, own_places = (cut.places(rank) for rank in range(self._links.count))
        lengths = tuple(tuple(place.stop - place.start for place in each) for each in places)
        self._change(StageChange("state", job_id, stretches=lengths))
        whole = [torch.empty(cut.layout.numel, dtype=own.params.dtype) for _ in range(3)]
        for rank, each in enumerate(places):
            for values, place in product(whole, each):
                self._links.receive_flat(rank, values[place])
        for values, own_P in zip(whole, (own.params, own.exp_avg, own.exp_avg_sq), strict=True):
            for place, part in zip(own_places, own_P.split([place.stop - place.start for place in own_places]), strict=True):
                values[place] = part
        return AdapterState(cut.layout, whole[0], whole[1], whole[2], own.step, own.updates, own.skipped)

    def _wait_obeyed(self) -> None:
        """Raises the error of a stage that cannot; all others go on then, with the gradients that they have."""
        try:
            self._links.wait_obeyed(self._changes)
        except InterruptedWaitError:
            error = self._error()
            self._steps.collect()  # the stream was settled before
            self._resume("go on")
            raise error from None

    def drop(self, job_id: str) -> None:
        self._coming.pop(job_id, None)
        self._cuts.pop(job_id, None)
        self._steps.drop(job_id)
        if job_id in self._entered:
            self._entered.discard(job_id)
            self._change(StageChange("leave", job_id))

    def recompute(self, plan: RecomputePlan) -> None:
        self._change(StageChange("recompute", most_tokens=plan.most_tokens))

    def settle(self) -> None:
        with self._telling():
            self._links.wait_through(self._announced)

    def seconds(self) -> float:
        return time.monotonic()

    @property
    def failure(self) -> StageFailure | None:
        failed = self._links.failed
        return None if failed is None else StageFailure(max(0, self._announced - 1 - failed.at), self._error())

    def begin_anew(self) -> None:
        """Returns when all stages have dropped what they had."""
        self._resume("begin anew")
        self._steps.begin_anew()

    def _resume(self, how: Literal["begin anew", "go on"]) -> None:
        epoch = self._links.call_anew()
        self._change(StageChange(how, epoch=epoch))
        self._links.begin_anew(epoch)
        self._announced = 0

    # -- optimizer steps -----------------------------------------------------------------------------------------------

    def measure(self, job_ids: Sequence[str]) -> None:
        self._steps.measure(job_ids)

    @property
    def measured(self) -> bool:
        return self._steps.ready

    def due(self) -> DueSteps:
        return self._steps

    @property
    def awaits(self) -> bool:
        return self._steps.awaits

    def wait_for_steps(self, *, computes: bool) -> None:
        arrived = self._links.hidden_in
        assert arrived is not None
        with suppress(InterruptedWaitError):
            self._links.patience.until(
                lambda: self._steps.ready or not self._steps.awaits or (computes and arrived.has_next), self._links.last - 1
            )

    # -- `Upstream` ----------------------------------------------------------------------------------------------------

    def receive(self, tokens: int) -> Tensor:
        with self._telling():
            return self._links.receive(tokens)

    def send_back(self, gradient_TH: Tensor) -> None:
        with self._telling():
            self._links.send_back(gradient_TH)

    def _change(self, change: StageChange) -> None:
        self._send(change)
        self._changes += 1

    def _send_parts(self, job_id: str, whole: Sequence[Tensor]) -> None:
        """To each stage, of each of these flat vectors, the part of its layers."""
        for rank, _ in self._early_parts(job_id):
            for values in whole:
                self._links.send_flat(rank, self._cuts[job_id].take(rank, values))

    def _early_parts(self, job_id: str) -> list[tuple[int, AdapterLayout]]:
        """Of the stages before this one that have any."""
        return [(rank, part) for rank, part in enumerate(self._cuts[job_id].parts[:-1]) if part.shapes]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Raises the error of a stage that has failed meanwhile."""
        try:
            yield
        except InterruptedWaitError:
            raise self._error() from None

    def _error(self) -> Exception:
        """Of the stage that has failed, as what it is."""
        failed = self._links.failed
        assert failed is not None, "no stage has failed"
        said = f"{place_names(self._model.device.type)[0]} {failed.rank}: {failed.reason}"
        return torch.OutOfMemoryError(said) if failed.out_of_memory else StageError(said)
