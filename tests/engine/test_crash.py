"""Kills, signals and rot: a resumed job ends with the adapter that it would have had, and each of its steps stands in its metrics once.

Each run is a child forked from this process, which has imported everything; the parent only reads what the child left. A child kills
itself, at a call that is counted: a parent that waits for a moment may come too late on a fast machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_runs import TWO_LINEARS, job, rows, sha256, steps_taken, train
from tlora import durable
from tlora.engine import train as front_door
from tlora.group import stream as group_stream
from tlora.group.stream import Stream
from tlora.json_file import read_object
from tlora.store import recorder
from tlora.store.recorder import Recorder
from tlora.supermodel.batch import BatchRow

DAMAGES = ["flipped bit", "truncated", "removed", "swapped", "manifest"]
SYSTEM_CALLS = ("fsync", "rename", "replace", "link", "mkdir", "unlink", "rmdir")


def crash_jobs(data: Path) -> list[dict[str, Any]]:
    """A job of many checkpoints with dropout, one that keeps its best and stops early, one that is done soon, one that starts late."""
    own = {"path": str(data / "a.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    best = {"eval_steps": 2, "load_best_model_at_end": True, "early_stopping_patience": 2}
    return [
        job("often", str(data / "c.jsonl"), lora_dropout=0.1, save_steps=1, max_steps=7, logging_steps=2, target_modules=TWO_LINEARS),
        job("best", own, **best, save_steps=3, max_steps=8, learning_rate=0.1, save_total_limit=1, target_modules=TWO_LINEARS),
        job("short", str(data / "b.jsonl"), max_steps=2, r=9),
        job("rare", str(data / "d.jsonl"), save_steps=100, max_steps=5, weight=0.3, target_modules=TWO_LINEARS),
    ]


class Runs:
    """A base, its orders, and what an uninterrupted run makes of them."""

    def __init__(self, base: Path, data: Path, directory: Path) -> None:
        self.base, self.jobs = base, crash_jobs(data)
        train(base, directory / "whole", self.jobs, deterministic=True)  # tokenizes; children share it
        self.whole = directory / "whole"
        self.shas = {name: sha256(self.whole / name) for name in self.names}

    @property
    def names(self) -> list[str]:
        return [fields["name"] for fields in self.jobs]

    def child(self, out: Path, before: Callable[[], object] = lambda: None) -> int:
        """Train or resume in a forked child, without the page at the end, which is a third of its time; its wait status."""

        def run() -> None:
            front_door.write_report = lambda _: out
            before()
            train(self.base, out, self.jobs, deterministic=True, resume=out.exists())

        return os.waitpid(fork(run), 0)[1]

    def calls(self, out: Path) -> int:
        """How many functions a whole run calls in its main thread."""
        reading, writing = os.pipe()

        def count() -> None:
            seen = watch_calls()
            leave = os._exit
            os._exit = lambda status: (sys.setprofile(None), os.write(writing, str(next(seen)).encode()), leave(status))

        assert self.child(out, count) == 0
        os.close(writing)
        with os.fdopen(reading) as stream:
            return int(stream.read())

    def check(self, out: Path, what: object) -> None:
        """All is as in the uninterrupted run: adapters, losses, each step once, model cards, nothing left over."""
        for name in self.names:
            assert sha256(out / name) == self.shas[name], (what, name)
            assert numbers(out / name) == numbers(self.whole / name), (what, name)
            leftovers = [path.name for path in (out / name).iterdir() if path.name.startswith("tmp-") or path.name.endswith(".replaced")]
            assert not leftovers, (what, name, leftovers)
            assert (out / name / "README.md").is_file(), (what, name)
        seconds = [row["seconds"] for row in rows(out / "run.jsonl")] if (out / "run.jsonl").exists() else []
        assert seconds == sorted(seconds), what  # none at all where the kill came after the last step and before the first row


def numbers(directory: Path) -> list[dict[str, Any]]:
    """Rows of metrics without their times."""
    return [{k: v for k, v in row.items() if "second" not in k} for row in rows(directory / "metrics.jsonl")]


def fork(action: Callable[[], object]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the test runner, which the child does not use
        child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            with Path(os.devnull).open("w") as silent:
                os.dup2(silent.fileno(), 2)
            action()
            os._exit(0)
        os._exit(1)
    return child


@pytest.fixture(scope="module")
def runs(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(base, data, tmp_path_factory.mktemp("crash"))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch_calls(at: int = 0) -> Iterator[int]:
    """Count each call of a function, ours or a library's, that this thread makes from now on; die before call number `at`."""
    seen = itertools.count()

    def look(_frame: object, event: str, _function: object) -> None:
        if event in ("call", "c_call") and next(seen) == at > 0:
            die()

    sys.setprofile(look)
    return seen


def die_at_call(at: int) -> Callable[[], None]:
    """Patch this process: it dies before its call number `at` of the system calls that a durable write is made of."""
    left = [at]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                die()
            return call(*args, **kwargs)

        return wrapper

    def patch() -> None:
        for name in SYSTEM_CALLS:
            setattr(os, name, counted(getattr(os, name)))

    return patch


