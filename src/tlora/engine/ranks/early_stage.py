"""A stage before the last one: it computes what the last stage announces, one forward one backward, and steps the adapters of its layers.

A gradient that has come goes back before another micro-batch goes forward; `most_open` are between the two. When a job's
global batch is through here its gradient is measured, and the last stage, which judges that of all stages, says how to step. Whatever
fails here is said by a word that the last stage sees; it then calls all to begin anew.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tlora.adapters.state import AdapterState
from tlora.batching.pipeline_model import most_open
from tlora.batching.recompute_plan import RecomputePlan
from tlora.engine.messages import StageBatch, StageChange, Stop
from tlora.engine.ranks.stage_links import StageLinks, StageSizes
from tlora.errors import RankError
from tlora.group.exchange import RunningSums
from tlora.group.isolation import Failure, is_out_of_memory
from tlora.link.log import note
from tlora.sharing.channel import InterruptedWaitError
from tlora.sharing.peers import Peers
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.optimizer_steps import PartStep
from tlora.supermodel.supermodel import SuperModel

Back = Callable[[Tensor], object]
_PASSING = ("check", "step", "state")  # changes that may pass micro-batches


@dataclass(frozen=True)
class _Open:
    """A micro-batch that has gone forward: the tokens of each of its passes that a gradient comes of, and what takes that."""

    number: int
    jobs: frozenset[str]
    through: tuple[str, ...]
    replicas: tuple[str, ...]
    passes: deque[tuple[int, Back | None]]


def meet_last_stage(peers: Peers, model: SuperModel, through_host: bool) -> tuple[StageLinks, int | None]:
    """The links of a stage before the last, and the CPU threads to compute with, as the last stage has planned them. Raises RankError."""
    tokens, adapter, threads = peers.exchange("sizes", None)[-1]
    sizes = StageSizes(tokens, model.base.head.weight_VH.shape[1], adapter, model.bank.dtype, model.bank.sum_dtype)
    return StageLinks(peers, sizes, model.device, through_host), threads


class EarlyStage:
    """`inbox` has the orders of the last stage, and a Stop at the end."""

    def __init__(self, model: SuperModel, links: StageLinks, inbox: queue.SimpleQueue[Any]) -> None:
        self._model, self._links, self._inbox = model, links, inbox
        self._open: deque[_Open] = deque()
        self._most_open = most_open(links.rank, links.count)
        self._obeyed = self._through = self._begun = 0
        self._entered: set[str] = set()
        self._sums = RunningSums()  # of jobs in the midst of their replicas
        self._summed: set[str] = set()  # those jobs
        self._steps: dict[str, PartStep] = {}  # measured, and not taken yet
        self._failed_in = -1  # the epoch
        self._at = 0  # the number of the micro-batch that is computed
        self._waiting: deque[Any] = deque()  # taken from the inbox, and not obeyed yet
        if links.hidden_in is not None:
            model.passes.upstream = links

    def run(self) -> None:
        """Until a Stop. Raises RankError for a stage that has ended."""
        while True:
            try:
                if not self._turn():
                    return
            except InterruptedWaitError:
                self._begin_anew()
            except RankError:
                raise
            except Exception as error:
                self._fail(error)
                self._begin_anew()

    def _fail(self, error: Exception) -> None:
        if self._failed_in == self._links.epoch:
            return
        self._failed_in = self._links.epoch
        note(f"this stage has failed: {type(error).__name__}: {error}")
        self._links.fail(self._at, Failure(error).reason, is_out_of_memory(error))

    def _turn(self) -> bool:
        """One thing that is due: a backward, else the next order. False: stop."""
        links = self._links
        assert links.gradient_in is not None
        if self._open and links.gradient_in.has_next:
            self._go_back()
            return True
        if not self._waiting and self._inbox.empty():
            links.patience.until(lambda: not self._inbox.empty() or bool(self._open and self._can_go_back), links.last)
            return True
        order = self._waiting[0] if self._waiting else self._inbox.get()
        if order is None or isinstance(order, Stop):
            return False
        if isinstance(order, StageBatch) and len(self._open) >= self._most_open:
            if not self._waiting:
                self._waiting.append(order)
            return self._look_behind()
        if self._waiting:
            self._waiting.popleft()
        if isinstance(order, StageBatch):
            self._at, self._begun = self._begun, self._begun + 1  # before anything of it can fail
            self._go_forward(order)
        elif isinstance(order, StageChange) and order.epoch > links.epoch:
            self._resume(order)
        elif isinstance(order, StageChange):
            self._change(order)
        return True

    def _look_behind(self) -> bool:
        """While a micro-batch may not go forward yet. A step or a state that is ordered after it is of a job that has no samples in it, and
        does not wait for it: the last stage may be waiting for that. False: stop.
        """
        self._links.patience.until(lambda: self._can_go_back or not self._inbox.empty(), self._links.rank + 1)
        if self._can_go_back:
            return True
        order = self._inbox.get()
        if order is None or isinstance(order, Stop):
            return False
        before = {each.job_id for each in self._waiting if isinstance(each, StageChange)}
        if isinstance(order, StageChange) and order.what in _PASSING and order.job_id not in before:
            self._change(order)
        else:
            self._waiting.append(order)
        if isinstance(order, StageChange) and order.epoch > self._links.epoch:
            raise InterruptedWaitError
        return True

    @property
    def _can_go_back(self) -> bool:
        assert self._links.gradient_in is not None
        return self._links.gradient_in.has_next

    def _go_forward(self, order: StageBatch) -> None:
        assert self._links.hidden_out is not None
        if strangers := {row.job_id for row in order.rows} - self._entered:
            raise RuntimeError(f"samples of {', '.join(sorted(strangers))}, which has not entered this stage")
        rows = [
            BatchRow(row.job_id, ids := np.array(row.input_ids), np.ones(len(ids)), row.normalizer, row.dropout_key, row.lengths)
            for row in order.rows
        ]
        batch = collate(rows, self._model.device, order.pad_to, order.most_tokens)
        opened = _Open(self._at, frozenset(row.job_id for row in order.rows), order.through, order.replicas, deque())
        for each in self._model.stage_passes(batch, order.compared, order.trains):
            hidden_TH, back = each.run()
            self._links.hidden_out.send(hidden_TH.contiguous())
            if each.goes_back:
                opened.passes.append((len(hidden_TH), back))
            del hidden_TH, back
        if order.trains:
            self._open.append(opened)
        else:
            self._note_through()

    def _go_back(self) -> None:
        links, opened = self._links, self._open.popleft()
        self._at = opened.number
        assert links.gradient_in is not None
        while opened.passes:
            tokens, back = opened.passes.popleft()
            gradient_TH = links.gradient_in.receive((tokens, links.sizes.width), links.sizes.hidden_dtype, links.device)
            if back is not None:
                back(gradient_TH)
        for job_id in filter(self._model.has, opened.replicas):
            self._add(job_id)
        for job_id in filter(self._model.has, opened.through):
            self._measure(job_id)
        self._note_through()

    def _add(self, job_id: str) -> None:
        """A replica's gradient to those of the replicas before, as one process adds them."""
        self._sums.give(job_id, 0, 0, self._model.gradient(job_id))
        self._summed.add(job_id)
        self._model.zero_grad_of(job_id)

    def _measure(self, job_id: str) -> None:
        if job_id in self._summed:
            self._add(job_id)
            self._summed.discard(job_id)
            summed = self._sums.take(job_id, 0, ())
            assert summed is not None
            self._model.set_gradient(job_id, summed.gradient_P)
        self._steps[job_id] = step = self._model.begin_step(job_id)
        self._links.measures[self._links.rank].send(step.measured_RE)

    def _forget_gradients(self) -> None:
        for job_id in self._model.bank.jobs():
            self._model.zero_grad_of(job_id)
            self._sums.forget(job_id)
        self._summed.clear()
        self._steps.clear()

    def _note_through(self) -> None:
        self._through += 1
        self._links.note_through(self._through)

    # -- changes -------------------------------------------------------------------------------------------------------

    def _change(self, change: StageChange) -> None:
        try:
            self._make(change)
        except Exception as error:
            self._fail(error)  # before it counts as obeyed: the last stage waits for that
            raise
        finally:
            self._obeyed += 1
            self._links.note_obeyed(self._obeyed)

    def _make(self, change: StageChange) -> None:
        model, job_id = self._model, change.job_id
        match change.what:
            case "enter":
                self._enter(change)
            case "reference" if model.has(job_id):
                model.set_reference(job_id, self._receive(model.state(job_id).layout.numel))
            case "check" if model.has(job_id):
                self._links.checks[self._links.rank].send(self._steps[job_id].check(change.clip))
            case "step" if model.has(job_id):
                self._step(change)
            case "state" if model.has(job_id):
                state = model.state(job_id)
                for values in (state.params, state.exp_avg, state.exp_avg_sq):
                    for stretch in values.split(change.stretches[self._links.rank]):
                        self._links.send_flat(self._links.rank, stretch)
            case "reference" | "check" | "step" | "state":
                pass  # it adapts other stages' layers alone
            case "leave":
                while any(job_id in opened.jobs for opened in self._open):
                    self._links.patience.until(lambda: self._can_go_back, self._links.rank + 1)
                    self._go_back()
                self._entered.discard(job_id)
                self._steps.pop(job_id, None)
                self._sums.leave(job_id)
                self._summed.discard(job_id)
                if model.has(job_id):
                    model.leave(job_id)
            case "recompute":
                model.recompute = RecomputePlan(change.most_tokens)
            case _:
                raise AssertionError(f"{change} does not come in the stream")

    def _enter(self, change: StageChange) -> None:
        spec, stage = change.spec, self._model.base.stage
        assert spec is not None and stage is not None
        layout, (step, updates, skipped) = stage.own(self._model.layout(spec)), change.counters
        if layout.shapes:  # else it adapts other stages' layers alone
            params_P = self._receive(layout.numel)
            exp_avg, exp_avg_sq = (self._receive(layout.numel) if updates else torch.zeros_like(params_P) for _ in range(2))
            state = AdapterState(layout, params_P, exp_avg, exp_avg_sq, step, updates, skipped)
            self._model.join(spec.name, spec, spec, change.total_steps, state)
        self._entered.add(spec.name)

    def _step(self, change: StageChange) -> None:
        try:
            self._steps.pop(change.job_id).apply(0.0, change.clip, applied=change.applied)
        except BaseException:
            self._entered.discard(change.job_id)  # other stages have stepped: its next sample fails it
            raise

    def _receive(self, size: int) -> Tensor:
        flat_P = torch.empty(size, dtype=self._links.sizes.sum_dtype, device=self._links.device)
        self._links.receive_flat(self._links.rank, flat_P)
        return flat_P

    def _begin_anew(self) -> None:
        """Obey changes that were ordered before, drop micro-batches, and forget all gradients."""
        self._open.clear()
        orders, self._waiting = self._waiting, deque()
        while True:
            order = orders.popleft() if orders else self._inbox.get()
            if order is None or isinstance(order, Stop):
                self._inbox.put(order)
                return
            if isinstance(order, StageChange):
                if order.epoch > self._links.epoch:
                    self._resume(order)
                    return
                with suppress(Exception):  # said already: the last stage takes a job that cannot enter out again
                    self._change(order)

    def _resume(self, order: StageChange) -> None:
        """All ranks are at the beginning of a new epoch."""
        self._open.clear()
        if order.what == "begin anew":
            self._forget_gradients()
        self._through = self._begun = 0
        self._obeyed += 1
        self._links.note_obeyed(self._obeyed)
        self._links.begin_anew(order.epoch)
