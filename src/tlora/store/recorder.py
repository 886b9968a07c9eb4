"""Writes one job's files: its rows of metrics, its checkpoints, its adapter and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tlora import durable
from tlora.adapters.state import AdapterState
from tlora.errors import CheckpointError
from tlora.group.isolation import Failure, try_call
from tlora.group.job_run import JobRun
from tlora.group.reports import CheckpointDue, Ended, Evaluated, Reweighted, Status, Stepped, TrainingProgress
from tlora.job import BasePrecision, JobSpec
from tlora.store import checkpoint
from tlora.store.best_checkpoint import settle_best
from tlora.store.checkpoint import Snapshot, on_host
from tlora.store.full_disk import DiskReserve, WaitsForRoom, retry_when_disk_full
from tlora.store.job_result import JobResult, result_of, write_result
from tlora.store.metrics import RowWriter, Tracker, finite_mean, means
from tlora.store.model_card import is_unedited, model_card
from tlora.store.writer import Writer, Written
from tlora.wording.card_seal import CARD_FILE

Outcome = tuple[Status, str]  # how a job ended, and why


@dataclass(frozen=True)
class RunContext:
    """What the recorders of a run share. `clock` gives seconds since its start; `note` shows a line to the user; `before_save` is
    called before each checkpoint, by the thread that writes it, and raises TloraError where none may be written. `fence` is called with a
    job's directory just before something is put in place there, and raises CheckpointError where that is another's by now. `wait_for_room`
    is for last saves that find a full disk; without it they fail.
    """

    base_model: str
    clock: Callable[[], float]
    note: Callable[[str], None]
    reserve: DiskReserve
    writer: Writer = field(default_factory=Writer)
    before_save: Callable[[], None] = lambda: None
    fence: Callable[[Path], None] = lambda _: None
    wait_for_room: WaitsForRoom | None = None
    base_precision: BasePrecision | None = None


class Recorder:
    """Writes one job's files into `directory`. `settings`: its values of the fields that its sweep varies, for its result."""

    def __init__(self, run: JobRun, directory: Path, context: RunContext, tracker: Tracker, settings: Mapping[str, Any]) -> None:
        self._run, self._directory, self._context, self._tracker, self._settings = run, directory, context, tracker, settings
        self._rows = RowWriter(directory / "metrics.jsonl", context.note)
        self._started = self._row_time = context.clock()
        self._row_tokens, self._seconds_before = run.progress.num_tokens, run.progress.seconds
        self._unlogged = run.progress.unlogged
        self._unlogged_metrics: list[Mapping[str, float]] = []  # of the steps that this process has taken
        self._written: TrainingProgress | None = None  # of the newest checkpoint that is known to be whole; the writing thread's
        self._stepped: Stepped | None = None
        self._told_of_evaluation = False  # whether an evaluation without a finite loss was noted
        self._broke: BaseException | None = None  # an error that is not the job's own, from a background write
        if (directory / f"checkpoint-{run.progress.step}").is_dir():  # the one from which it resumes, which was verified
            self._written = run.progress
            context.reserve.keep(directory, self._needed_by_resume(run.progress))

    @property
    def seconds(self) -> float:
        return self._seconds_before + self._context.clock() - self._started

    def listen(self, report: Stepped | Evaluated | CheckpointDue | Reweighted) -> None:
        match report:
            case Stepped():
                self._log_step(report)
            case Evaluated():
                self._log_evaluation(report)
            case CheckpointDue():
                self._save(report)
            case Reweighted(_, p):
                shares = ", ".join(f"{weight:.3f}" for weight in p.replica_weights) or "equal ones"
                self._tell(f"after step {p.weights_since} the shares of its replicas are {shares}, by measured seconds of its GPUs")

    def _log_step(self, report: Stepped) -> None:
        """Write a row for every `logging_steps` optimizer steps; its loss is the mean over them."""
        run, self._stepped = self._run, report
        self._unlogged = (*self._unlogged, report.loss)
        self._unlogged_metrics.append(report.metrics)
        self._tell(_note_on_skipped_step(report))
        if run.due(run.spec.logging_steps) or run.exhausted:
            self._log_steps(report)

    def _log_steps(self, report: Stepped) -> None:
        p, now = report.progress, self._context.clock()
        self._write(
            {
                "step": p.step,
                "epoch": round(self._run.epoch, 6),
                "loss": finite_mean(self._unlogged),
                **means(self._unlogged_metrics),
                "grad_norm": report.stats.grad_norm,
                "learning_rate": report.stats.learning_rate,
                "num_tokens": p.num_tokens,
                "tokens_per_second": (p.num_tokens - self._row_tokens) / max(now - self._row_time, 1e-9),
                "seconds": now,
            }
        )
        self._unlogged, self._row_time, self._row_tokens = (), now, p.num_tokens
        self._unlogged_metrics = []

    def _log_evaluation(self, report: Evaluated) -> None:
        run = self._run
        tokens = int(run.evaluation.lengths.sum()) if run.evaluation is not None else 0
        row = {"step": report.progress.step, "epoch": round(run.epoch, 6), "eval_loss": report.loss, "eval_num_tokens": tokens}
        if (line := _note_on_evaluation(run.spec, report)) is not None and not self._told_of_evaluation:
            self._told_of_evaluation = True
            self._tell(line)
        self._write(row | {f"eval_{name}": value for name, value in report.metrics.items()} | {"seconds": self._context.clock()})

    def _tell(self, line: str | None) -> None:
        if line is not None:
            self._context.note(f"{self._run.spec.name}: {line}")

    def _fence(self, _: str) -> None:
        """A `durable.Failpoint`."""
        self._context.fence(self._directory)

    def _write(self, row: dict[str, Any]) -> None:
        if isinstance(try_call(self._fence, ""), Failure):  # the job belongs to another worker now, and so do its rows
            return
        self._rows.write(row)
        self._tracker.log(row)

    def _save(self, report: CheckpointDue) -> None:
        """Save in the background. A failure is a note and does not fail the job: the next due save replaces it, except for the best
        checkpoint, which is not saved again.
        """
        self._raise_what_broke()
        p = report.progress
        best_here = self._run.spec.load_best_model_at_end and p.best_step == p.step
        snapshot = try_call(self._snapshot, p, report.state, owned=False)
        written = self._queue(partial(self._write_due, snapshot, p.step, last=best_here))
        written.add_done_callback(self._see_whether_it_broke)

    def end(self, report: Ended) -> Future[Outcome]:
        """Done: a last checkpoint, then the adapter of the last (or best) one as the result. Stopped: a checkpoint with which the job can
        go on. Failed: a checkpoint of the last finite state, if the disk takes it.
        """
        status, reason = report.status, report.reason
        assert report.state is not None, f"{report.job_id} has no state to be written"
        if status == "done" and self._unlogged and self._stepped:  # an early stop comes between two rows
            self._log_steps(self._stepped)
        for line in _notes_on_lost_numbers(self._run.spec, report):
            self._tell(line)
        snapshot = try_call(self._snapshot, report.progress, report.state)
        if status == "done":
            return self._queue(lambda: self._write_end(on_host(snapshot)))
        if status == "stopped":
            return self._queue(lambda: self._write_interruption(on_host(snapshot)))
        return self._queue(lambda: self._write_failure(on_host(snapshot), reason))

    def hand_over(self) -> Future[Outcome]:
        """Export the adapter of a job that was finished before this run; its last checkpoint stays."""
        return self._queue(partial(self._write_adapter, self._run.progress))

    def _queue(self, action: Callable[[], Written]) -> Future[Written]:
        return self._context.writer.write(self._run.spec.name, action)

    def _snapshot(self, progress: TrainingProgress, state: AdapterState, *, owned: bool = True) -> Snapshot:
        """`owned`: the job has left the group, so its state no longer changes."""
        progress, device = replace(progress, seconds=self.seconds, unlogged=self._unlogged), state.params.device
        if owned and device.type == "cuda":
            return Snapshot(state, progress, torch.cuda.current_stream(device).record_event())
        return Snapshot(state.on_host(owned=owned), progress)

    # -- by the writing thread; what fails there, as a moment that could not be taken, is this job's failure -------------

    def _write_due(self, snapshot: Snapshot | Failure, step: int, *, last: bool) -> None:
        saved = self._try_to_save(snapshot, last=last)
        if not isinstance(saved, Failure):
            return
        if durable.is_full(saved.error):
            self._context.reserve.full(saved.error)
        else:
            failed = f"checkpoint at step {step} failed, the job goes on without it: {saved.reason}"
            self._context.note(f"{self._run.spec.name}: {failed}")

    def _see_whether_it_broke(self, written: Future[None]) -> None:
        self._broke = written.exception() or self._broke

    def _raise_what_broke(self) -> None:
        """An interrupt that met the main thread while it wrote ends the run as it would anywhere else, and loses nothing more."""
        if (broke := self._broke) is not None:
            self._broke = None
            raise broke

    def _write_end(self, snapshot: Snapshot | Failure) -> Outcome:
        written = snapshot if isinstance(snapshot, Failure) else self._with_room(partial(self._write_last, snapshot))
        if isinstance(written, Failure):
            return self._write_failure(snapshot, written.reason, full=durable.is_full(written.error))
        self._raise_what_broke()
        return "done", ""

    def _write_last(self, snapshot: Snapshot) -> None:
        try:
            self._write_checkpoint(snapshot, last=True)
        except CheckpointError as error:
            if not durable.is_full(error):
                raise
            self._write_adapter_alone(snapshot)
            self._context.note(f"{self._run.spec.name}: its adapter is saved, its last checkpoint is not: {error}")
        else:
            self._export(snapshot.progress)

    def _write_adapter(self, progress: TrainingProgress) -> Outcome:
        exported = self._with_room(partial(self._export, progress))
        return ("failed", exported.reason) if isinstance(exported, Failure) else ("done", "")

    def _write_interruption(self, snapshot: Snapshot | Failure) -> Outcome:
        at = f"interrupted at step {self._run.progress.step}"
        saved = snapshot if isinstance(snapshot, Failure) else self._with_room(lambda: self._write_checkpoint(snapshot, last=True))
        if isinstance(saved, Failure):
            return "stopped", f"{at} and not saved: {saved.reason}{self._describe_kept(saved)}"
        self._raise_what_broke()
        return "stopped", f"{at}; {saved.name} continues with resume"

    def _write_failure(self, snapshot: Snapshot | Failure, reason: str, *, full: bool = False) -> Outcome:
        """`full`: the reason says that the disk is full, which is said once."""
        saved = self._try_to_save(snapshot, last=True)
        if isinstance(saved, Failure):
            why = "" if full and durable.is_full(saved.error) else f" ({saved.reason})"
            return "failed", f"{reason}; its state could not be saved{why}{self._describe_kept(saved)}"
        return "failed", f"{reason}; its last finite state is {saved}"

    def _describe_kept(self, lost: Failure) -> str:
        """What the full disk has left of the job, after a save that was `lost` on it."""
        if not durable.is_full(lost.error):
            return ""
        step = durable.newest_step(self._directory)
        return (
            f"; --resume goes on from checkpoint-{step}"
            if step
            else f"; nothing of {self._run.spec.name} was saved, --resume begins at step 0"
        )

    def _try_to_save(self, snapshot: Snapshot | Failure, *, last: bool) -> Path | Failure:
        return snapshot if isinstance(snapshot, Failure) else try_call(self._write_checkpoint, snapshot, last=last)

    def _with_room(self, write: Callable[[], Written]) -> Written | Failure:
        return retry_when_disk_full(self._run.spec.name, write, self._context.wait_for_room)

    def _write_checkpoint(self, snapshot: Snapshot, *, last: bool) -> Path:
        """Durable before older ones go; not written again where the newest one holds this moment. `last`: no later save makes up for
        this one, so on a full disk it gets the room that is kept for it, and that of older checkpoints.
        """
        self._context.before_save()
        run, state, p = self._run, snapshot.state, snapshot.progress
        directory = self._directory / f"checkpoint-{p.step}"
        if self._written is not None and replace(p, seconds=self._written.seconds) == self._written and directory.is_dir():
            return directory

        def write() -> None:
            checkpoint.save(directory, state, p, run.spec, self._context.base_model, self._fence)
            self._written = p
            needed = self._needed_by_resume(p)
            self._fence("before older ones go")
            durable.prune(self._directory, run.spec.save_total_limit, needed, whole=directory.name)
            self._context.reserve.keep(self._directory, needed)

        self._write_durably(write, checkpoint.checkpoint_bytes(state.layout, state.params.element_size()) if last else 0)
        self._context.reserve.saved()
        return directory

    def _needed_by_resume(self, p: TrainingProgress) -> set[str]:
        """The checkpoints that a resume from this moment needs."""
        best = {f"checkpoint-{p.best_step}"} if self._run.spec.load_best_model_at_end and p.best_step >= 0 else set[str]()
        return {f"checkpoint-{p.step}", *best}

    def _exported_step(self, p: TrainingProgress) -> int:
        return p.best_step if self._run.spec.load_best_model_at_end and p.best_step >= 0 else p.step

    def _export(self, p: TrainingProgress) -> None:
        known_whole = self._written is not None and self._written.step == self._exported_step(p)
        if not known_whole:
            p = settle_best(self._run.spec, self._directory, p, self._context.note)
            self._run.progress = replace(self._run.progress, best_eval=p.best_eval, best_step=p.best_step)
            known_whole = self._run.spec.load_best_model_at_end and p.best_step >= 0
        chosen = self._directory / f"checkpoint-{self._exported_step(p)}"
        if not chosen.is_dir():
            raise CheckpointError(f"{chosen}: is gone. Resume the run, which trains from the newest checkpoint that is left")
        size = checkpoint.export_bytes(chosen)
        self._write_durably(lambda: checkpoint.export(chosen, self._directory, known_whole=known_whole, failpoint=self._fence), size)
        self._context.reserve.keep(self._directory, self._needed_by_resume(p), ended=True)

    def _write_adapter_alone(self, snapshot: Snapshot) -> None:
        """Write the adapter alone: it is a third of the last checkpoint, for which there was no room."""
        run, state = self._run, snapshot.state
        if self._exported_step(snapshot.progress) != snapshot.progress.step:
            self._export(snapshot.progress)
            return
        size = checkpoint.adapter_bytes(state.layout, state.params.element_size())
        self._write_durably(lambda: checkpoint.save_alone(self._directory, state, run.spec, self._context.base_model, self._fence), size)

    def _write_durably(self, write: Callable[[], None], needed_bytes: int) -> None:
        self._context.reserve.write(self._run.spec.name, write, needed_bytes)

    def drop(self) -> None:
        """The job has not begun: write nothing."""
        self._context.reserve.forget(self._directory)
        self._tracker.close()

    def result(self, status: Status, reason: str = "") -> JobResult:
        """Write `result.json`, close the trackers and give back what was kept for this job on the disk."""
        run = self._run
        if status == "done":
            reason = reason or run.early_stop
            self._compare_with_start()
        result = result_of(run.spec, run.progress, self._directory, run.total_steps)
        result = replace(result, status=status, reason=reason, seconds=self.seconds, settings=dict(self._settings))
        self._context.reserve.ended(run.spec.name)
        if status != "done":
            self._context.reserve.forget(self._directory)
        if status == "done":
            self._write_card(result)
        write_result(self._directory, result, self._context.note, self._fence)  # last: a job that is done is not opened again
        self._tracker.close()
        return result

    def _compare_with_start(self) -> None:
        """Note it if training has improved nothing."""
        spec, p = self._run.spec, self._run.progress
        if spec.load_best_model_at_end and p.best_eval is not None and p.eval_first is not None and p.best_eval >= p.eval_first:
            self._context.note(
                f"{spec.name}: none of its evaluations is better than the one before its first step (loss {p.eval_first:.6g}); the adapter "
                f"is that of step {p.best_step}, the best of those that were trained (loss {p.best_eval:.6g})"
            )

    def _write_card(self, result: JobResult) -> None:
        """Write the model card, unless it was edited."""
        run, path = self._run, self._directory / CARD_FILE

        def write() -> None:
            if not path.exists() or is_unedited(path):
                report = cast("dict[str, Any] | None", run.train.meta.get("report"))
                base = self._context.base_model, self._context.base_precision
                durable.write_file(path, model_card(run.spec, *base, report, asdict(result), self._directory), failpoint=self._fence)

        if isinstance(failed := try_call(write), Failure):
            self._context.note(f"{path}: {failed.reason}")


