"""Runs one group of jobs: packs their flows into micro-batches, steps each job when its own batch is through, keeps trouble apart.

Commands come in (`join`, `leave`, `share`, `stop`), reports go out (`reports.py`); no file and no process is touched here. A job joins and
leaves between two micro-batches. The outcome of optimizer steps is read when the next micro-batch is under way, so that a GPU waits for it
only where an evaluation, a checkpoint or an end follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby

from tlora.adapters.state import AdapterState
from tlora.batching.pack import MicroBatch
from tlora.batching.recompute_plan import RecomputePlan
from tlora.group.exchange import Decisions, End, Exchange, RunningSums
from tlora.group.isolation import Failure, is_out_of_memory, try_call
from tlora.group.job_run import QUARANTINE_AFTER, BatchLosses, JobRun, Losses, Stepping
from tlora.group.nano_batching import NanoBatching
from tlora.group.pipeline import Pipeline, StageFailure
from tlora.group.reports import CheckpointDue, Computed, Ended, Evaluated, Listener, Noted, Status, Stepped
from tlora.group.stream import Stream
from tlora.group.token_budget import CALM, NO_LAYER, TokenBudget
from tlora.group.whole_gradients import EngineCalls, WholeGradients
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import quantity

_FORGIVEN = 3


class Engine:
    """A super-model with the jobs that share it now. `listen` hears the reports."""

    def __init__(
        self,
        model: SuperModel,
        token_budget: int,
        listen: Listener,
        smallest_budget: int = 1,
        decisions: Decisions | None = None,
        exchange: Exchange | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        """`smallest_budget`: tokens of the longest sample of any job that may still join; running out of memory stops at it, where all
        micro-batches recompute the same layers. `exchange`: where jobs have replicas on other ranks. `pipeline`: where the base has stages
        before the one of `model`.
        """
        self.runs: dict[str, JobRun] = {}
        self.model, self._budget, self._listen = model, TokenBudget(token_budget, model.recompute), listen
        self.decisions = decisions or Decisions()
        self._smallest_budget, self._unexplained, self._calm = smallest_budget, 0, 0
        self._weights: dict[str, float] = {}
        self._stepping: Stepping | None = None
        self._measured: deque[tuple[list[JobRun], Losses]] = deque()  # whose batches are through here, and their steps are to come
        self._exchange: Exchange = exchange or RunningSums()
        self._pipeline = pipeline or Pipeline(model)
        self.stream = Stream(model, self._pipeline, self.runs)
        self.nano_batching = NanoBatching(model, self._pipeline, self.runs, lambda line: listen(Noted(line)))
        own = EngineCalls(self._lower_budget, lambda run, reason: self._end(run, "failed", reason), self._set_reference, listen)
        self._gradients = WholeGradients(model, self._exchange, self.runs, own)

    def join(self, run: JobRun, state: AdapterState | None = None, wait: Callable[[str], object] | None = None) -> None:
        """Let a job in with `state` (default: a new adapter); it offers its first batch at once. A job that cannot join fails alone. Where
        others are in, and they leave too little memory, `wait` is called instead, with the reason; nothing has changed then.

        A job whose lead rank is another waits here for the state that it begins with, and is never reported.
        """
        name = run.spec.name
        self._drain()
        run.here = self._exchange.replicas_here(name, run.replicas)
        joined = self.decisions.result(try_call(self._enter, run, state))
        if isinstance(joined, Failure):
            self._exchange.leave(name, joined.reason)
            if wait is not None and self.runs and is_out_of_memory(joined.error):
                wait(joined.reason)
            elif run.is_lead:
                self._listen(Ended(name, run.progress, "failed", joined.reason))
            return
        run.saved_step = run.progress.step or -1
        run.set_weight(self._weights.get(name, run.spec.weight))
        self.runs[name] = run
        self.stream.rule.enter(name)
        if run.is_lead:
            self._exchange.publish(name, self.model.state(name))
            self._advance(run)
        else:
            self._gradients.begin_away(run)  # its initial state may have come before it joined

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch, now."""
        return self._budget.tokens

    def _enter(self, run: JobRun, state: AdapterState | None) -> None:
        """Load adapter and reference, or neither. Away from the lead rank both come later."""
        name = run.spec.name
        self.model.join(name, run.spec, run.spec, run.total_steps, self._pipeline.cut(run.spec, state))
        try:
            self._pipeline.enter(run.spec, run.total_steps)
            if run.is_lead:
                self._set_reference(run)
        except BaseException:
            self._pipeline.drop(name)
            self.model.leave(name)
            raise

    def _set_reference(self, run: JobRun) -> None:
        if run.reference is not None:
            self.model.set_reference(run.spec.name, self._pipeline.set_reference(run.spec.name, run.reference()))
            run.reference = None  # what it holds is on the device by now

    @property
    def idle(self) -> bool:
        """Whether all that is left to do waits for other ranks."""
        if self.stream.ahead or self._gradients.has_work or any(run.flow.runnable or run.unsent for run in self.runs.values()):
            return False
        return not (self._exchange.has_news or self._pipeline.awaits)

    def stop(self) -> None:
        """Remove every job, as `leave` does. An exception for one does not keep the others."""
        with ExitStack() as last:
            for name in reversed(self.runs):
                last.callback(self.leave, name)

    def leave(self, name: str) -> None:
        """Remove a job at its last optimizer step: what it did of the next is dropped. It ends as "stopped", or as "failed" if it
        fails in that very step.
        """
        while self.stream.has(name):
            self.run_micro_batch(packs=False)
        self._settle()
        if name in self.runs:
            self._end(self.runs[name], "stopped")

    def share(self, token_budget: int, recompute: RecomputePlan = NO_LAYER, weights: Mapping[str, float] | None = None) -> None:
        """From the next micro-batch on: its tokens (a longer sample is a micro-batch by itself), the decoder layers that backward computes
        again, and the jobs' weights, also of those that join later.
        """
        self._weights = dict(weights or {})
        for name, run in self.runs.items():
            run.set_weight(self._weights.get(name, run.spec.weight))
        self._set_recompute(recompute)
        self._budget.order(token_budget, self.model.recompute)

    def run_micro_batch(self, *, packs: bool = True) -> MicroBatch | None:
        """One forward-backward (or evaluation) over what the flows offer, and the optimizer steps that it completes. None when no job is
        left. Unless it `packs`, only what is announced already is computed.
        """
        if (failure := self._pipeline.failure) is not None:
            self._recover(failure)
        self._announce(packs)
        while self._pipeline.awaits:  # a job steps as soon as it can: its next batch is what other stages may be waiting for
            self._pipeline.wait_for_steps(computes=bool(self.stream.ahead))
            if not self._pipeline.measured:
                break
            self._step()
            self._announce(packs)
        if not self.stream.ahead:
            self._settle()
            self._measure(self._gradients.completed_elsewhere())
            self._step()
            return None
        announced, before = self.stream.next(), self.model.passes.computed_tokens
        packed = announced.packed
        losses = self.decisions.result(try_call(self.stream.compute, packed, announced.batch, announced.objectives))
        computed = self.model.passes.computed_tokens - before
        self._settle()
        if isinstance(losses, Failure):
            if (failure := self._pipeline.failure) is not None:
                self._recover(failure)
            else:
                self._find_culprit(packed, losses.error)
            return packed
        self._see_calm()
        self.nano_batching.computed(packed)
        self._listen(Computed(packed, computed, left_tokens=sum(run.flow.pending_tokens for run in self.runs.values())))
        for name, loss in losses.items():
            if name in self.runs:
                self.runs[name].absorb(loss, sum(row.tokens for row in packed.rows if row.job_id == name))
        through = [self.runs[name] for name in announced.through if name in self.runs]
        whole = self._gradients.completed_elsewhere()
        if packed.kind == "eval":
            self._evaluated(through)
        else:
            whole += [run for run in through if self._gradients.through(run)]
        self._measure(whole)
        self._step()
        return packed

    def _announce(self, packs: bool) -> None:
        while packs and self.stream.ahead < self._pipeline.depth and (offered := self.nano_batching.pack(self.token_budget)) is not None:
            self.stream.announce(offered, self.token_budget)

    def _drain(self) -> None:
        """Compute all micro-batches that are announced, at all stages: a job that joins may move what they read."""
        while True:
            while self.stream.ahead:
                self.run_micro_batch(packs=False)
            if not isinstance(settled := try_call(self._pipeline.settle), Failure):
                return
            failure = self._pipeline.failure
            if failure is None:
                raise settled.error
            self._recover(failure)

    def _recover(self, failure: StageFailure) -> None:
        """Another stage has failed: its micro-batch is dealt with as one that failed here."""
        self._settle()
        self._find_culprit(self.stream.announced_before(failure.later), failure.error)

    def _evaluated(self, through: list[JobRun]) -> None:
        for run in [run for run in through if run.measuring]:
            run.measured()
        through = [run for run in through if run.flow.complete]
        if not through:
            return
        means = self.decisions.evaluations(Losses([run.passed for run in through]).read())
        for run, mean in zip(through, means, strict=True):
            run.evaluated(mean.loss)
            self._listen(Evaluated(run.spec.name, run.progress, mean.loss, run.summary(mean.metrics)))
            self._advance(run)

    def _measure(self, whole: list[JobRun]) -> None:
        """The batches of these jobs are through here."""
        if whole:
            losses = Losses([run.passed if run.is_lead else BatchLosses() for run in whole])  # takes memory: before any step is under way
            self._measured.append((whole, losses))
            self._pipeline.measure([run.spec.name for run in whole])

    def _step(self) -> None:
        """Take the optimizer steps that can be taken, of jobs that were measured together at once; a job whose step raises fails alone. The
        host waits for them only if something else than the jobs' next batches follows.
        """
        while self._measured and self._pipeline.measured:
            self._settle()
            measured, losses = self._measured.popleft()
            steps = self._pipeline.due().update()
            through = [run for run in measured if self.runs.get(run.spec.name) is run]  # others have left meanwhile
            for run in through:
                if (error := steps.errors.get(run.spec.name)) is not None:
                    self._end(run, "failed", Failure(error).reason)
                else:
                    self.stream.rule.leaves(run.spec.name, run.progress.step, run.samples_here)
                    run.step_queued()
            stepping = [run for run in through if run.spec.name not in steps.errors]
            self.nano_batching.stepped([run.spec.name for run in stepping])
            offered = not steps.done and all(run.goes_straight_on for run in stepping)
            self._stepping = Stepping(measured, steps, losses, offered)
            if not offered:
                self._settle()
                continue
            for run in stepping:
                self._offer(run)

    def _offer(self, run: JobRun) -> bool:
        """Put the next evaluation or global batch on offer. A job whose data cannot be read any more fails, and False comes back."""
        offered = self.decisions.result(try_call(run.offer))
        if not isinstance(offered, Failure):
            if not run.evaluating:
                self._exchange.offered(run.spec.name)
            return True
        self._settle()  # its last step may be under way
        if run.spec.name in self.runs:
            self._end(run, "failed", offered.reason)
        return False

    def _settle(self) -> None:
        """Read the outcome of the optimizer steps under way, if any."""
        stepping = self._stepping
        if stepping is None:
            return
        means, stats = stepping.losses.read(), stepping.steps.read()
        self._stepping = None  # not before: a wait that is interrupted begins anew
        stepped = [(run, mean) for run, mean in zip(stepping.runs, means, strict=True) if run.spec.name in stats]
        for run, mean in stepped:
            name = run.spec.name
            if run.is_lead:
                run.stepped(stats[name], mean.loss)
                self._listen(Stepped(name, run.progress, stats[name], mean.loss, run.summary(mean.metrics)))
        for run in sorted((run for run, _ in stepped), key=self._numel, reverse=True):  # the longest to write ends first
            self._advance(run, offered=stepping.offered)

    def _numel(self, run: JobRun) -> int:
        return self.model.state(run.spec.name).layout.numel

    def _advance(self, run: JobRun, *, offered: bool = False) -> None:
        """Start what follows when a job has joined, or a batch or evaluation of its own is through. `offered`: its next batch is known.
        Away from the lead rank, that is the next batch until the lead rank says otherwise.
        """
        if not run.is_lead:
            if not (offered or run.exhausted):
                self._offer(run)
        elif (end := self.decisions.end(run.spec.name, self._due_end(run))) is not None:
            self._end(run, *end)
        elif not offered and self._offer(run) and not run.needs_evaluation and run.checkpoint_due:
            run.saved_step = run.progress.step
            self._listen(CheckpointDue(run.spec.name, run.progress, self._pipeline.state(run.spec.name)))

    def _due_end(self, run: JobRun) -> End | None:
        """How the job ends now, because it learns nothing or has no step left; None if it continues."""
        skipped = self.model.state(run.spec.name).skipped
        if skipped >= QUARANTINE_AFTER:
            return "failed", f"no finite gradient in {quantity(skipped, 'step')} in a row, up to step {run.progress.step}"
        if run.needs_evaluation or not run.exhausted:
            return None
        if run.has_no_finite_loss:
            steps = len(run.progress.losses)
            return "failed", f"none of its last {quantity(steps, 'step')} had a finite loss; look at its data and its learning rate"
        return "done", ""

    def _end(self, run: JobRun, status: Status, reason: str = "") -> None:
        """Remove a job at its last finite state; the others continue."""
        name = run.spec.name
        if status == "done":
            run.progress = replace(run.progress, finished=True)
        self.runs.pop(name, None)
        self._gradients.leave(name)
        self.stream.rule.leave(name)
        self._budget.room_came()
        self._exchange.leave(name, reason if status == "failed" else "")
        state = self._pipeline.state(name) if run.is_lead else None
        self._pipeline.drop(name)
        self.model.leave(name)
        if run.is_lead:
            self._listen(Ended(name, run.progress, status, reason, state))

    def _find_culprit(self, packed: MicroBatch, error: BaseException) -> None:
        """A micro-batch raised. Its jobs' half-summed gradients are dropped, each is tried alone, those that raise again fail,
        and the others start their global batch over: its gradient is then the one they would have had.
        """
        suspects = [name for name, _ in groupby(row.job_id for row in packed.rows) if name in self.runs]
        # Where stages before this one compute ahead, nothing is known of what they have: all begin their batches anew.
        names = suspects if self._pipeline.depth == 1 else list(self.runs)
        if not names:
            return
        self._forget(names)
        if not (is_out_of_memory(error) and self._lower_budget(packed)):
            alone = {name: self.stream.try_alone(name, packed, self.token_budget) for name in suspects}
            seen = {name: tried.reason for name, tried in alone.items() if isinstance(tried, Failure)}
            guilty = self.decisions.culprits(seen)
            if not guilty and suspects:
                self._forgive(error)
            for name, reason in guilty.items():
                self._end(self.runs[name], "failed", reason)
            self._pipeline.begin_anew()  # those that did not fail alone have left gradients
        for name in names:
            if name in self.runs:
                self.model.zero_grad_of(name)
                self._offer(self.runs[name])

    def _forget(self, names: list[str]) -> None:
        """Drop what has been computed of the batches on offer."""
        self.stream.begin_anew(names)
        self._measured.clear()
        self.nano_batching.forget_time()
        for name in names:
            self.model.zero_grad_of(name)
            self._exchange.forget(name)
            self._gradients.forget(name)

    def _forgive(self, error: BaseException) -> None:
        """Tolerate an error that no job repeats alone, at most `_FORGIVEN` times with few micro-batches between them."""
        self._unexplained, self._calm = self._unexplained + 1, 0
        if self._unexplained > _FORGIVEN:
            raise error
        self._listen(Noted(f"{type(error).__name__}: {error}; no job repeats it alone, so the batch starts over"))

    def _lower_budget(self, packed: MicroBatch | None = None) -> bool:
        """Lower the budget after memory ran out, in `packed` or between micro-batches. False if it cannot (`TokenBudget.next_lower`)."""
        self.model.release_memory()
        alone = packed.tokens if packed is not None and len(packed.rows) == 1 else None
        smaller = self._budget.next_lower(max(self._longest(), self._smallest_budget), alone)
        if smaller is None:
            return False
        self._budget.lower(self.decisions.token_budget(smaller))
        self._set_recompute(self._budget.recompute)
        more = ", and longer samples recompute more layers" if self._budget.varies else ""
        self._listen(Noted(f"out of memory: the token budget is now {self.token_budget}{more}"))
        return True

    def _see_calm(self) -> None:
        """Count a computed micro-batch: after enough of them, earlier errors are forgotten."""
        self._calm += 1
        if self._calm >= CALM:
            self._unexplained = 0
        if (larger := self._budget.see_calm()) is not None:
            self._budget.grow(self.decisions.token_budget(larger))
            self._set_recompute(self._budget.recompute)
            self._listen(Noted(f"memory has sufficed for a while: the token budget is {self.token_budget} again"))

    def _longest(self) -> int:
        return max((run.longest for run in self.runs.values()), default=1)

    def _set_recompute(self, plan: RecomputePlan) -> None:
        self.model.recompute = plan
        self._pipeline.recompute(plan)
