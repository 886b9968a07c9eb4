"""Files are written while others train: a disk that hangs stops nobody, and what was acknowledged is on it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import job, rows, sha256, steps_taken, train
from tlora import durable, manifest
from tlora.engine import run_monitor
from tlora.engine.driver import Records
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import CheckpointError
from tlora.group.engine import Engine
from tlora.group.reports import Ended
from tlora.store import checkpoint
from tlora.store.recorder import Recorder
from tlora.store.writer import Writer

PATIENCE_SECONDS = 600.0


class HangingDisk:
    """From the save of step `at` of the job `name` on, no write ends before `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, at: int) -> None:
        self.go, self.hangs = threading.Event(), threading.Event()
        save = checkpoint.save

        def hang(directory: Path, *args: Any) -> None:
            if directory.parent.name == name and directory.name == f"checkpoint-{at}":
                self.hangs.set()
                assert self.go.wait(PATIENCE_SECONDS), "nobody freed the disk: training waited for it"
            save(directory, *args)

        monkeypatch.setattr(checkpoint, "save", hang)


def watch_micro_batches(monkeypatch: pytest.MonkeyPatch, look: Callable[[Engine], None]) -> None:
    run_micro_batch = Engine.run_micro_batch

    def watched(engine: Engine) -> object:
        look(engine)
        return run_micro_batch(engine)

    monkeypatch.setattr(Engine, "run_micro_batch", watched)


@pytest.mark.parametrize("at", [2, 4], ids=["a checkpoint that is due", "the last one"])
def test_others_train_while_one_is_written(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The disk is freed only when the other job, and, where it has steps left, the job itself have taken theirs."""
    jobs = [job("saved", str(data / "a.jsonl"), save_steps=2, max_steps=4), job("other", str(data / "b.jsonl"), max_steps=9)]
    alone = train(base, tmp_path / "alone", jobs[:1], deterministic=True)
    disk, seen = HangingDisk(monkeypatch, "saved", at), list[str]()

    see_ended = Records.see_ended

    def look(records: Records, *, wait: bool = False) -> None:
        if disk.hangs.is_set() and not disk.go.is_set():
            assert "saved" not in records.results, "it ended before its adapter was on the disk"
            if "other" in records.ending and "saved" in records.ending:
                disk.go.set()
        see_ended(records, wait=wait)

    monkeypatch.setattr(Records, "see_ended", look)
    monkeypatch.setattr(run_monitor, "_SHOW_SECONDS", 0.0)
    watcher = Watcher(lambda progress: seen.extend(status_of(progress, "saved")), lambda _: None)
    results = train(base, tmp_path / "out", jobs, deterministic=True, watcher=watcher)
    assert [r.status for r in results.values()] == ["done", "done"] and "saving" in seen
    assert sha256(tmp_path / "out" / "saved") == sha256(Path(alone["saved"].path))
    durable.verify(tmp_path / "out" / "saved" / "checkpoint-4")
    assert steps_taken(tmp_path / "out" / "saved") == steps_taken(Path(alone["saved"].path))


def test_the_last_steps_are_shown_while_their_files_are_written(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However seldom one looks: the disk is freed only when it is seen that the job has taken its steps and is being saved."""
    disk = HangingDisk(monkeypatch, "saved", 4)
    monkeypatch.setattr(run_monitor, "_SHOW_SECONDS", PATIENCE_SECONDS)

    def look(progress: RunProgress) -> None:
        if [(each.status, each.step) for each in progress.jobs] == [("saving", 4)]:
            disk.go.set()

    results = train(base, tmp_path / "out", [job("saved", str(data / "a.jsonl"), max_steps=4)], watcher=Watcher(look, lambda _: None))
    assert results["saved"].status == "done"


def test_of_jobs_that_end_together_the_largest_is_written_first(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, order = Recorder.end, list[str]()

    def noted(self: Recorder, report: Ended) -> Any:
        assert report.status == "done" and report.state is not None
        order.append(f"r{report.state.layout.shapes[0].rank}")
        return end(self, report)

    monkeypatch.setattr(Recorder, "end", noted)
    jobs = [job(f"j{rank}", str(data / "a.jsonl"), r=rank, batch_size=2, max_steps=2) for rank in (2, 8, 4)]
    results = train(base, tmp_path / "out", jobs, token_budget=4096)
    assert {result.status for result in results.values()} == {"done"} and order == ["r8", "r4", "r2"]


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize("own", [{}, {"load_best_model_at_end": True, "eval_steps": 2, "learning_rate": 100.0}], ids=["last", "best"])
def test_nothing_is_written_or_read_twice(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], links: bool
) -> None:
    """The adapter is the checkpoint's file, and no file is read for its hash, but for an older checkpoint's that is handed over."""
    read = list[str]()
    monkeypatch.setattr(manifest, "sha256", lambda path, *beat, of=manifest.sha256: read.append(path.name) or of(path, *beat))
    monkeypatch.setattr(durable, "sha256", lambda path, *beat, of=durable.sha256: read.append(path.name) or of(path, *beat))
    if not links:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(1, "no links here")))
    source = {"path": str(data / "a.jsonl"), "eval_size": 3}
    result = train(base, tmp_path / "out", [job("one", source, save_steps=2, max_steps=4, **own)])["one"]
    assert (result.best_step != 4) == bool(own), "a learning rate of 100 does harm"
    directory, weights = tmp_path / "out" / "one", "adapter_model.safetensors"
    kept = f"checkpoint-{result.best_step if own else 4}"
    assert (directory / weights).samefile(directory / kept / weights) == links
    assert (directory / weights).read_bytes() == (directory / kept / weights).read_bytes()
    assert read.count(weights) == (1 if own else 0) and "optimizer.safetensors" not in read


def test_a_step_that_was_just_saved_is_not_saved_again(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an interruption at a step that was due, and by one right after a resume."""
    save, written = checkpoint.save, list[str]()
    monkeypatch.setattr(checkpoint, "save", lambda directory, *args: written.append(directory.name) or save(directory, *args))

    def look(engine: Engine) -> None:
        run = engine.runs.get("one")
        if run is not None and run.progress.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    watch_micro_batches(monkeypatch, look)
    jobs = [job("one", str(data / "a.jsonl"), save_steps=2, max_steps=4)]
    for resume in (False, True):
        result = train(base, tmp_path / "out", jobs, resume=resume, token_budget=128)["one"]  # several micro-batches a step
        assert (result.status, result.steps) == ("stopped", 2), result
    assert written == ["checkpoint-2"] and result.reason == "interrupted at step 2; checkpoint-2 continues with resume"


def status_of(progress: RunProgress, name: str) -> list[str]:
    return [each.status for each in progress.jobs if each.name == name]


def test_an_end_that_cannot_be_written_fails_its_job_alone(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job("lost", str(data / "a.jsonl"), max_steps=2), job("other", str(data / "b.jsonl"), max_steps=5)]
    export, notes = checkpoint.export, list[str]()

    def refuse(chosen: Path, directory: Path, **options: Any) -> None:
        if directory.name == "lost":
            raise CheckpointError("the disk says no")
        export(chosen, directory, **options)

    monkeypatch.setattr(checkpoint, "export", refuse)
    results = train(base, tmp_path / "out", jobs, watcher=Watcher(lambda _: None, notes.append))
    where = tmp_path / "out" / "lost" / "checkpoint-2"
    assert results["lost"].status == "failed" and results["lost"].reason == f"the disk says no; its last finite state is {where}"
    assert f"lost failed: {results['lost'].reason}" in notes and results["other"].status == "done"
    durable.verify(where)
    monkeypatch.undo()
    assert train(base, tmp_path / "out", jobs, resume=True)["lost"].status == "done"


def stumble_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The save of that step of the job "bad" meets a bug."""
    save = checkpoint.save

    def stumble(directory: Path, *args: Any) -> None:
        if directory.parent.name == "bad" and directory.name == f"checkpoint-{step}":
            raise AssertionError("a bug")
        save(directory, *args)

    monkeypatch.setattr(checkpoint, "save", stumble)


def test_a_bug_in_a_due_checkpoint_costs_a_note(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, and the next checkpoint that is due makes up for it."""
    stumble_at(monkeypatch, 1)
    notes: list[str] = []
    jobs = [job("bad", str(data / "a.jsonl"), save_steps=1, max_steps=4), job("other", str(data / "b.jsonl"), max_steps=4)]
    results = train(base, tmp_path / "out", jobs, watcher=Watcher(note=notes.append))
    assert {result.status for result in results.values()} == {"done"}
    assert "bad: checkpoint at step 1 failed, the job goes on without it: AssertionError: a bug" in notes


def test_a_bug_in_the_last_checkpoint_takes_nobody_with_it(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when the run is interrupted: the others are written all the same."""

    def look(engine: Engine) -> None:
        run = engine.runs.get("bad")
        if run is not None and run.progress.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    stumble_at(monkeypatch, 3)
    watch_micro_batches(monkeypatch, look)
    jobs = [job("bad", str(data / "a.jsonl"), save_steps=2, max_steps=40), job("other", str(data / "b.jsonl"), max_steps=40)]
    results = train(base, tmp_path / "out", jobs, token_budget=128)  # several micro-batches a step
    assert results["bad"].status == "stopped" and results["bad"].reason == "interrupted at step 3 and not saved: AssertionError: a bug"
    durable.verify(tmp_path / "out" / "bad" / "checkpoint-2")
    assert len(list((tmp_path / "out" / "other").glob("checkpoint-*"))) == 1


@pytest.mark.slow
def test_rows_and_checkpoints_of_a_cut_run_agree(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption waits for what was to be written before, and its own checkpoint is the newest."""
    jobs = [job("a", str(data / "a.jsonl"), save_steps=1, max_steps=30, save_total_limit=3)]
    whole = train(base, tmp_path / "whole", jobs, deterministic=True)
    calls: list[None] = []

    def look(_: Engine) -> None:
        calls.append(None)
        if len(calls) == 12:
            raise RuntimeError("the cable was pulled")

    watch_micro_batches(monkeypatch, look)
    with pytest.raises(RuntimeError, match="the cable"):
        train(base, tmp_path / "cut", jobs, deterministic=True)
    kept = sorted(int(path.name.split("-")[1]) for path in (tmp_path / "cut" / "a").glob("checkpoint-*"))
    assert len(kept) == 3 and kept == list(range(kept[-1] - 2, kept[-1] + 1))
    assert rows(tmp_path / "cut" / "a" / "metrics.jsonl")[-1]["step"] == kept[-1]
    assert sha256(Path(train(base, tmp_path / "cut", jobs, deterministic=True, resume=True)["a"].path)) == sha256(Path(whole["a"].path))


def test_writes_of_several_jobs_are_under_way_at_once() -> None:
    """Each waits for all the others to begin."""
    writer, all_begun = Writer(), threading.Barrier(4)
    futures = [writer.write(f"job {n}", lambda: all_begun.wait(PATIENCE_SECONDS)) for n in range(4)]
    assert sorted(future.result(PATIENCE_SECONDS) for future in futures) == [0, 1, 2, 3]
    writer.close()


def test_writes_of_a_job_are_in_order_and_only_so_many_behind() -> None:
    woken: list[int] = []
    writer, go, done = Writer(lambda: woken.append(len(done))), threading.Event(), list[int]()
    futures = [writer.write("a", lambda: go.wait(PATIENCE_SECONDS))]
    futures += [writer.write("a", lambda n=n: done.append(n) or True) for n in range(3)]
    fifth = threading.Thread(target=lambda: futures.append(writer.write("a", lambda: done.append(3) or True)))
    fifth.start()
    fifth.join(0.2)
    assert fifth.is_alive() and not done, "four are behind, and the fifth waits"
    go.set()
    fifth.join(PATIENCE_SECONDS)
    assert all(future.result(PATIENCE_SECONDS) for future in futures) and done == [0, 1, 2, 3]
    refused = writer.write("b", lambda: durable.write_file(Path("/nowhere/file"), b""))
    with pytest.raises(CheckpointError):
        refused.result(PATIENCE_SECONDS)
    assert len(woken) >= 5


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_without_a_thread_whoever_wants_it_written_writes(monkeypatch: pytest.MonkeyPatch, refused: int) -> None:
    """Containers limit them; of three writes one finds no thread."""
    start, starts, done = threading.Thread.start, list[str](), list[int]()

    def scarce(thread: threading.Thread) -> None:
        starts.append(thread.name)
        if len(starts) == refused + 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    writer = Writer()
    monkeypatch.setattr(threading.Thread, "start", scarce)
    for n in range(3):
        assert writer.write("a", lambda n=n: done.append(n) or n).result(PATIENCE_SECONDS) == n
        writer.close()
    assert done == [0, 1, 2]


def test_what_is_to_be_written_is_written_though_the_wait_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C, as the main thread begins to wait."""
    writer, go, done = Writer(), threading.Event(), list[int]()
    writer.write("a", lambda: go.wait(PATIENCE_SECONDS))
    for n in range(3):
        writer.write("a", lambda n=n: done.append(n))

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    wait = writer._changed.wait

    def wait_interrupted(seconds: float | None) -> bool:
        os.kill(os.getpid(), signal.SIGUSR1)
        return wait(seconds)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(writer._changed, "wait", wait_interrupted)
            writer.write("a", lambda: done.append(3))
    finally:
        signal.signal(signal.SIGUSR1, before)
        go.set()
    writer.close()
    assert done == [0, 1, 2, 3]
