"""How a run ended: the table of its jobs, the reasons of those that failed, each sweep best first, and the exit code."""

from __future__ import annotations

import math
import shlex
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tlora.cli.progress import STYLES
from tlora.cli.terminal import open_console, open_table, path_text, print_table, printable
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.wording.losses import RECENT_STEPS, incomparable
from tlora.wording.numbers import by_jobs, count_text, duration_text, loss_text, names_text, quantity, setting_text, shortened

if TYPE_CHECKING:
    from tlora.engine.train import JobResult, Results


def exit_code(results: Iterable[JobResult], signal_number: int | None) -> int:
    """0 if all jobs are done, 1 if one is not, 128 + n after signal n, as in a shell."""
    if signal_number is not None:
        return 128 + signal_number
    return 0 if all(result.status == "done" for result in results) else 1


def print_results(console: Console, results: Mapping[str, JobResult]) -> None:
    """The jobs in the order of the file, then what went wrong, then the sweeps."""
    wide = console.width >= 110
    print_table(console, _table(list(results.values()), wide))
    if any(result.train_loss is not None for result in results.values()):
        shown = "first step → mean of the last" if wide else "mean of the last"
        console.print(Text(f"train loss: {shown} {RECENT_STEPS} steps", style="dim"))
    if not wide:
        for parent in dict.fromkeys(Path(result.path).parent for result in results.values() if result.path):
            console.print(Text(f"adapters: {printable(path_text(parent / 'JOB'))}"), soft_wrap=True)
    _print_reasons(console, results.values())
    for sweep in dict.fromkeys(result.sweep_of for result in results.values() if result.sweep_of):
        console.print()
        members = [result for result in results.values() if result.sweep_of == sweep]
        print_table(console, _sweep_table(sweep, members))
        if why := incomparable(_orders(members), _by_eval(members)):
            console.print(Text(printable(why), style="yellow"), soft_wrap=True)


def _print_reasons(console: Console, results: Iterable[JobResult]) -> None:
    """Why jobs failed, lost steps or ended early; jobs with the same reason share a line."""
    lost: dict[tuple[str, str], list[str]] = {}
    early: list[tuple[str, str]] = []
    for result in results:
        if result.status == "failed" or _lost_steps(result):
            lost.setdefault((result.status, result.reason), []).append(result.name)
        elif result.status == "done" and result.reason:
            early.append((result.name, result.reason))
    for (status, reason), names in lost.items():
        console.print(Text(printable(f"{names_text(names)} {status}: {reason}"), style="red"), soft_wrap=True)
    for line in shortened(by_jobs(early)):
        console.print(Text(printable(line) if isinstance(line, str) else f"… and {line} more that ended early"), soft_wrap=True)


def _orders(results: Iterable[JobResult]) -> list[dict[str, Any]]:
    """The readable orders of jobs that have begun."""
    orders: list[dict[str, Any]] = []
    for result in filter(lambda result: result.path, results):
        with suppress(OSError, ValueError):
            orders.append(read_object(Path(result.path) / "job.json"))
    return orders


def print_end(console: Console, results: Results, again: list[str]) -> None:
    """The results, the page's path and, after a signal, how to resume with the arguments `again`. The adapters are saved by now: if stdout
    cannot be written, stderr says so and the run has not failed.
    """
    try:
        print_results(console, results)
        if results.report:
            console.print(f"\nreport: {path_text(results.report)}", soft_wrap=True)
        if results.signal_number is not None:
            console.print(f"\n{resume_line(results.values(), again, results.signal_number)}", soft_wrap=True)
    except (ConfigError, BrokenPipeError) as error:
        with suppress(OSError):
            open_console(stderr=True).print(
                f"the table of results could not be printed; result.json in each job's directory has the results: {error}", soft_wrap=True
            )


