"""The process that owns a run on several GPUs: it starts a rank for each, gives them jobs, shows what they do, and writes the run's files.

It computes nothing itself and uses no GPU memory. What a rank does is `rank.py`'s; which rank gets which job is `dispatcher.py`'s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from tlora import errors
from tlora.batching.placement import at_last_stage, describe_placement
from tlora.data.prepare import DataWorker, Preparation
from tlora.engine.earlier_run import to_plan, with_plans
from tlora.engine.interrupts import describe_interrupt, interrupts, recorded_end
from tlora.engine.job_length import check_lengths
from tlora.engine.messages import (
    WAITS,
    Assign,
    BaseFacts,
    Bye,
    Faulty,
    FromRank,
    Hello,
    Leave,
    LogLine,
    Open,
    RowMade,
    Shown,
)
from tlora.engine.ranks.checked_run import CheckedRun
from tlora.engine.ranks.dispatcher import Dispatcher
from tlora.engine.ranks.kinds import Gpus, check_stages_alike, earlier_form, earlier_kinds, gpus_of, place_on
from tlora.engine.ranks.progress_aggregator import ProgressAggregator
from tlora.engine.ranks.rank_group import Lost, RankGroup
from tlora.engine.results import Results, all_results
from tlora.engine.run_monitor import begin_of_run
from tlora.errors import CapacityError, ModelError, RankError, TloraError
from tlora.planning.base_placement import choose_form, fixed_to
from tlora.planning.holders import Holders
from tlora.planning.job_plan import job_warnings, plan_jobs
from tlora.planning.job_work import choose_replicas
from tlora.planning.planned_job import PlannedJob
from tlora.planning.work import predicted_seconds
from tlora.report.run_page import write_report
from tlora.shape.stages import LayerRange
from tlora.shape.work import TrainingRate
from tlora.store.job_result import JobResult
from tlora.store.metrics import RowWriter
from tlora.store.run_directory import HeldDirectory, write_run_file
from tlora.store.serving import ServingFiles
from tlora.supermodel.held_linear import check_precision
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.weight_files import check_unused
from tlora.wording.numbers import duration_text, place_names, places_text, quantity
from tlora.worker_protocol import Finished, Join, Joined, Left, Refused

_SHOW_SECONDS = 0.25
_TOLD_SECONDS = 0.1  # of waiting: less is not worth a line


class LostBeforeTrainingError(Exception):
    """A rank is lost that the others must meet. Nothing is written by then: the run can be begun again."""


class Coordinator:
    """One attempt at the run, on all ranks of `rank_group`: `prepare`, then `train`."""

    def __init__(self, order: CheckedRun, rank_group: RankGroup, devices: Sequence[str]) -> None:
        self._order, self._rank_group, self._devices, self._place = order, rank_group, devices, place_names(devices[0])[0]
        self.run = order.run
        self._started = begin_of_run(Path(order.run.output_dir), order.resume)
        self._aggregator = ProgressAggregator(order.run, order.ended, devices[0])
        self._facts: dict[str, Any] = {}
        self._spans: dict[str, dict[str, Any]] = {}
        self._dispatcher: Dispatcher | None = None
        self._shown = 0.0
        self._stopping, self._interrupted = False, False
        self.shared = False  # the base, by all ranks
        self._stages: tuple[LayerRange, ...] = ()  # of the base, one for each rank
        self._assigned = order.run  # as the ranks get it
        self._gpus, self._holders = Gpus((), (), ()), Holders()
        self._kinds: dict[str, str] = {}  # of GPU, of jobs that must stay on one
        self._must_meet = False  # ranks read each other's memory: none can be ready without the others

    # -- before training -----------------------------------------------------------------------------------------------

    def prepare(self, data_worker: DataWorker | None) -> None:
        """Tokenize all data and place the jobs, while the ranks load the base, until all are ready. Raises TloraError, and
        LostBeforeTrainingError.
        """
        self._stage(f"starting {self._rank_group.count} ranks")
        seconds, replicas = self._plan(data_worker)
        if self._stages:
            placement, last = at_last_stage(seconds, self._rank_group.count), [self._rank_group.count - 1]
            self._dispatcher = Dispatcher(seconds, placement, ranks=last)
        else:
            earlier = earlier_kinds(self.run) if self._order.resume else {}
            placement, may_have = place_on(self._gpus, seconds, replicas, self._holders, self.run.deterministic, earlier)
            self._order.watcher.note(describe_placement(placement, self._place))
            self._dispatcher = Dispatcher(seconds, placement, speeds=self._gpus.speeds, may_have=may_have)
            if self.run.deterministic and (kinds := self._gpus.kinds_by_job(may_have)):
                self._kinds = kinds
                self._order.watcher.note(self._gpus.describe_kept(kinds))
        self._specs = {job.name: job for job in self.run.jobs}
        self._aggregator.spans = self._rank_group.spans = self._dispatcher.spans
        self._spans = {job: span.to_json() for job, span in placement.spans.items()}
        self._must_meet = self._in_parts or bool(placement.spans)
        for rank, lost in self._rank_group.lost.items():
            self._lose(rank, lost)
        store = self._rank_group.store if self._must_meet else ""
        for rank in self._rank_group.living:
            led, away = frozenset(placement.jobs[rank]), [job for job, able in self._holders.whole.items() if rank not in able]
            self._rank_group.send(rank, Assign(self._assigned, led, store, self.shared, placement.spans, self._stages, frozenset(away)))
        self._until_all(self._rank_group.ready)
        if not self._rank_group.ready or (self._must_meet and self._rank_group.lost):
            self._raise_all_lost()
        self._see_ready()

    def _until_all(self, come: Mapping[int, object]) -> None:
        while any(rank not in come for rank in self._rank_group.living):
            self._hear()

    def _plan(self, data_worker: DataWorker | None) -> tuple[dict[str, float], dict[str, int]]:
        """Tokenize all data and choose how the base lies on the GPUs. Returns the seconds that each job is predicted to take, and the
        replicas of those that may span several GPUs.
        """
        order, device = self._order, torch.device(self._devices[0])
        run, resume = self.run, order.resume
        base = outline(run.base_model, run.dtype, run.base_precision)
        check_precision(run.base_precision, device, base.head.weight_VH.dtype)
        for line in check_unused(run.base_model, base.model.config, run.unused_weights):
            order.watcher.note(line)
        model = SuperModel(base, run.deterministic)
        self._hear()
        preparation = Preparation(lambda done: self._stage(f"tokenizing {done.key}: {done.rows:,} rows, {done.share:.0%}"), data_worker)
        planned = plan_jobs(to_plan(run, order.ended), model, preparation, Path(run.output_dir) if resume else None)
        open_jobs = tuple(job for job in planned if job.spec.name not in order.ended)
        lines = job_warnings(open_jobs) + ServingFiles(run.base_model).warn([(job.spec, job.data.report) for job in open_jobs if job.data])
        for line in lines + (check_lengths(open_jobs, Path(run.output_dir)) if resume else []):
            order.watcher.note(line)
        self.run = with_plans(run, [job.spec for job in planned])
        self._choose_form(planned, model)
        seconds = predicted_seconds(open_jobs, model, device, TrainingRate(self._gpus.flops))
        return seconds, choose_replicas(open_jobs, seconds, self._rank_group.count, run.deterministic)

    def _choose_form(self, planned: tuple[PlannedJob, ...], model: SuperModel) -> None:
        self._until_all(self._rank_group.memory)
        if not self._rank_group.memory:
            self._raise_all_lost()
        gpus = self._gpus = gpus_of(self._rank_group.memory, self._rank_group.count)
        base_bytes, reads_peers = model.base.num_bytes, all(each.reads_peers for each in self._rank_group.memory.values())
        place, before = torch.device(self._devices[0]), earlier_form(self.run) if self._order.resume else None
        here = gpus.limits, reads_peers, gpus.speeds, gpus.models
        form = choose_form(self.run, planned, model, base_bytes, place, *here, before=before)
        self._holders = form.holders
        for line in gpus.describe():
            self._order.watcher.note(line)
        check_stages_alike(self.run, gpus, bool(form.stages))
        if self._order.again and form.refused:
            raise CapacityError(f"{form.refused[0]} does not fit on {places_text(self._rank_group.count, place.type)}")
        self.shared, self._stages = form.shared, form.stages
        # No stage by itself knows what the others have room for.
        self._assigned = fixed_to(self.run, form.plan, reads_peers) if form.stages else self.run
        self._order.watcher.note(form.why)

    @property
    def _in_parts(self) -> bool:
        """Whether a lost rank takes a part of the base with it."""
        return self.shared or bool(self._stages)

    def _stage(self, stage: str) -> None:
        self._order.watcher.progress(self._aggregator.progress(self._seconds, stage))

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _see_ready(self) -> None:
        """What the ranks have planned, said and kept for `run.json`."""
        ready, note = dict(sorted(self._rank_group.ready.items())), self._order.watcher.note
        first = ready[max(ready)] if self._stages else next(iter(ready.values()))
        for line in first.warnings:
            note(line)
        for rank, each in ready.items():
            note(f"{self._place} {rank}: {each.plan}")
        self.run = self.run.model_copy(update={"cpu_threads": first.threads or self.run.cpu_threads})
        if kernels := first.facts.get("kernels"):
            note(f"kernels: {kernels}")
        keys = ("device", "token_budget", "recomputed_layers", "recomputed_by_tokens")
        self._facts = {
            **first.facts,
            "base_shared": self.shared,
            **({"stages": [[each.first, each.stop] for each in self._stages]} if self._stages else {}),
            **({"spans": self._spans} if self._spans else {}),
            **({"kinds": self._kinds} if self._kinds else {}),
            "gpus": {str(rank): {key: each.facts[key] for key in keys} for rank, each in ready.items()},
        }

    # -- while the ranks train -----------------------------------------------------------------------------------------

    def train(self, held: HeldDirectory) -> Results:
        order, dispatcher = self._order, self._dispatcher
        assert dispatcher is not None, "train before prepare"
        self._held = held
        self._rows = RowWriter(held.path / "run.jsonl", order.watcher.note)
        self._record("running")
        order.guard.start()
        must_compare = order.guard.must_compare
        if must_compare:
            threading.Thread(target=self._wait_for_verdict, daemon=True).start()
        for rank in self._rank_group.living:
            self._rank_group.hand(rank, BaseFacts(order.guard.facts(), not must_compare), held.lock)
        with interrupts(self._describe_interrupt, order.watcher.note) as received:
            with recorded_end(self._record):
                try:
                    while not received and dispatcher.open and dispatcher.ranks and not self._must_end:
                        self._hear()
                    self._stopping = True
                    for first in (len(self._stages) - 1, 0):  # the last stage before the others, which have parts of what it saves
                        self._rank_group.stop(first)
                        while any(rank >= first for rank in self._rank_group.living):
                            self._hear()
                except KeyboardInterrupt:
                    self._rank_group.kill()
                    raise
                nothing_new = self._aggregator.results.keys() <= order.ended.keys()
                if dispatcher.open and not received and nothing_new and not self._aggregator.began:
                    self._raise_all_lost()
            return self._finish(received)

    @property
    def _must_end(self) -> bool:
        """A launcher ends all ranks when one is lost, and a shared base ends with it: what can be saved is saved before."""
        return (self._rank_group.launched_elsewhere or self._in_parts) and bool(self._rank_group.lost)

    @property
    def may_begin_again(self) -> bool:
        """Whether jobs are unfinished only because a GPU was lost that held a part of the base."""
        open_jobs = self._dispatcher is not None and self._dispatcher.open
        return (
            bool(open_jobs)
            and self._in_parts
            and bool(self._rank_group.lost)
            and not self._rank_group.launched_elsewhere
            and not self._interrupted
        )

    def _describe_interrupt(self, number: int) -> str:
        assert self._dispatcher is not None
        self._rank_group.wake()
        return describe_interrupt(number, len(self._dispatcher.open))

    def _wait_for_verdict(self) -> None:
        with suppress(ModelError):  # the next check raises it once more
            self._order.guard.wait_for_verdict()
        self._rank_group.wake()

    def _finish(self, received: Sequence[int]) -> Results:
        """All ranks have ended."""
        order, dispatcher = self._order, self._dispatcher
        assert dispatcher is not None
        if dispatcher.open and not received:
            lost = "all ranks are lost" if not dispatcher.ranks else "a part of the base is lost" if self._in_parts else "a rank is lost"
            again = "" if self.may_begin_again and dispatcher.ranks else " Resume with --resume"
            order.watcher.note(f"{lost}; {quantity(len(dispatcher.open), 'job is', 'jobs are')} unfinished.{again}")
        order.watcher.progress(self._aggregator.progress(self._seconds))
        results = all_results(self.run, self._aggregator.results, received, order.watcher.note, self._aggregator.total_steps)
        try:
            self._record(results.status)
            results.report = write_report(self._held.path)
        except (OSError, TloraError) as error:  # a full disk: the results are worth more than their page
            order.watcher.note(str(error))
        self._interrupted = bool(received)
        return results

    def _raise_all_lost(self) -> NoReturn:
        """What every rank has ended with."""
        self._raise(next(iter(self._rank_group.lost.values())))

    def _raise(self, lost: Lost) -> NoReturn:
        """As the error that it was."""
        kind = getattr(errors, lost.broken.error, TloraError) if lost.broken is not None and lost.broken.error else TloraError
        raise kind(lost.reason)

    def _record(self, status: str) -> None:
        order = self._order
        lost = {"output_lost": order.watcher.lost} if order.watcher.lost else {}
        write_run_file(
            self._held.path, self.run, self._facts | order.guard.facts() | {"homes": self._aggregator.homes, "status": status} | lost
        )

    # -- what is heard -------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        for rank, report in self._rank_group.listen(_SHOW_SECONDS):
            self._take_in(rank, report)
        if self._dispatcher is not None and self._rank_group.going:
            self._check_base()
            if not self._must_end:
                self._dispatcher.balance()
                for rank, what, job in self._dispatcher.commands:
                    self._rank_group.send(rank, Join(self._specs[job]) if what == "join" else Leave(job))
            self._dispatcher.commands.clear()
            if time.monotonic() - self._shown >= _SHOW_SECONDS:
                self._shown = time.monotonic()
                self._order.watcher.progress(self._aggregator.progress(self._seconds))

    def _check_base(self) -> None:
        """Once its hashes are known the ranks may save. Raises ModelError where the base is another one."""
        guard = self._order.guard
        try:
            known = guard.check()
        except ModelError as error:
            self._rank_group.send_all(BaseFacts({}, problem=str(error)))
            raise
        if known:
            with suppress(OSError):  # a full disk: the run's end writes it once more
                self._record("running")
            self._rank_group.send_all(BaseFacts(guard.facts()))

    def _take_in(self, rank: int, report: FromRank | Lost) -> None:
        aggregator, dispatcher = self._aggregator, self._dispatcher
        match report:
            case Lost():
                if dispatcher is not None:
                    self._lose(rank, report)
            case LogLine(line):
                self._order.watcher.note(f"{self._place} {rank}: {line}")
            case RowMade(row):
                self._rows.write({**row, "gpu": rank})
            case Shown():
                self._show(rank, report)
            case Hello():
                self._order.check_alike(report)
                self._rank_group.send(rank, Open(self.run, self._order.resume, self._devices[rank], self._started, self._order.ended))
            case Joined(job) if dispatcher is not None:
                aggregator.begin(rank, job)
                dispatcher.began(rank, job)
            case Refused() if dispatcher is not None:
                dispatcher.refused(rank)
            case Left(job) if dispatcher is not None:
                dispatcher.left(rank, job)
            case Faulty(job, reason) if dispatcher is not None and job in dispatcher.spans:
                self._order.watcher.note(f"{self._place} {rank} cannot compute its part of {job} ({reason}): the job goes on in one place")
                dispatcher.dissolve(job)
            case Bye(waited):
                self._see_waits(rank, waited)
                if not self._stopping:
                    self._lose(rank, Lost("was asked to end by SIGTERM"))
            case Finished(job, found) if dispatcher is not None and (found["status"] != "stopped" or self._stopping):
                aggregator.end(rank, JobResult(**found))  # else with its rank, which says Bye next: the job goes on elsewhere
                if found["status"] != "stopped":  # saved, and unfinished
                    dispatcher.end(rank, job)
            case _:
                pass

    def _see_waits(self, rank: int, waited: Mapping[str, float]) -> None:
        self._facts["gpus"][str(rank)] |= waited
        waits = [f"{duration_text(seconds)} {WAITS[what]}" for what, seconds in waited.items() if seconds >= _TOLD_SECONDS]
        if waits:
            self._order.watcher.note(f"{self._place} {rank} has waited {' and '.join(waits)}")

    def _show(self, rank: int, shown: Shown) -> None:
        self._aggregator.show(rank, shown.progress, shown.rates)
        if self._dispatcher is not None:
            for job in shown.progress.jobs:
                if job.eta_seconds is not None and job.share > 0:
                    self._dispatcher.stands(rank, job.name, job.eta_seconds * job.share)  # what it would take alone

    def _lose(self, rank: int, lost: Lost) -> None:
        assert self._dispatcher is not None
        if self._must_meet and not self._rank_group.going:
            self._lose_early(rank, lost)
            return
        self._aggregator.lose(rank)
        if self._dispatcher.open:
            jobs = self._dispatcher.lose(rank) if rank in self._dispatcher.ranks else []
            rest = f"; {', '.join(jobs)} go on elsewhere" if jobs and self._dispatcher.ranks and not self._must_end else ""
            self._order.watcher.note(f"{self._place} {rank} is lost: {lost.reason}{rest}")
            if strayed := self._gpus.strayed(self._kinds, jobs, self._dispatcher.ranks):
                self._order.watcher.note(strayed)

    def _lose_early(self, rank: int, lost: Lost) -> None:
        """The others would wait for it. Raises what the rank has ended with, or LostBeforeTrainingError."""
        if lost.by_another:
            return  # of which more is heard
        if lost.broken is not None and lost.broken.error:
            self._raise(lost)
        message = f"{self._place} {rank} is lost before training: {lost.reason}"
        if self._rank_group.launched_elsewhere:
            raise RankError(f"{message}. Launch all ranks again")
        raise LostBeforeTrainingError(message)
