"""The last stage's side of a pipeline: what the group there tells the stages before it, and the whole gradients that come of theirs.

An adapter's weights, moments and optimizer are here alone. A stage before has the weights of its own layers, computes the sums of their
gradients, and sends these when the last micro-batch of a job's global batch has gone back through it: then the job's gradient is whole, as
if one process had computed it, and so are its norm, its step and its bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from tlora.adapters.state import AdapterLayout
from tlora.batching.flow import Kind
from tlora.batching.recompute_plan import RecomputePlan
from tlora.engine.messages import StageBatch, StageChange, StageOrder, StageRow
from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.group.exchange import RunningSums, SummedGradient
from tlora.group.pipeline import Pipeline, StageFailure
from tlora.job import JobSpec
from tlora.objectives import objective_of
from tlora.shape.stages import LayerRange
from tlora.sharing.channel import InterruptedWaitError
from tlora.sharing.peers import Peers
from tlora.supermodel.batch import BatchRow
from tlora.supermodel.load import layers_of
from tlora.supermodel.stage import Stage, stage_of
from tlora.supermodel.supermodel import SuperModel

if TYPE_CHECKING:
    from tlora.engine.session import Loaded

_PADDING = 128  # tokens of a micro-batch beyond its budget, at most
_LOOK_SECONDS = 0.0001  # between two looks at what other stages have sent, where there is nothing else to do


def meet_early_stages(peers: Peers, loaded: Loaded, device: torch.device, through_host: bool) -> StageLinks:
    """The last stage's links. It says what goes through them (`early_stage.meet_last_stage`). Raises RankError."""
    plan, model = loaded.plan, loaded.model
    adapter = max((job.layout.numel for job in plan.jobs if job.layout is not None), default=1)
    compares = any((objective := objective_of(job.spec)) is not None and objective.needs_reference for job in plan.jobs)
    tokens, width = (max(plan.token_budget, plan.longest) + _PADDING) * (1 + compares), model.base.head.weight_VH.shape[1]
    peers.exchange("sizes", [tokens, adapter, loaded.threads])
    return StageLinks(peers, StageSizes(tokens, width, adapter, model.bank.dtype, model.bank.sum_dtype), device, through_host)


class StageError(RuntimeError):
    """A stage before the last has failed."""


@dataclass
class _Due:
    """Gradients that the stages before will send: of the job's global batch, or of a replica's part of it."""

    job_id: str
    sizes: dict[int, int]
    wanted: bool = True


