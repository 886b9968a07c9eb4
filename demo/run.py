"""`make demo`: trains the four jobs of jobs.yaml together, shows what each learned, and fails if a promise of the README breaks."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from checkers import CHECKERS
from rich.table import Table
from rich.text import Text
from transformers.utils import logging as transformers_logging

from tlora.cli.progress import LiveView, PlainView
from tlora.cli.terminal import open_console, path_text, printable, shows_live
from tlora.engine.generate import Sampling, answer, open_adapter
from tlora.engine.train import JobResult, train
from tlora.engine.watcher import Watcher
from tlora.errors import TloraError
from tlora.jobs_file import read_jobs_file

HERE = Path(__file__).parent
MIN_EVAL_FALL = 0.30
MAX_SCORE_BEFORE, MIN_SCORE_AFTER = 0.10, 0.80
MAX_ANSWER_TOKENS = 48  # the longest right answer has 27


@dataclass(frozen=True)
class Trial:
    """One job's held-out prompts, answered by the base alone and with the job's adapter."""

    prompts: list[str]
    before: list[str]
    after: list[str]
    right_before: list[bool]
    right_after: list[bool]

    @property
    def scores(self) -> tuple[float, float]:
        """Shares of right answers, before and after."""
        return sum(self.right_before) / len(self.prompts), sum(self.right_after) / len(self.prompts)


def try_out(job: str, adapter: Path) -> Trial:
    """Answer the 50 held-out prompts of `job` twice, in one batch each, and let the job's checker judge."""
    lines = (HERE / "data" / f"{job}.heldout.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    model, sampling = open_adapter(adapter, device="cpu"), Sampling(max_new_tokens=MAX_ANSWER_TOKENS)
    before, after = (answer(model, prompts, sampling, adapted=adapted) for adapted in (False, True))
    right_before, right_after = ([CHECKERS[job](*pair) for pair in zip(prompts, answers, strict=True)] for answers in (before, after))
    return Trial(prompts, before, after, right_before, right_after)


def broken_promises(results: dict[str, JobResult], trials: dict[str, Trial]) -> list[str]:
    """What did not hold, in words; empty when all did. Time is no promise: the machine may be slow, or busy."""
    broken: list[str] = []
    for job, result in results.items():
        if result.status != "done":
            broken.append(f"{job}: {result.status}: {result.reason}")
            continue
        first, last = result.eval_loss_first, result.eval_loss
        if first is None or last is None or not last <= (1 - MIN_EVAL_FALL) * first:
            broken.append(f"{job}: eval loss went from {first} to {last}; it must fall by {MIN_EVAL_FALL:.0%}")
        before, after = trials[job].scores
        if before > MAX_SCORE_BEFORE or after < MIN_SCORE_AFTER:
            due = f"at most {MAX_SCORE_BEFORE:.0%} and at least {MIN_SCORE_AFTER:.0%} are due"
            broken.append(f"{job}: {before:.0%} of the held-out prompts right before and {after:.0%} after; {due}")
    return broken


def results_table(results: dict[str, JobResult]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")  # fits 80 columns
    table.add_column("job", no_wrap=True)
    for name in ("rank", "steps", "train loss", "eval loss", "tokens", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("path", overflow="fold")
    for result in results.values():
        losses = ((result.train_loss_first, result.train_loss), (result.eval_loss_first, result.eval_loss))
        table.add_row(
            result.name,
            str(result.rank),
            str(result.steps),
            *("" if first is None or last is None else f"{first:.2f} → {last:.3f}" for first, last in losses),
            f"{result.num_tokens:,}",
            f"{result.seconds:.1f}",
            path_text(result.path),
        )
    return table


def answers_text(job: str, trial: Trial) -> Text:
    """The first held-out prompt of a job with both answers, and how many of all were right."""
    before, after = trial.scores
    text = Text(f"{job}", style="bold")
    text.append(f"   held-out prompts answered right: {before:.0%} before, {after:.0%} after\n", style="not bold")
    for title, value, style in (("asked", trial.prompts[0], ""), ("before", trial.before[0], "red"), ("after", trial.after[0], "green")):
        text.append(f"  {title:<7}", style="dim not bold")
        text.append(f"{_one_line(value)}\n", style=f"{style} not bold")
    return text


def _one_line(value: str) -> str:
    flat = printable(" ".join(value.split()))
    return flat if len(flat) <= 120 else flat[:119] + "…"


def main() -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    console = open_console()
    run = read_jobs_file(HERE / "jobs.yaml").model_copy(update={"output_dir": str(HERE / "out")})
    console.print(f"{len(run.jobs)} jobs over one frozen base ({path_text(run.base_model)})")
    try:
        with LiveView(console) if shows_live(console) else nullcontext(PlainView(console)) as view:
            started = time.monotonic()
            results = train(run, overwrite=True, device="cpu", watcher=Watcher(view.progress, view.note))
            seconds = time.monotonic() - started
    except TloraError as error:  # demo/out is in use or cannot be written: nothing that a traceback explains
        open_console(stderr=True).print(f"error: {printable(str(error))}", style="red", soft_wrap=True)
        return 2
    if results.signal_number is not None:
        return 128 + results.signal_number
    done = [name for name, result in results.items() if result.status == "done"]
    trials = {name: try_out(name, Path(results[name].path)) for name in done}
    console.print()
    for name, trial in trials.items():
        console.print(answers_text(name, trial), soft_wrap=True)
    console.print(results_table(results))
    console.print(f"\ntrained together in {seconds:.1f} s; report: {path_text(results.report or '')}", soft_wrap=True)
    broken = broken_promises(results, trials)
    for line in broken:
        console.print(f"broken promise: {line}", style="bold red", soft_wrap=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
