"""What is drawn: the live table, the plain lines, the results and the sweeps, text made safe."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tlora.api import JobView, OrderedData, OrderSpec
from tlora.cli.progress import LINE_SECONDS, LiveView, PlainView, plain_line, progress_view
from tlora.cli.result_view import exit_code, print_results, resume_line
from tlora.cli.service_view import follow_table, print_job, print_jobs, why
from tlora.cli.terminal import open_console, open_table, path_text, print_table, printable, shows_live
from tlora.client.jobs import Sight
from tlora.engine.watcher import JobProgress, RunProgress, Watcher
from tlora.store.job_result import JobResult


def drawn(state: RunProgress, width: int = 130, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, markup=False)
    console.print(progress_view(state, width, height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def job(name: str, status: Any = "training", **fields: Any) -> JobProgress:
    return JobProgress(name, status, **({"rank": 16, "step": 5, "total_steps": 20, "loss": 1.25} | fields))


def test_the_table_has_a_row_per_job_and_a_total():
    jobs = (
        job("polite", tokens_per_second=1234.0, share=0.25, eta_seconds=139.0, eval_loss=0.5),
        job("sql", "queued", step=0, loss=None),
        job("x" * 63, "failed", reason="bad"),
    )
    lines = drawn(RunProgress(61.0, jobs, tokens_per_second=4936.0, padding=0.0123))
    assert lines[0].split() == ["job", "status", "step", "train", "loss", "eval", "loss", "tokens/s", "share", "ETA"]
    polite = [word for word in lines[1].split() if "━" not in word and word not in "╸╺"]
    assert polite == ["polite", "training", "5/20", "1.2500", "0.5000", "1,234", "25%", "2:19"]
    assert "━" in lines[1]
    assert lines[2].split()[:2] == ["sql", "queued"]
    assert lines[3].startswith("x" * 10) and "…" in lines[3]
    assert lines[4].split() == ["3", "jobs", "17%", "4,936"], "no ETA for the run while a queued job has none"
    assert lines[5] == "61.0 s  padding 1.2%"


@pytest.mark.parametrize("width", [80, 100, 130])
def test_no_line_is_wider_than_the_terminal_and_no_number_is_cut(width: int):
    jobs = tuple(
        job(
            f"sweep-r{i}-lr1e-4-bs8",
            "evaluating",
            step=1234,
            total_steps=2000,
            eval_loss=7.3519,
            tokens_per_second=4.5e4,
            share=1,
            eta_seconds=3700,
        )
        for i in range(3)
    )
    lines = drawn(RunProgress(1.0, jobs, 1e6), width)
    assert max(map(len, lines)) <= width
    assert all(all(text in line for text in ("1234/2000", "7.3519", "45 k", "100%", "1:01:40", "evaluating")) for line in lines[1:4])


@pytest.mark.parametrize("width", [30, 50])
def test_a_narrow_terminal_has_whole_names_and_the_first_columns(width: int):
    lines = drawn(RunProgress(1.0, (job("polite", eval_loss=0.5, tokens_per_second=45e3, eta_seconds=139.0), job("sql"))), width)
    assert max(map(len, lines)) <= width
    assert lines[1].split()[:3] == ["polite", "training", "5/20"] and lines[2].split()[:3] == ["sql", "training", "5/20"]
    assert not any("…" in line for line in lines[:3])


@pytest.mark.parametrize("width", [24, 30, 50, 80, 120])
def test_a_table_that_is_wider_than_the_terminal_is_cut_between_columns_and_each_part_has_the_names(width: int):
    table, name = open_table(title="all"), "a-sweep-r64-learning_rate1e-4-bs8"
    table.add_column("job", overflow="fold")
    for heading in ("rows", "samples", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    table.add_row(name, "1,234,567", "1,234,567", "30.8 k", "a reason " * 3)
    table.add_row("sql", "1", "2", "3", "")
    console = Console(file=io.StringIO(), width=width, markup=False)
    print_table(console, table)
    title, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert title.strip() == "all" and max(map(len, lines)) <= width
    parts = "\n".join(lines).split("job ")[1:]
    assert (len(parts) == 1) == (width >= 80)
    assert [word for part in parts for word in part.splitlines()[0].split()] == ["rows", "samples", "tokens", "why"]
    assert "\n".join(lines).count("1,234,567") == 2
    for part in parts:
        assert name in "".join(row.split("  ")[0].strip() for row in part.splitlines()[1:]) and "\nsql" in part


def test_a_hundred_jobs_fit_and_those_under_way_come_first():
    jobs = (*(job(f"q{i}", "queued") for i in range(90)), *(job(f"t{i}") for i in range(10)))
    lines = drawn(RunProgress(1.0, jobs), height=24)
    assert len(lines) < 24
    assert all(any(line.startswith(f"t{i} ") for line in lines) for i in range(10))
    hidden = next(line for line in lines if line.startswith("…"))
    shown = sum(line.startswith("q") for line in lines)
    assert hidden == f"… and {90 - shown} queued"


def test_the_live_view_shows_the_stage_and_notes_above_it():
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30, markup=False)
    with LiveView(console) as view:
        view.progress(RunProgress(0.0, (job("a", "preparing"),), stage="tokenizing a"))
        view.note("[red]checkpoint\x1b]0;title\x07")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "tokenizing a" in text and "[red]checkpoint\ufffd]0;title\ufffd" in text


def test_a_command_without_jobs_shows_its_stage_alone():
    shown = Watcher(progress=lambda state: lines.extend(drawn(state)))
    lines: list[str] = []
    shown.stages()("downloading org/name: 1.0 GB of 2.0 GB")
    assert len(lines) == 1 and lines[0].startswith("downloading org/name: 1.0 GB of 2.0 GB  ")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("device", "one", "several"), [("cuda:0", "GPU 1", "GPUs 1,0"), ("cpu", "CPU process 1", "CPU processes 1,0")])
def test_a_line_says_where_a_job_is_and_a_cpu_is_no_gpu(device: str, one: str, several: str):
    for parts_on, where in (((), one), ((0,), several)):
        jobs = (job("a", gpu=1, parts_on=parts_on),)
        console = Console(file=io.StringIO(), width=200, markup=False)
        PlainView(console, Clock()).progress(RunProgress(1.0, jobs, device=device))
        (line,) = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert line.startswith(f"[1.0 s] a: training on {where}, step")
        assert ("GPU" in drawn(RunProgress(1.0, jobs, device=device))[0]) == (device != "cpu")


@pytest.mark.parametrize("width", [60, 80, 100, 130])
def test_a_servers_jobs_have_their_names_and_whole_ids_on_a_narrow_terminal(width: int):
    identity = f"job-{'0123456789ab' * 2}"
    order = OrderSpec(base_model="base", name="sql", data=OrderedData(file="file-1"))
    view = JobView(
        id=identity, name="sql", status="succeeded", base_model="base", created_at=0.0, steps=60, total_steps=60, order=order, reason="why"
    )
    console = Console(file=io.StringIO(), width=width, markup=False)
    print_jobs(console, [view])
    head, *rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split()[:3] == ["job", "id", "status"] and all(len(line) <= width for line in rows)
    assert rows[0].startswith("sql ") and "succeeded" in rows[0] and "60/60" in rows[0] and "why" in rows[0]
    start, stop = head.index("id"), head.index("status")
    assert "".join(line[start:stop].strip() for line in rows) == identity


@pytest.mark.parametrize("width", [50, 80, 140])
def test_a_long_reason_leaves_the_other_columns_of_watched_jobs_whole(width: int):
    """It gives way to them: names, steps and losses were squeezed out of sight."""
    order = OrderSpec(base_model="base", name="sql", data=OrderedData(file="file-1"))
    facts = {"id": "job-1", "base_model": "base", "created_at": 0.0, "order": order, "total_steps": 60}
    running = JobView.model_validate(facts | {"name": "sql", "status": "running", "steps": 23, "train_loss": 2.5})
    full = running.model_copy(update={"waiting_for": "room on the disk"})
    queued = JobView.model_validate(facts | {"name": "fields", "status": "queued", "waiting_for": "a GPU that it fits on: " * 9})
    console = Console(file=io.StringIO(), width=width, markup=False)
    assert (why(running), why(full), why(full.model_copy(update={"status": "succeeded"}))) == ("", "room on the disk", "")
    console.print(follow_table(Sight((running, queued)), width, 40))
    head, first, second, *_ = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    losses = width > 50
    assert head.split() == ["job", "status", "step", *(["train", "loss"] if losses else []), "why"]
    assert first.split() == ["sql", "running", "23/60", *(["2.5000"] if losses else [])]
    assert second.startswith("fields  queued") and "0/60" in second and second.endswith("…") and len(second) <= width


def test_plain_lines_come_at_most_every_ten_seconds_for_a_job():
    clock, console = Clock(), Console(file=io.StringIO(), width=200, markup=False)
    view = PlainView(console, clock)
    for tick in range(400):  # a hundred seconds of four states a second
        clock.now = 100.0 + tick / 4
        view.progress(
            RunProgress(
                tick / 4, (job("a", step=tick + 1, tokens_per_second=10.0, share=0.5, eta_seconds=60.0), job("b", "queued", step=0))
            )
        )
    view.progress(RunProgress(100.0, (job("a", "done", step=400, num_tokens=5000, eval_loss=0.5), job("b", "failed", reason="why"))))
    view.progress(RunProgress(101.0, (job("a", "done"), job("b", "failed"))))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 100 / LINE_SECONDS + 2
    assert lines[0] == "[0.0 s] a: training, step 1/20, train loss 1.2500, 10 tokens/s, share 50%, ETA 60.0 s"
    assert lines[-2:] == [
        "[1 min 40 s] a: done, step 400/20, train loss 1.2500, eval loss 0.5000, 5,000 tokens",
        "[1 min 40 s] b: failed, step 5/20, train loss 1.2500, 0 tokens",
    ]
    assert plain_line(2.0, JobProgress("b", "failed", 16)) == "[2.0 s] b: failed", "it did not come to know its steps"


def result(name: str, status: Any = "done", **fields: Any) -> JobResult:
    return JobResult(name, status, **fields)


def printed(results: list[JobResult], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False)
    print_results(console, {item.name: item for item in results})
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_results_tell_how_each_job_began_and_ended():
    fields = {
        "rank": 8,
        "steps": 50,
        "total_steps": 50,
        "train_loss_first": 7.5,
        "train_loss": 1.25,
        "eval_loss_first": 7.25,
        "eval_loss": 1.5,
        "num_tokens": 12345,
        "seconds": 61.5,
        "path": "out/polite",
    }
    text = printed([result("polite", **fields), result("bad", "failed", reason="row 3")])
    row = text.splitlines()[1].split()
    assert row == ["polite", "done", "8", "50", "7.5000", "→", "1.2500", "7.2500", "→", "1.5000", "12.3", "k", "61.5", "s", "out/polite"]
    assert "bad failed: row 3" in text
    narrow = printed([result("polite", **fields)], width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert (
        narrow.splitlines()[1].split() == ["polite", "done", "8", "50", "1.2500", "1.5000", "12.3", "k", "61.5", "s"]
        and "adapters: out/JOB" in narrow
    )


def test_a_sweep_is_told_best_first():
    settings = [
        {"r": 8, "learning_rate": 1e-4},
        {"r": 8, "learning_rate": 3e-4},
        {"r": 32, "learning_rate": 1e-4},
        {"r": 32, "learning_rate": 3e-4},
    ]
    losses = [0.5, math.nan, 0.25, None]
    jobs = [
        result(
            f"s{i}", "failed" if loss is None else "done", eval_loss=loss, eval_loss_best=loss, sweep_of="s", settings=chosen, best_step=7
        )
        for i, (loss, chosen) in enumerate(zip(losses, settings, strict=True))
    ]
    text = printed([*jobs, result("other")])
    table = text[text.index("sweep s, best first") :].splitlines()
    assert table[1].split() == ["r", "learning_rate", "best", "eval", "loss", "at", "step", "train", "loss", "job"]
    assert [line.split()[-1] for line in table[2:6]] == ["s2", "s0", "s1", "s3"]
    assert table[2].split()[:5] == ["1", "32", "0.0001", "0.2500", "7"] and table[5].split()[0] == "failed"
    assert "other" not in "\n".join(table)


def test_losses_that_do_not_rank_a_sweep_are_called_that(tmp_path: Path):
    jobs = []
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.json").write_text(f'{{"data": {{"path": "x", "eval_size": 3, "eval_seed": {seed}}}}}')
        jobs.append(result(name, eval_loss=1.0, path=str(tmp_path / name), sweep_of="s", settings={"eval_seed": seed}))
    assert "these eval losses are not comparable: the jobs differ in eval_seed, and so in what a loss is measured on" in printed(jobs)
    assert "not comparable" not in printed([jobs[0], replace(jobs[1], path="")])


@pytest.mark.parametrize(
    ("statuses", "number", "code"),
    [(["done", "done"], None, 0), (["done", "failed"], None, 1), (["stopped"], None, 1), (["stopped"], 2, 130), (["failed"], 15, 143)],
)
def test_exit_codes(statuses: list[Any], number: int | None, code: int):
    assert exit_code([result("a", status) for status in statuses], number) == code


def interrupted(directory: Path, name: str, steps: int, *checkpoints: int, reason: str = "") -> JobResult:
    for step in checkpoints:
        (directory / name / f"checkpoint-{step}").mkdir(parents=True)
    return result(name, "stopped", reason=reason, steps=steps, total_steps=9, path=str(directory / name))


def test_an_interruption_tells_what_was_saved(tmp_path: Path):
    saved, also = interrupted(tmp_path, "saved", 5, 3, 5), interrupted(tmp_path, "also", 0, 0)
    lost = interrupted(tmp_path, "lost", 5, 3, reason="interrupted at step 5 and not saved: cannot write")
    never, waiting = interrupted(tmp_path, "never", 4), result("waiting", "stopped", reason="interrupted before it began")
    done, failed = result("done", path="out/done"), result("failed", "failed", path="out/failed")

    def line(*results: JobResult) -> str:
        return resume_line(results, ["train", "jobs.yaml", "--resume"], 2)

    again = " Resume with: tlora train jobs.yaml --resume"
    assert line(saved, also, done) == f"Interrupted by SIGINT; 2 jobs unfinished: 2 checkpointed.{again}"
    assert line(lost) == f"Interrupted by SIGINT; 1 job unfinished: 1 not saved.{again}"
    everything = "5 jobs unfinished: 2 checkpointed, 2 not saved, 1 not started"
    assert line(saved, done, lost, failed, never, waiting, also) == f"Interrupted by SIGINT; {everything}.{again}"
    assert line(done, failed) == "Interrupted by SIGINT after all jobs had ended"
    told = printed([saved, lost, waiting])
    assert "lost stopped: interrupted at step 5 and not saved: cannot write" in told
    assert "waiting stopped" not in told and "saved stopped" not in told


def test_text_from_outside_cannot_steer_a_terminal():
    assert printable("a\x1b[31mb\rc\x07d\u202ee\x9bf\ud800") == "a\ufffd[31mb\ufffdc\ufffdd\ufffde\ufffdf\ufffd"
    assert printable("tab\tline\nümläut 你好 👩\u200d👩") == "tab\tline\nümläut 你好 👩\u200d👩"


def test_paths_are_as_short_as_they_can_be(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert path_text(tmp_path / "out" / "a") == "out/a"
    assert path_text(tmp_path.parent / "elsewhere") == str(tmp_path.parent / "elsewhere")


def test_a_pipe_is_wide_and_not_live(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    console = open_console()
    assert console.width == 200 and not shows_live(console)
    assert not shows_live(Console(force_terminal=True, _environ={"TERM": "dumb"}))


@pytest.mark.parametrize("count", [100, 500])
def test_a_large_sweep_is_summarised(count: int):
    """Lines, results and sweep of so many jobs, a failed one among them, are read at a glance; small runs lose no row."""
    names = [f"sweep-{i}" for i in range(1, count + 1)]
    console = Console(file=io.StringIO(), width=200, markup=False)
    clock = Clock()
    view = PlainView(console, clock)
    for tick in range(200):  # fifty seconds
        clock.now += 0.25
        running = tuple(job(name, "done" if i < tick // 4 else "training", step=min(tick, 20)) for i, name in enumerate(names))
        view.progress(RunProgress(tick / 4, running, tokens_per_second=900.0))
        view.note(f"{names[tick % count]}: its checkpoint is late")
    view.note("other: its checkpoint is late")
    ends = tuple(job(name, "failed" if name == "sweep-77" else "done", step=20) for name in names)
    for _ in range(2):
        view.progress(RunProgress(51.0, ends))
    view.close()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 20
    assert lines[-1] == f"[51.0 s] {count} jobs: 1 failed, {count - 1} done, step {20 * count:,}/{20 * count:,} of all"
    assert lines[0] == "sweep-1: its checkpoint is late" and "other: its checkpoint is late" in lines
    assert any(line.startswith("sweep-2, sweep-3, sweep-4, sweep-5 and ") and line.endswith(": its checkpoint is late") for line in lines)
    results = [
        result(
            name, "failed" if name == "sweep-77" else "done", reason="row 3" if name == "sweep-77" else "stopped early", sweep_of="sweep"
        )
        for name in names
    ]
    text = printed(results).splitlines()
    assert len(text) <= 60
    assert sum(line.startswith("sweep-77 ") for line in text) == 2, "its row and its reason"
    assert f"sweep-1, sweep-2, sweep-3, sweep-4 and {count - 5} more: stopped early" in text
    assert any(line.startswith("… and ") for line in text) and any(line.startswith(f"{names[-1]} ") for line in text)
    few = printed(results[:40]).splitlines()
    assert not any("more" in line.split(":")[0] and "…" in line for line in few) and all(
        any(name in line for line in few) for name in names[:40]
    )


def test_a_running_job_has_its_losses():
    """Alone and in a list: they stood in the result. Settings that are not set are not shown, and a number of rows is whole."""

    order = OrderSpec(base_model="base", name="sql", data=OrderedData(file="file-1", eval_size=50), eval_steps=1)
    facts = {"id": "job-1", "name": "sql", "status": "running", "base_model": "base", "created_at": 0.0, "steps": 2, "total_steps": 60}
    view = JobView.model_validate(facts | {"order": order, "train_loss": 2.0, "eval_loss": 1.5})
    console = Console(file=io.StringIO(), width=200, markup=False)
    print_job(console, view, [])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"train loss +2\.0000", text) and re.search(r"eval loss +1\.5000", text)
    assert "metadata" not in text and re.search(r"eval_size 50, ", text)
    listing = Console(file=io.StringIO(), width=200, markup=False)
    print_jobs(listing, [view])
    assert re.search(r"running +2/60 +2\.0000 +1\.5000", listing.file.getvalue())  # type: ignore[attr-defined]