class StagePipeline(Pipeline):
    """Of the last stage, which computes with `model`. `ranges`: the layers of each rank. `send` takes orders to all stages before."""

    def __init__(self, model: SuperModel, links: StageLinks, ranges: Sequence[LayerRange], send: Callable[[StageOrder], None]) -> None:
        layers = layers_of(model.base.decoder)
        self._stages: dict[int, Stage] = {rank: stage_of(layers, model.model, ranges[rank]) for rank in range(links.last)}
        self._model, self._links, self._send = model, links, send
        self.depth = links.count
        model.passes.upstream = self
        self._changes = self._announced = 0
        self._entered: set[str] = set()
        self._due: deque[_Due] = deque()
        self._arrived: dict[str, deque[dict[int, Tensor]]] = {}
        self._come: list[str] = []  # jobs of those that have arrived, until they are told
        self.recompute(model.recompute)

    # -- what the stages before are told -------------------------------------------------------------------------------

    def announce(
        self, kind: Kind, rows: Sequence[BatchRow], pad_to: int, most_tokens: int, compared: Collection[str], through: Sequence[str]
    ) -> None:
        told = tuple(StageRow(row.job_id, tuple(row.input_ids.tolist()), row.lengths, row.normalizer, row.dropout_key) for row in rows)
        trains = kind == "train"
        self._send(StageBatch(trains, told, pad_to, most_tokens, tuple(compared), tuple(through) if trains else ()))
        self._announced += 1
        for job_id in through if trains else ():
            layout = self._layout(job_id)
            self._due.append(_Due(job_id, {rank: stage.own(layout).numel for rank, stage in self._stages.items()}))

    def enter(self, spec: JobSpec, total_steps: int) -> None:
        self._entered.add(spec.name)
        self._change(StageChange("enter", spec.name, spec, total_steps))
        self._send_flat(spec.name, self._model.state(spec.name).params)
        self._wait_obeyed()

    def set_reference(self, job_id: str, params_P: Tensor) -> None:
        self._change(StageChange("reference", job_id))
        self._send_flat(job_id, params_P)
        self._wait_obeyed()

    def _wait_obeyed(self) -> None:
        """Raises the error of a stage that cannot; all others go on then, with the gradients that they have."""
        try:
            self._links.wait_obeyed(self._changes)
        except InterruptedWaitError:
            error = self._error()
            while self._due:  # all have been sent: the stream was settled before
                self._arrive(self._due.popleft())
            self._resume("go on")
            raise error from None

    def updated(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._change(StageChange("weights", job_id))
            self._send_flat(job_id, self._model.state(job_id).params)

    def leave(self, job_id: str) -> None:
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
        self._due.clear()
        self._arrived.clear()
        self._come.clear()

    def _resume(self, how: Literal["begin anew", "go on"]) -> None:
        epoch = self._links.call_anew()
        self._change(StageChange(how, epoch=epoch))
        self._links.begin_anew(epoch)
        self._announced = 0

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

    def _send_flat(self, job_id: str, flat_P: Tensor) -> None:
        """To each stage the part of its layers."""
        layout = self._layout(job_id)
        for rank, stage in self._stages.items():
            self._links.weights[rank].send(torch.cat([flat_P[place] for place in stage.places(layout)] or [flat_P[:0]]))

    def _layout(self, job_id: str) -> AdapterLayout:
        return self._model.state(job_id).layout

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
        said = f"GPU {failed.rank}: {failed.reason}"
        return torch.OutOfMemoryError(said) if failed.out_of_memory else StageError(said)

    # -- what they send ------------------------------------------------------------------------------------------------

    @property
    def awaits(self) -> bool:
        """Whether gradients are on their way."""
        return bool(self._due or self._arrived)

    def look(self) -> list[str]:
        """Jobs of which gradients of all stages have come since the last call."""
        while self._due and all(channel.has_next for channel in self._links.slices.values()):
            self._arrive(self._due.popleft())
        come, self._come = self._come, []
        return come

    def _arrive(self, due: _Due) -> None:
        links = self._links
        parts = {rank: links.slices[rank].receive((size,), links.sizes.sum_dtype, links.device) for rank, size in due.sizes.items()}
        if due.wanted:
            self._arrived.setdefault(due.job_id, deque()).append(parts)
            self._come.append(due.job_id)

    def fill_in(self, job_id: str, gradient_P: Tensor) -> bool:
        """Put the parts of all stages into the gradient of the job's oldest replica that awaits them. False where they have not come."""
        arrived = self._arrived.get(job_id)
        if not arrived:
            return False
        parts, layout = arrived.popleft(), self._layout(job_id)
        if not arrived:
            del self._arrived[job_id]
        for rank, stage in self._stages.items():
            end = 0
            for place in stage.places(layout):
                start, end = end, end + place.stop - place.start
                gradient_P[place] = parts[rank][start:end]
        return True

    def drop(self, job_id: str) -> None:
        """The job has left: what is on its way of it is not wanted."""
        self._arrived.pop(job_id, None)
        for due in self._due:
            due.wanted &= due.job_id != job_id


class StageExchange(RunningSums):
    """The exchange of the last stage: a gradient is whole when the stages before have sent theirs."""

    def __init__(self, pipeline: StagePipeline) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._own: dict[str, deque[tuple[int, Tensor]]] = {}  # of this stage's layers, by replica; the others' are zero

    def give(self, job_id: str, step: int, replica: int, gradient_P: Tensor) -> None:
        self._own.setdefault(job_id, deque()).append((replica, gradient_P))

    def take(self, job_id: str, step: int, replicas: Sequence[int]) -> SummedGradient | None:
        own = self._own.get(job_id, deque())
        while own and self._pipeline.fill_in(job_id, own[0][1]):
            replica, gradient_P = own.popleft()
            super().give(job_id, step, replica, gradient_P)
        if own:
            return None
        self._own.pop(job_id, None)
        return super().take(job_id, step, replicas)

    @property
    def has_news(self) -> bool:  # type: ignore[override]
        """Nothing wakes the group when gradients come: it looks, as long as any are due."""
        return self._pipeline.awaits

    def news(self) -> list[str]:
        come = self._pipeline.look()
        if not come and self._pipeline.awaits:
            time.sleep(_LOOK_SECONDS)
        return come

    def forget(self, job_id: str) -> None:
        super().forget(job_id)
        self._own.pop(job_id, None)

    def leave(self, job_id: str, failed: str = "") -> None:
        super().leave(job_id, failed)
        self._pipeline.drop(job_id)