def count_calls(runs: Runs, out: Path) -> int:
    """How many such calls a whole run makes, written by the child that made it."""
    reading, writing = os.pipe()
    found = [0]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            found[0] += 1
            return call(*args, **kwargs)

        return wrapper

    def patch() -> None:
        for name in SYSTEM_CALLS:
            setattr(os, name, counted(getattr(os, name)))
        atexit = os._exit
        os._exit = lambda status: (os.write(writing, str(found[0]).encode()), atexit(status))

    assert runs.child(out, patch) == 0
    os.close(writing)
    with os.fdopen(reading) as stream:
        return int(stream.read())


def until_done(runs: Runs, out: Path) -> int:
    """Resume until nothing interrupts any more; how often it took."""
    for attempt in range(1, 4):
        if runs.child(out) == 0:
            return attempt
    raise AssertionError("a resumed run does not end")


def kill_at_random(runs: Runs, directory: Path, count: int, seed: int) -> None:
    """Each moment is a call of any function, so that no machine is too fast for it."""
    rng, killed = random.Random(seed), 0
    calls = runs.calls(directory / "calls")
    for number in range(count):
        out = directory / str(number)
        for again in range(rng.choice([1, 1, 2, 3])):  # a resumed run may be killed as well, or may end before
            at = rng.randrange(1, calls * 9 // 10)
            status = runs.child(out, lambda at=at: watch_calls(at))
            assert status == signal.SIGKILL or (again and status == 0), (number, at, status)
            killed += status == signal.SIGKILL
        until_done(runs, out)
        runs.check(out, number)
        shutil.rmtree(out)
    print(f"{killed} kills at random moments of {count} runs, 0 adapters differ")


def kill_at_calls(runs: Runs, directory: Path, calls: list[int]) -> None:
    for at in calls:
        out, left = directory / str(at), at
        while (status := runs.child(out, die_at_call(left))) != signal.SIGKILL:  # a run whose threads wait otherwise makes some calls fewer
            assert status == 0 and left > 0.8 * at, (at, left, status)
            runs.check(out, left)
            shutil.rmtree(out)
            left -= 8
        until_done(runs, out)
        runs.check(out, at)
        shutil.rmtree(out)
    print(f"killed before {len(calls)} system calls of a run, 0 adapters differ")


def test_kill_at_random_moments(runs: Runs, tmp_path: Path) -> None:
    kill_at_random(runs, tmp_path, 1, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_hundred_kills_at_random_moments(runs: Runs, tmp_path: Path) -> None:
    kill_at_random(runs, tmp_path, 100, seed=2)


@pytest.mark.slow
def test_kill_at_steps_of_a_durable_write(runs: Runs, tmp_path: Path) -> None:
    total = count_calls(runs, tmp_path / "counted")
    assert total > 200
    kill_at_calls(runs, tmp_path, sorted({1, total, *random.Random(3).sample(range(3, total), 3)}))


def test_a_kill_before_the_last_files_of_a_job_costs_none_of_them(runs: Runs, tmp_path: Path) -> None:
    """The model card is written before `result.json`, after which a resume does not open the job again."""
    out = tmp_path / "out"

    def die_at_the_card() -> None:
        recorder.model_card = lambda *_: die()

    assert runs.child(out, die_at_the_card) == signal.SIGKILL
    until_done(runs, out)
    runs.check(out, "card")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_kill_at_every_step_of_a_durable_write(runs: Runs, tmp_path: Path) -> None:
    kill_at_calls(runs, tmp_path, list(range(1, count_calls(runs, tmp_path / "counted") + 1)))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1))]
)
def test_a_signal_checkpoints_every_job(runs: Runs, tmp_path: Path, number: signal.Signals) -> None:
    """The signal comes in the middle of a global batch; a step later would be too late to lose nothing."""
    out = tmp_path / "out"

    def signalled() -> None:
        compute, count = Stream.compute, [0]

        def counted(*args: Any) -> Any:
            count[0] += 1
            if count[0] == 9:
                os.kill(os.getpid(), number)
            return compute(*args)

        Stream.compute = counted  # type: ignore[method-assign]
        results = train(runs.base, out, runs.jobs, deterministic=True)
        (tmp_path / "said").write_text("\n".join(f"{r.name} {r.status} {r.steps} {r.reason}" for r in results.values()))
        assert results.signal_number == number

    assert os.waitpid(fork(signalled), 0)[1] == 0
    said = (tmp_path / "said").read_text()
    assert "often stopped" in said and "continues with resume" in said and (out / "report.html").exists()
    for name in ("often", "rare"):  # also the one that would not have saved by itself
        steps = rows(out / name / "metrics.jsonl")[-1]["step"] if (out / name / "metrics.jsonl").exists() else 0
        newest, notes = durable.newest_verified(out / name)
        assert newest is not None and not notes and int(newest.name.split("-")[1]) >= steps
    until_done(runs, out)
    runs.check(out, number)


