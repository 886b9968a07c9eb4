"""From the gradients that this process has of a job's global batch to the whole one, which its optimizer step takes.

Other ranks compute other replicas of it. What runs out of memory on the way is tried again with a lower budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tlora.group.exchange import Exchange, SummedGradient
from tlora.group.isolation import Failure, is_out_of_memory, try_call
from tlora.group.job_run import JobRun
from tlora.group.reports import Listener, Reweighted
from tlora.supermodel.supermodel import SuperModel


@dataclass(frozen=True)
class EngineCalls:
    """What is asked of the group's engine: to lower its budget, if it can, to end a job, to load the adapter that a job compares with, to
    report.
    """

    lower_budget: Callable[[], bool]
    fail: Callable[[JobRun, str], None]
    set_reference: Callable[[JobRun], None]
    listen: Listener


class WholeGradients:
    """Of the jobs in `runs`."""

    def __init__(self, model: SuperModel, exchange: Exchange, runs: Mapping[str, JobRun], engine: EngineCalls) -> None:
        self._model, self._exchange, self._runs, self._engine = model, exchange, runs, engine
        self._again: dict[str, Callable[[JobRun], bool]] = {}  # by job: what ran out of memory and is tried again
        self._state_read: set[str] = set()  # jobs that have fetched their initial state, and have not begun
        self._whole: dict[str, SummedGradient] = {}  # by job: gradient sums that were taken from the exchange, and are not in the bank yet

    @property
    def has_work(self) -> bool:
        """Whether something is to be tried again."""
        return bool(self._again)

    def forget(self, job_id: str) -> None:
        """Drop what is there of the batch on offer."""
        self._whole.pop(job_id, None)

    def leave(self, job_id: str) -> None:
        self._again.pop(job_id, None)
        self._whole.pop(job_id, None)
        self._state_read.discard(job_id)

    def through(self, run: JobRun) -> bool:
        """Whether a global batch is through with the part that was offered: then the job's sums hold the whole gradient."""
        return run.replicas == 1 or self._attempted(run, self._end_replica)

    def begin_away(self, run: JobRun) -> None:
        """Begin a job whose lead rank is another, if its initial state has come."""
        self._attempted(run, self._begin_away)

    def completed_elsewhere(self) -> list[JobRun]:
        """Jobs whose global batch is through now that other ranks have sent their parts. Jobs with their homes there may begin."""
        again, self._again = self._again, {}
        tried = [self._runs[name] for name in again if name in self._runs]
        through = [run for run in tried if self._attempted(run, again[run.spec.name]) and again[run.spec.name] != self._begin_away]
        news = [name for name in self._exchange.news() if name not in self._again]
        for run in [self._runs[name] for name in news if name in self._runs]:
            if not run.is_lead:
                self._attempted(run, self._begin_away)
        waiting = [run for name, run in self._runs.items() if run.awaiting and run not in tried and (run.unsent or name in news)]
        return through + [run for run in waiting if self._attempted(run, self._take_whole)]

    def _attempted(self, run: JobRun, step: Callable[[JobRun], bool]) -> bool:
        """Attempt the work; if memory runs out, once more with a lower budget."""
        done = try_call(step, run)
        if isinstance(done, Failure):
            if is_out_of_memory(done.error) and self._engine.lower_budget():
                self._again[run.spec.name] = self._take_whole if run.awaiting else step
            else:
                self._engine.fail(run, done.reason)
            return False
        return done

    def _end_replica(self, run: JobRun) -> bool:
        name = run.spec.name
        self._exchange.give(name, run.progress.step, run.replica, self._model.gradient(name))
        if run.offer_next_replica():
            self._model.zero_grad_of(name)
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
        self._model.set_gradient(name, whole.gradient_P)
        del self._whole[name]
        if run.completed(whole.elsewhere, whole.tokens, whole.weights) and run.is_lead:
            self._engine.listen(Reweighted(name, run.progress))
        return True

    def _begin_away(self, run: JobRun) -> bool:
        name = run.spec.name
        if name not in self._state_read and not self._exchange.fetch(name, self._model.state(name)):
            return False
        self._state_read.add(name)
        self._model.rewrite(name)
        self._engine.set_reference(run)  # its lead rank has written it before it published
        self._state_read.discard(name)
        run.follow(self._model.state(name).step)
        return True