def resume_line(results: Iterable[JobResult], arguments: list[str], signal_number: int) -> str:
    """What was saved, and how to resume. `arguments` are those of the command that resumes."""
    name = signal.Signals(signal_number).name
    stopped = [result for result in results if result.status == "stopped"]
    if not stopped:
        return f"Interrupted by {name} after all jobs had ended"
    saved, lost = sum(map(_has_checkpoint, stopped)), sum(map(_lost_steps, stopped))
    counts = ((saved, "checkpointed"), (lost, "not saved"), (len(stopped) - saved - lost, "not started"))
    counted = ", ".join(f"{count} {what}" for count, what in counts if count)
    jobs = quantity(len(stopped), "job")
    return f"Interrupted by {name}; {jobs} unfinished: {counted}. Resume with: {shlex.join(['tlora', *arguments])}"


def _has_checkpoint(result: JobResult) -> bool:
    """Whether there is a checkpoint of the step at which the job stopped."""
    return bool(result.path) and (Path(result.path) / f"checkpoint-{result.steps}").is_dir()


def _lost_steps(result: JobResult) -> bool:
    """Whether the job was stopped after it had started, and its steps since the last checkpoint (if any) could not be saved."""
    return result.status == "stopped" and bool(result.path) and not _has_checkpoint(result)


def best_first(results: list[JobResult]) -> list[JobResult]:
    """By eval loss if the sweep has one, else by train loss; jobs without a finite loss last."""
    by_eval = _by_eval(results)
    return sorted(results, key=lambda result: (result.status == "failed", _score(result, by_eval)))


def _by_eval(results: Iterable[JobResult]) -> bool:
    return any(result.eval_loss_best is not None or result.eval_loss is not None for result in results)


def _score(result: JobResult, by_eval: bool) -> float:
    evaluated = result.eval_loss_best if result.eval_loss_best is not None else result.eval_loss
    score = evaluated if by_eval else result.train_loss
    return math.inf if score is None or math.isnan(score) else score


def _table(results: list[JobResult], wide: bool) -> Table:
    """`wide` adds the first losses and the path of each adapter."""
    table = open_table()
    table.add_column("job", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("rank", "steps", "train loss" if wide else "train", "eval loss" if wide else "eval", "tokens", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("adapter", overflow="fold")
    for result in shortened(results, lambda result: result.status == "failed"):
        if isinstance(result, int):
            table.add_row(f"… and {result} more", style="dim")
            continue
        table.add_row(
            Text(printable(result.name)),
            Text(result.status, style=STYLES.get(result.status, "")),
            str(result.rank),
            str(result.steps) if result.steps == result.total_steps else f"{result.steps}/{result.total_steps}",
            _course(result.train_loss_first, result.train_loss) if wide else loss_text(result.train_loss),
            _course(result.eval_loss_first, result.eval_loss) if wide else loss_text(result.eval_loss),
            count_text(result.num_tokens),
            duration_text(result.seconds),
            *([Text(printable(path_text(result.path)) if result.path else "")] if wide else []),
        )
    return table


def _course(first: float | None, last: float | None) -> str:
    return "" if first is None and last is None else f"{loss_text(first)} → {loss_text(last)}"


def _sweep_table(sweep: str, results: list[JobResult]) -> Table:
    fields = list(dict.fromkeys(key for result in results for key in result.settings))
    table = open_table(title=f"sweep {printable(sweep)}, best first", title_justify="left")
    table.add_column("")
    for field in fields:
        table.add_column(field, justify="right")
    for name in ("best eval loss", "at step", "train loss"):
        table.add_column(name, justify="right")
    table.add_column("job", overflow="fold")
    places = list(enumerate(best_first(results), start=1))
    for ranked in shortened(places, lambda ranked: ranked[1].status == "failed"):
        if isinstance(ranked, int):
            table.add_row("…", *[""] * (len(fields) + 3), f"and {ranked} more", style="dim")
            continue
        place, result = ranked
        best = result.eval_loss_best if result.eval_loss_best is not None else result.eval_loss
        table.add_row(
            str(place) if result.status != "failed" else result.status,
            *(printable(setting_text(result.settings.get(field, ""))) for field in fields),
            loss_text(best),
            "" if result.best_step is None else str(result.best_step),
            loss_text(result.train_loss),
            Text(printable(result.name)),
        )
    return table