def _note_on_skipped_step(report: Stepped) -> str | None:
    """The note on the first optimizer step that was skipped."""
    if report.progress.skipped_steps != 1 or report.stats.applied:
        return None
    what = "gradient" if math.isfinite(report.loss) else "loss"
    return (
        f"step {report.progress.step} changed nothing: its {what} is not finite. Look at the job's data, its learning rate and the base's "
        "dtype. More such steps are counted"
    )


def _note_on_evaluation(spec: JobSpec, report: Evaluated) -> str | None:
    """The note on an evaluation without a finite loss."""
    if math.isfinite(report.loss):
        return None
    kept = ["it is never the best"] if spec.load_best_model_at_end else []
    kept += ["early_stopping_patience does not count it"] if spec.early_stopping_patience else []
    return ": ".join([f"the evaluation at step {report.progress.step} has no finite loss", *([" and ".join(kept)] if kept else [])])


def _notes_on_lost_numbers(spec: JobSpec, report: Ended) -> Iterator[str]:
    """The summary at the job's end."""
    p = report.progress
    if p.skipped_steps:
        yield (
            f"{p.skipped_steps} of {p.step} steps changed nothing: their loss or gradient was not finite; first at step {p.first_skipped}. "
            "Mean losses are over the others"
        )
    if report.status == "done" and spec.load_best_model_at_end and p.best_step < 0 and not math.isfinite(p.eval_last or 0.0):
        yield "no evaluation had a finite loss, so none is the best: its adapter is that of the last step"