def test_two_interrupts_end_at_once(runs: Runs, tmp_path: Path) -> None:
    def signalled() -> None:
        compute = Stream.compute

        def interrupting(*args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            return compute(*args)

        Stream.compute = interrupting  # type: ignore[method-assign]
        try:
            train(runs.base, tmp_path / "out", runs.jobs, deterministic=True)
        except KeyboardInterrupt:
            os._exit(7)

    assert os.waitstatus_to_exitcode(os.waitpid(fork(signalled), 0)[1]) == 7
    assert not list((tmp_path / "out" / "often").glob("checkpoint-*"))
    assert read_object(tmp_path / "out" / "run.json")["status"] == "stopped"  # the command line says from this file how to resume
    until_done(runs, tmp_path / "out")
    runs.check(tmp_path / "out", "after two interrupts")


def stopped_run(runs: Runs, out: Path, after_saves: int) -> None:
    """A run killed after so many checkpoints have been acknowledged."""

    def dying() -> None:
        save, left = Recorder._write_checkpoint, [after_saves]

        def counted(*args: Any, **options: Any) -> Path:
            path = save(*args, **options)
            left[0] -= 1
            if left[0] == 0:
                die()
            return path

        Recorder._write_checkpoint = counted  # type: ignore[method-assign]

    assert runs.child(out, dying) == signal.SIGKILL


@pytest.mark.parametrize("how", ["flipped bit", *(pytest.param(how, marks=pytest.mark.soak) for how in DAMAGES[1:])])
def test_a_damaged_checkpoint_is_found_and_the_one_before_taken(runs: Runs, tmp_path: Path, how: str) -> None:
    out = tmp_path / "out"
    stopped_run(runs, out, 9)
    newest, notes = durable.newest_verified(out / "often")
    assert newest is not None and not notes and len(list((out / "often").glob("checkpoint-*"))) == 2
    damage(newest, how, random.Random(how))
    until_done(runs, out)
    runs.check(out, how)
    assert (out / "often" / f"bad-{newest.name}").is_dir()


def damage(checkpoint: Path, how: str, rng: random.Random) -> None:
    path = checkpoint / rng.choice(["adapter_model.safetensors", "optimizer.safetensors", "state.json", "adapter_config.json"])
    content = bytearray(path.read_bytes())
    if how == "flipped bit":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif how == "removed":
        path.unlink()
    elif how == "swapped":
        (checkpoint / "optimizer.safetensors").write_bytes((checkpoint / "adapter_model.safetensors").read_bytes())
    else:
        (checkpoint / "MANIFEST.json").write_text("{}")


@pytest.mark.slow
def test_each_sample_is_taken_once_a_step(runs: Runs, data: Path, tmp_path: Path) -> None:
    """What goes into the micro-batches, over a run that is killed and resumed, is for each step that counted the same set of samples."""
    log = tmp_path / "samples"

    def recording() -> None:
        collate = group_stream.collate

        def recorded(rows: list[BatchRow], *args: Any) -> Any:
            with log.open("a") as file:
                file.writelines(f"{r.job_id} {r.dropout_key[1:]}\n" for r in rows if r.dropout_key)
            return collate(rows, *args)

        group_stream.collate = recorded  # type: ignore[assignment]

    jobs = [
        job("x", str(data / "a.jsonl"), lora_dropout=0.01, max_steps=11, batch_size=5, save_steps=1, logging_steps=1),
        job("y", str(data / "b.jsonl"), lora_dropout=0.01, max_steps=9, batch_size=4, save_steps=1, logging_steps=1),
    ]

    def go(out: Path, before: Callable[[], object] = lambda: None) -> int:
        run = lambda: (recording(), before(), train(runs.base, out, jobs, token_budget=90, resume=out.exists()))  # noqa: E731
        return os.waitpid(fork(run), 0)[1]

    assert go(tmp_path / "whole") == 0
    whole = Counter(log.read_text().splitlines())
    assert set(whole.values()) == {1} and len(whole) == 4 * 5 + 4 + 4 * 5 + 4 + 5 + (4 + 4 + 1) * 3
    log.unlink()
    for at in (40, 95, 150):
        assert go(tmp_path / "cut", die_at_call(at)) == signal.SIGKILL
    assert go(tmp_path / "cut") == 0
    again = Counter(log.read_text().splitlines())
    assert again.keys() == whole.keys()  # some twice: steps that were lost and taken again, never others
    assert sum(again.values()) > sum(whole.values())
    for name in ("x", "y"):
        assert steps_taken(tmp_path / "cut" / name) == steps_taken(tmp_path / "whole" / name) == list(range(1, 12 if name == "x" else 10))
        assert (
            rows(tmp_path / "cut" / name / "metrics.jsonl")[-1]["num_tokens"]
            == rows(tmp_path / "whole" / name / "metrics.jsonl")[-1]["num_tokens"]
        )
