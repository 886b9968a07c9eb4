"""Runs one group of jobs: packs their flows into micro-batches, steps each job when its own batch is through, keeps trouble apart.

Commands come in (`join`, `leave`, `share`, `stop`), reports go out (`reports.py`); no file and no process is touched here. A job joins and
leaves between two micro-batches. The outcome of optimizer steps is read when the next micro-batch is under way, so that a GPU waits for it
only where an evaluation, a checkpoint or an end follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby

from tlora.adapters.state import AdapterState
from tlora.batching.pack import MicroBatch, Row, pack, prepared_budget
from tlora.batching.recompute_plan import RecomputePlan
from tlora.group.exchange import Decisions, End, Exchange, RunningSums, SummedGradient
from tlora.group.isolation import Failure, is_out_of_memory, try_call
from tlora.group.job_run import QUARANTINE_AFTER, BatchLosses, JobRun, Losses, Stepping
from tlora.group.reports import CheckpointDue, Computed, Ended, Evaluated, Listener, Noted, Status, Stepped
from tlora.group.token_budget import CALM, NO_LAYER, TokenBudget
from tlora.supermodel.batch import PackedBatch, collate
from tlora.supermodel.losses import JobLoss
from tlora.supermodel.supermodel import SuperModel

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
    ) -> None:
        """`smallest_budget`: tokens of the longest sample of any job that may still join; running out of memory stops at it, where all
        micro-batches recompute the same layers. `exchange`: where jobs have replicas on other ranks.
        """
        self.model, self._budget, self._listen = model, TokenBudget(token_budget, model.recompute), listen
        self.decisions = decisions or Decisions()
        self._smallest_budget, self._unexplained, self._calm = smallest_budget, 0, 0
        self._again: dict[str, Callable[[JobRun], bool]] = {}  # by job: work between replicas that ran out of memory and is tried again
        self._state_read: set[str] = set()  # jobs that have fetched their initial state, and have not begun
        self._whole: dict[str, SummedGradient] = {}  # by job: gradient sums that were taken from the exchange, and are not in the bank yet
        self.runs: dict[str, JobRun] = {}
        self.begin: Callable[[tuple[str, ...]], object] = lambda _: None  # called with the jobs of each micro-batch before it is computed
        self._weights: dict[str, float] = {}
        self._stepping: Stepping | None = None
        self._exchange: Exchange = exchange or RunningSums()

    def join(self, run: JobRun, state: AdapterState | None = None, wait: Callable[[str], object] | None = None) -> None:
        """Let a job in with `state` (default: a new adapter); it offers its first batch at once. A job that cannot join fails alone. Where
        others are in, and they leave too little memory, `wait` is called instead, with the reason; nothing has changed then.

        A job whose home is another rank waits here for the state that it begins with, and is never reported.
        """
        name = run.spec.name
        run.here = self._exchange.replicas_here(name, run.replicas)
        joined = self.decisions.result(try_call(self._enter, run, state))
        if isinstance(joined, Failure):
            self._exchange.leave(name, joined.reason)
            if wait is not None and self.runs and is_out_of_memory(joined.error):
                wait(joined.reason)
            elif run.leads:
                self._listen(Ended(name, run.progress, "failed", joined.reason))
            return
        run.saved_step = run.progress.step or -1
        run.set_weight(self._weights.get(name, run.spec.weight))
        self.runs[name] = run
        if run.leads:
            self._exchange.publish(name, self.model.state(name))
            self._advance(run)
        else:
            self._attempted(run, self._begin_away)  # its initial state may have come before it joined

    @property
    def token_budget(self) -> int:
        """Tokens of a micro-batch, now."""
        return self._budget.tokens

    def _enter(self, run: JobRun, state: AdapterState | None) -> None:
        """Load adapter and reference, or neither. Away from the home rank both come later."""
        name = run.spec.name
        self.model.join(name, run.spec, run.spec, run.total_steps, state)
        try:
            if run.leads:
                self._set_reference(run)
        except BaseException:
            self.model.leave(name)
            raise

    def _set_reference(self, run: JobRun) -> None:
        if run.reference is not None:
            self.model.set_reference(run.spec.name, run.reference())
            run.reference = None  # what it holds is on the device by now

    @property
    def idle(self) -> bool:
        """Whether all that is left to do waits for other ranks."""
        return not (self._exchange.has_news or self._again) and not any(run.flow.runnable or run.unsent for run in self.runs.values())

    def stop(self) -> None:
        """Remove every job, as `leave` does. An exception for one does not keep the others."""
        with ExitStack() as last:
            for name in reversed(self.runs):
                last.callback(self.leave, name)

    def leave(self, name: str) -> None:
        """Remove a job at its last optimizer step: what it did of the next is dropped. It ends as "stopped", or as "failed" if it
        fails in that very step.
        """
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
        self.model.recompute = recompute
        self._budget.order(token_budget, self.model.recompute)

    def run_micro_batch(self) -> MicroBatch | None:
        """One forward-backward (or evaluation) over what the flows offer, and the optimizer steps that it completes. None when no job is
        left.
        """
        packed = pack([run.flow for run in self.runs.values()], self.token_budget, in_order=self.model.deterministic)
        if packed is None:
            self._settle()
            self._step(self._completed_elsewhere())
            return None
        before = self.model.computed_tokens
        losses = self.decisions.result(try_call(self.compute, packed.kind, packed.rows, packed.tokens, self.token_budget))
        computed = self.model.computed_tokens - before
        self._settle()
        if isinstance(losses, Failure):
            self._find_culprit(packed, losses.error)
            return packed
        self._see_calm()
        self._listen(Computed(packed, computed, left_tokens=sum(run.flow.pending_tokens for run in self.runs.values())))
        for name, loss in losses.items():
            if name in self.runs:
                self.runs[name].absorb(loss, sum(row.tokens for row in packed.rows if row.job_id == name))
        through = [self.runs[name] for name in losses if name in self.runs and self.runs[name].flow.complete]
        whole = self._completed_elsewhere()
        if packed.kind == "eval":
            self._evaluated(through)
        else:
            whole += [run for run in through if self._replicas_through(run)]
        self._step(whole)
        return packed

    # -- jobs of several replicas --------------------------------------------------------------------------------------

    def _replicas_through(self, run: JobRun) -> bool:
        """Whether a global batch is through with the part that was offered: then the job's sums hold the gradients of all replicas."""
        return run.replicas == 1 or self._attempted(run, self._end_replica)

    def _attempted(self, run: JobRun, step: Callable[[JobRun], bool]) -> bool:
        """Attempt the work; if memory runs out, once more with a lower budget."""
        done = try_call(step, run)
        if isinstance(done, Failure):
            if is_out_of_memory(done.error) and self._lower_budget():
                self._again[run.spec.name] = self._take_whole if run.awaiting else step
            else:
                self._end(run, "failed", done.reason)
            return False
        return done

    def _end_replica(self, run: JobRun) -> bool:
        name = run.spec.name
        self._exchange.give(name, run.progress.step, run.replica, self.model.gradient(name))
        if run.offer_next_replica():
            self.model.zero_grad_of(name)
            return False
        run.awaiting = True  # the sum that replaces this gradient
        return self._take_whole(run)

    def _take_whole(self, run: JobRun) -> bool:
        name = run.spec.name
        if run.unsent:
            self._exchange.send(name, run.progress.step, run.passed)
            run.sent()
        whole = self._whole.get(name) or self._exchange.take(name, run.progress.step, run.shared_among)
        if whole is None:
            return False
        self._whole[name] = whole  # until it is in the bank: the exchange returns it once
        self.model.set_gradient(name, whole.gradient_P)
        del self._whole[name]
        run.completed(whole.elsewhere, whole.tokens)
        return True

    def _completed_elsewhere(self) -> list[JobRun]:
        """Jobs whose global batch is through now that other ranks have sent their parts. Jobs with their homes there may begin."""
        again, self._again = self._again, {}
        tried = [self.runs[name] for name in again if name in self.runs]
        through = [run for run in tried if self._attempted(run, again[run.spec.name]) and again[run.spec.name] != self._begin_away]
        news = [name for name in self._exchange.news() if name not in self._again]
        for run in [self.runs[name] for name in news if name in self.runs]:
            if not run.leads:
                self._attempted(run, self._begin_away)
        waiting = [run for name, run in self.runs.items() if run.awaiting and run not in tried and (run.unsent or name in news)]
        return through + [run for run in waiting if self._attempted(run, self._take_whole)]

    def _begin_away(self, run: JobRun) -> bool:
        name = run.spec.name
        if name not in self._state_read and not self._exchange.fetch(name, self.model.state(name)):
            return False
        self._state_read.add(name)
        self.model.rewrite(name)
        self._set_reference(run)  # its home rank has written it before it published
        self._state_read.discard(name)
        run.follow(self.model.state(name).step)
        return True

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

    def _step(self, through: list[JobRun]) -> None:
        """Take the optimizer steps of all jobs whose batch is through, together; a job whose step raises fails alone. The host waits for
        them only if something else than the jobs' next batches follows.
        """
        if not through:
            return
        losses = Losses([run.passed if run.leads else BatchLosses() for run in through])  # takes memory: before any step is under way
        steps = self.model.queue_optim_step([run.spec.name for run in through])
        for run in through:
            if (error := steps.errors.get(run.spec.name)) is not None:
                self._end(run, "failed", Failure(error).reason)
            else:
                run.step_queued()
        stepping = [run for run in through if run.spec.name not in steps.errors]
        offered = not steps.done and all(run.goes_straight_on for run in stepping)
        self._stepping = Stepping(through, steps, losses, offered)
        if not offered:
            self._settle()
            return
        for run in stepping:
            self._offer(run)

    def _offer(self, run: JobRun) -> bool:
        """Put the next evaluation or global batch on offer. A job whose data cannot be read any more fails, and False comes back."""
        offered = self.decisions.result(try_call(run.offer))
        if not isinstance(offered, Failure):
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
            if run.leads:
                run.stepped(stats[name], mean.loss)
                self._listen(Stepped(name, run.progress, stats[name], mean.loss, run.summary(mean.metrics)))
        for run in sorted((run for run, _ in stepped), key=self._numel, reverse=True):  # the longest to write ends first
            self._advance(run, offered=stepping.offered)

    def _numel(self, run: JobRun) -> int:
        return self.model.state(run.spec.name).layout.numel

    def compute(self, kind: str, rows: tuple[Row, ...], tokens: int, most_tokens: int) -> dict[str, JobLoss]:
        """One forward-backward, or evaluation: the jobs' losses. `most_tokens`: to which the micro-batch may be padded for speed; 0: no
        further than to a prepared size.
        """
        self.begin(tuple(name for name, _ in groupby(row.job_id for row in rows)))
        pad_to = prepared_budget(tokens, self.token_budget) if self.model.device.type == "cuda" else 0
        batch: PackedBatch = collate([self.runs[row.job_id].batch_row(row) for row in rows], self.model.device, pad_to, most_tokens)
        present = {row.job_id: self.runs[row.job_id].objective for row in rows}
        objectives = {name: objective for name, objective in present.items() if objective is not None}
        return (self.model.evaluate if kind == "eval" else self.model.forward_backward)(batch, objectives)

    def _advance(self, run: JobRun, *, offered: bool = False) -> None:
        """Start what follows when a job has joined, or a batch or evaluation of its own is through. `offered`: its next batch is known.
        Away from the home rank, that is the next batch until the home rank says otherwise.
        """
        if not run.leads:
            if not (offered or run.exhausted):
                self._offer(run)
        elif (end := self.decisions.end(run.spec.name, self._due_end(run))) is not None:
            self._end(run, *end)
        elif not offered and self._offer(run) and not run.needs_evaluation and run.checkpoint_due:
            run.saved_step = run.progress.step
            self._listen(CheckpointDue(run.spec.name, run.progress, self.model.state(run.spec.name)))

    def _due_end(self, run: JobRun) -> End | None:
        """How the job ends now, because it learns nothing or has no step left; None if it continues."""
        skipped = self.model.state(run.spec.name).skipped
        if skipped >= QUARANTINE_AFTER:
            return "failed", f"no finite gradient in {skipped} steps in a row, up to step {run.progress.step}"
        if run.needs_evaluation or not run.exhausted:
            return None
        if run.has_no_finite_loss:
            steps = len(run.progress.losses)
            return "failed", f"none of its last {steps} steps had a finite loss; look at its data and its learning rate"
        return "done", ""

    def _end(self, run: JobRun, status: Status, reason: str = "") -> None:
        """Remove a job at its last finite state; the others continue."""
        name = run.spec.name
        if status == "done":
            run.progress = replace(run.progress, finished=True)
        self.runs.pop(name, None)
        for kept in (self._again, self._whole):
            kept.pop(name, None)
        self._state_read.discard(name)
        self._budget.room_came()
        self._exchange.leave(name, reason if status == "failed" else "")
        if not run.leads:
            self.model.leave(name)
            return
        self._listen(Ended(name, run.progress, status, reason, self.model.leave(name)))

    def _find_culprit(self, packed: MicroBatch, error: BaseException) -> None:
        """A micro-batch raised. Its jobs' half-summed gradients are dropped, each is tried alone, those that raise again fail,
        and the others start their global batch over: its gradient is then the one they would have had.
        """
        names = [name for name, _ in groupby(row.job_id for row in packed.rows) if name in self.runs]
        if not names:
            return
        for name in names:
            self.model.zero_grad_of(name)
            self._exchange.forget(name)
        if not (is_out_of_memory(error) and self._lower_budget(packed)):
            alone = {name: self._try_alone(name, packed) for name in names}
            seen = {name: tried.reason for name, tried in alone.items() if isinstance(tried, Failure)}
            guilty = self.decisions.culprits(seen)
            if not guilty:
                self._forgive(error)
            for name, reason in guilty.items():
                self._end(self.runs[name], "failed", reason)
        for name in names:
            if name in self.runs:
                self.model.zero_grad_of(name)
                self._offer(self.runs[name])

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
        self.model.recompute = self._budget.recompute
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
            self.model.recompute = self._budget.recompute
            self._listen(Noted(f"memory has sufficed for a while: the token budget is {self.token_budget} again"))

    def _longest(self) -> int:
        return max((run.longest for run in self.runs.values()), default=1)

    def _try_alone(self, name: str, packed: MicroBatch) -> dict[str, JobLoss] | Failure:
        rows = tuple(row for row in packed.rows if row.job_id == name)
        return try_call(self.compute, packed.kind, rows, sum(row.tokens for row in rows), 0)
