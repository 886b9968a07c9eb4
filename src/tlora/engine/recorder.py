"""What one job leaves on disk: its rows of metrics, its checkpoints, its adapter and its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch

from tlora import durable
from tlora.adapters.optim import StepStats
from tlora.adapters.state import AdapterState
from tlora.engine import checkpoint
from tlora.engine.checkpoint import Progress
from tlora.engine.job_run import JobRun
from tlora.engine.metrics import RowWriter, Tracker, finite
from tlora.engine.model_card import CARD_FILE, is_unedited, model_card
from tlora.engine.reserve import Reserve
from tlora.engine.wall import Failure, attempt
from tlora.engine.writer import Writer, Written
from tlora.errors import CheckpointError
from tlora.kernels.transfer import download

Status = Literal["done", "failed", "stopped"]
Outcome = tuple[Status, str]  # how a job ended, and why


@dataclass(frozen=True)
class JobResult:
    """How one job ended. Losses are means per trained token: `train_loss` over the last ten steps, `eval_loss` of the last
    evaluation (of the best with `load_best_model_at_end`). `path` holds the adapter when `status` is "done".
    """

    name: str
    status: Status
    reason: str = ""
    rank: int = 0
    steps: int = 0
    total_steps: int = 0
    train_loss_first: float | None = None
    train_loss: float | None = None
    eval_loss_first: float | None = None
    eval_loss: float | None = None
    eval_loss_best: float | None = None
    best_step: int | None = None
    num_tokens: int = 0
    seconds: float = 0.0
    path: str = ""
    sweep_of: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """What the recorders of a run share. `clock` gives seconds since its start; `note` is told what a person should know; `before_save` is
    called before each checkpoint, by the thread that writes it, and raises TloraError where none may be written.
    """

    base_model: str
    clock: Callable[[], float]
    note: Callable[[str], None]
    reserve: Reserve
    writer: Writer = field(default_factory=Writer)
    before_save: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Moment:
    """A job as it stood when it was to be written, and nobody else's: on the host or, where its device goes on with others `after` an
    event, still there.
    """

    state: AdapterState
    progress: Progress
    after: torch.Event | None = None

    def on_host(self) -> _Moment:
        """Brought there by the calling thread, while the device goes on."""
        if self.after is None:
            return self
        state = self.state
        moved = [f.result() for f in download([state.params, state.exp_avg, state.exp_avg_sq], state.params.device, self.after)]
        return _Moment(replace(state, params=moved[0], exp_avg=moved[1], exp_avg_sq=moved[2]), self.progress)


def _on_host(moment: _Moment | Failure) -> _Moment | Failure:
    return moment if isinstance(moment, Failure) else attempt(moment.on_host)


class Recorder:
    """Writes for one job. `settings`: its values of the fields that a sweep varies, for its result."""

    def __init__(self, run: JobRun, context: RunContext, tracker: Tracker, settings: Mapping[str, Any]) -> None:
        self._run, self._context, self._tracker, self._settings = run, context, tracker, settings
        self._rows = RowWriter(run.directory / "metrics.jsonl", context.note)
        self._started = self._row_time = context.clock()
        self._row_tokens = run.progress.num_tokens
        self._seconds_before = run.progress.seconds
        self._saved_step = run.progress.step if run.progress.step else -1
        self._written: Progress | None = None  # of the newest checkpoint that is known to be whole; the writing thread's
        self._stats: StepStats | None = None
        self._broke: BaseException | None = None  # what passed the wall in a write that nobody waits for
        if not run.progress.finished:  # what an interrupted run said of this job is over
            (run.directory / "result.json").unlink(missing_ok=True)
        if (run.directory / f"checkpoint-{run.progress.step}").is_dir():  # the one from which it goes on, which was verified
            self._written = _copy(run.progress)
            context.reserve.keep(run.directory, self._needed_by_resume(run.progress))

    @property
    def seconds(self) -> float:
        return self._seconds_before + self._context.clock() - self._started

    def stepped(self, stats: StepStats) -> None:
        """A row for every `logging_steps` optimizer steps; its loss is the mean over them."""
        run = self._run
        self._stats = stats
        if run.due(run.spec.logging_steps) or run.exhausted:
            self._log_steps(stats)

    def _log_steps(self, stats: StepStats) -> None:
        run, p = self._run, self._run.progress
        now, tokens = self._context.clock(), p.num_tokens - self._row_tokens
        self._write(
            {
                "step": p.step,
                "epoch": round(run.epoch, 6),
                "loss": sum(p.unlogged) / len(p.unlogged),
                "grad_norm": stats.grad_norm,
                "learning_rate": stats.learning_rate,
                "num_tokens": p.num_tokens,
                "tokens_per_second": tokens / max(now - self._row_time, 1e-9),
                "seconds": now,
            }
        )
        p.unlogged.clear()
        self._row_time, self._row_tokens = now, p.num_tokens

    def evaluated(self, loss: float) -> None:
        run = self._run
        tokens = int(run.evaluation.lengths.sum()) if run.evaluation is not None else 0
        row = {"step": run.progress.step, "epoch": round(run.epoch, 6), "eval_loss": loss, "eval_num_tokens": tokens}
        self._write({**row, "seconds": self._context.clock()})

    def _write(self, row: dict[str, Any]) -> None:
        self._rows.write(row)
        self._tracker.log(row)

    def save_if_due(self, state: AdapterState) -> None:
        """At `save_steps`, and where `load_best_model_at_end` must be able to come back to; nobody waits for it. A failure costs a note,
        not the job: the next one that is due makes up for it, except for the best, which never comes again.
        """
        run, p = self._run, self._run.progress
        best_here = run.spec.load_best_model_at_end and p.best_step == p.step
        if (best_here or (p.step > 0 and run.due(run.spec.save_steps))) and self._saved_step != p.step:
            self._raise_what_broke()
            self._saved_step = p.step
            moment = attempt(self._moment, state, owned=False)
            written = self._queue(partial(self._write_due, moment, p.step, last=best_here))
            written.add_done_callback(self._see_whether_it_broke)

    def finish(self, state: AdapterState) -> Future[Outcome]:
        """Last checkpoint, then the adapter of the last (or best) one as the result."""
        self._run.progress.finished = True
        if self._run.progress.unlogged and self._stats:  # an early stop comes between two rows
            self._log_steps(self._stats)
        moment = attempt(self._moment, state)
        return self._queue(lambda: self._write_end(_on_host(moment)))

    def interrupt(self, state: AdapterState) -> Future[Outcome]:
        """A checkpoint of the present state, with which the job can go on."""
        moment = attempt(self._moment, state)
        return self._queue(lambda: self._write_interruption(_on_host(moment)))

    def fail(self, state: AdapterState, reason: str) -> Future[Outcome]:
        """A checkpoint of the last finite state, if the disk takes it."""
        moment = attempt(self._moment, state)
        return self._queue(lambda: self._write_failure(_on_host(moment), reason))

    def hand_over(self) -> Future[Outcome]:
        """The adapter of a job that was finished before this run: its last checkpoint stands."""
        return self._queue(partial(self._write_adapter, self._run.progress))

    def _queue(self, action: Callable[[], Written]) -> Future[Written]:
        return self._context.writer.write(self._run.spec.name, action)

    def _moment(self, state: AdapterState, *, owned: bool = True) -> _Moment:
        """`owned`: the job has left, and nobody steps this state any more."""
        self._run.progress.seconds = self.seconds
        progress, device = _copy(self._run.progress), state.params.device
        if owned and device.type == "cuda":
            return _Moment(state, progress, torch.cuda.current_stream(device).record_event())
        return _Moment(state.on_host(owned=owned), progress)

    # -- by the writing thread; what fails there, as a moment that could not be taken, is this job's failure -------------

    def _write_due(self, moment: _Moment | Failure, step: int, *, last: bool) -> None:
        saved = self._save(moment, last=last)
        if not isinstance(saved, Failure):
            return
        if isinstance(saved.error, OSError) and durable.is_full(saved.error):
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

    def _write_end(self, moment: _Moment | Failure) -> Outcome:
        written = moment if isinstance(moment, Failure) else attempt(self._write_last, moment)
        if isinstance(written, Failure):
            return self._write_failure(moment, written.reason)
        self._raise_what_broke()
        return "done", ""

    def _write_last(self, moment: _Moment) -> None:
        try:
            self._write_checkpoint(moment, last=True)
        except CheckpointError as error:
            if not durable.is_full(error):
                raise
            self._write_adapter_alone(moment)
            self._context.note(f"{self._run.spec.name}: its adapter is saved, its last checkpoint is not: {error}")
        else:
            self._export(moment.progress)

    def _write_adapter(self, progress: Progress) -> Outcome:
        exported = attempt(self._export, progress)
        return ("failed", exported.reason) if isinstance(exported, Failure) else ("done", "")

    def _write_interruption(self, moment: _Moment | Failure) -> Outcome:
        at, saved = f"interrupted at step {self._run.progress.step}", self._save(moment, last=True)
        if isinstance(saved, Failure):
            return "stopped", f"{at} and not saved: {saved.reason}"
        self._raise_what_broke()
        return "stopped", f"{at}; {saved} continues with resume"

    def _write_failure(self, moment: _Moment | Failure, reason: str) -> Outcome:
        saved = self._save(moment, last=True)
        if isinstance(saved, Failure):
            return "failed", f"{reason}; its state could not be saved ({saved.reason})"
        return "failed", f"{reason}; its last finite state is {saved}"

    def _save(self, moment: _Moment | Failure, *, last: bool) -> Path | Failure:
        return moment if isinstance(moment, Failure) else attempt(self._write_checkpoint, moment, last=last)

    def _write_checkpoint(self, moment: _Moment, *, last: bool) -> Path:
        """Durable before older ones go; not written again where the newest one holds this moment. `last`: no later save makes up for
        this one, so on a full disk it gets the room that is kept for it, and that of older checkpoints.
        """
        self._context.before_save()
        run, state, p = self._run, moment.state, moment.progress
        directory = run.directory / f"checkpoint-{p.step}"
        if self._written is not None and replace(p, seconds=self._written.seconds) == self._written and directory.is_dir():
            return directory

        def write() -> None:
            checkpoint.save(directory, state, p, run.spec, self._context.base_model)
            self._written = p
            needed = self._needed_by_resume(p)
            durable.prune(run.directory, run.spec.save_total_limit, needed, whole=directory.name)
            self._context.reserve.keep(run.directory, needed)

        self._write_durably(write, checkpoint.checkpoint_bytes(state.layout, state.params.element_size()) if last else 0)
        self._context.reserve.saved()
        return directory

    def _needed_by_resume(self, p: Progress) -> set[str]:
        """The checkpoints that a resume from this moment needs."""
        best = {f"checkpoint-{p.best_step}"} if self._run.spec.load_best_model_at_end and p.best_step >= 0 else set[str]()
        return {f"checkpoint-{p.step}", *best}

    def _exported_step(self, p: Progress) -> int:
        return p.best_step if self._run.spec.load_best_model_at_end and p.best_step >= 0 else p.step

    def _export(self, p: Progress) -> None:
        run, wanted = self._run, self._exported_step(p)
        chosen = run.directory / f"checkpoint-{wanted}"
        if not chosen.is_dir():
            raise CheckpointError(
                f"{chosen}: the checkpoint of the best evaluation is gone, or could not be written. "
                f"checkpoint-{p.step} holds the last step; take it, or train again"
            )
        just_written = self._written is not None and self._written.step == wanted
        size = checkpoint.export_bytes(chosen)
        self._write_durably(lambda: checkpoint.export(chosen, run.directory, known_whole=just_written), size)
        self._context.reserve.keep(run.directory, self._needed_by_resume(p), ended=True)

    def _write_adapter_alone(self, moment: _Moment) -> None:
        """Where a last checkpoint has no room, its adapter may have, which is a third of it."""
        run, state = self._run, moment.state
        if self._exported_step(moment.progress) != moment.progress.step:
            self._export(moment.progress)
            return
        size = checkpoint.adapter_bytes(state.layout, state.params.element_size())
        self._write_durably(lambda: checkpoint.save_alone(run.directory, state, run.spec, self._context.base_model), size)

    def _write_durably(self, write: Callable[[], None], needed_bytes: int) -> None:
        """`write`; on a full disk, with `needed_bytes`, again with as much of the reserve, and again as long as older checkpoints can go.
        Raises CheckpointError.
        """
        reserve, name = self._context.reserve, self._run.spec.name
        try:
            with reserve.saving():
                write()
            return
        except CheckpointError as error:
            if not (durable.is_full(error) and needed_bytes):
                raise
            full = error
        with reserve.saving_alone():
            for make_room in (partial(reserve.release, name, needed_bytes), reserve.remove_older, reserve.remove_older):
                if not (what := make_room()):
                    continue
                self._context.note(f"{name}: the disk is full; {what}")
                try:
                    write()
                    return
                except CheckpointError as error:
                    if not durable.is_full(error):
                        raise
                    full = error
        raise full

    # ------------------------------------------------------------------------------------------------------------------

    def result(self, status: Status, reason: str = "") -> JobResult:
        """Write `result.json`, close the trackers and give back what was kept for this job on the disk."""
        run, p = self._run, self._run.progress
        best = run.spec.load_best_model_at_end
        result = JobResult(
            name=run.spec.name,
            status=status,
            reason=reason,
            rank=run.spec.r,
            steps=p.step,
            total_steps=run.total_steps,
            train_loss_first=finite(p.loss_first),
            train_loss=finite(sum(p.losses) / len(p.losses)) if p.losses else None,
            eval_loss_first=finite(p.eval_first),
            eval_loss=finite(p.best_eval if best else p.eval_last),
            eval_loss_best=finite(p.best_eval),
            best_step=p.best_step if p.best_step >= 0 else None,
            num_tokens=p.num_tokens,
            seconds=self.seconds,
            path=str(run.directory),
            sweep_of=run.spec.sweep_of,
            settings=dict(self._settings),
        )
        self._context.reserve.ended(run.spec.name)
        if status != "done":
            self._context.reserve.forget(run.directory)
        write_result(run.directory, result, self._context.note)
        if status == "done":
            self._write_card(result)
        self._tracker.close()
        return result

    def _write_card(self, result: JobResult) -> None:
        """One that was edited stays."""
        run, path = self._run, self._run.directory / CARD_FILE

        def write() -> None:
            if not path.exists() or is_unedited(path):
                report = cast("dict[str, Any]", run.train.meta["report"])
                durable.write_file(path, model_card(run.spec, self._context.base_model, report, asdict(result), run.directory))

        if isinstance(failed := attempt(write), Failure):
            self._context.note(f"{path}: {failed.reason}")


def _copy(progress: Progress) -> Progress:
    return replace(progress, losses=[*progress.losses], unlogged=[*progress.unlogged])


def write_result(directory: Path, result: JobResult, note: Callable[[str], None]) -> None:
    """`result.json`; where it cannot be written, the result still goes back to the caller."""
    path = directory / "result.json"

    def write() -> None:
        durable.make_directory(directory)
        durable.write_file(path, json.dumps(asdict(result), indent=1) + "\n")

    if isinstance(failed := attempt(write), Failure):
        note(f"{path}: {failed.reason}")
