"""The process of a worker, as its controller has it: it dials, does as is wanted, and saves all when it is ended or refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from tests.engine.test_worker import Orders, of, when, work
from tests.engine.tiny_runs import job, run_spec
from tests.process_hooks import run_in_each_process
from tlora.cluster.remote_worker import RemoteWorker
from tlora.cluster.worker_pool import Limits, WorkerPool
from tlora.engine.messages import Stop
from tlora.engine.worker import EXPIRED, parse_gpus
from tlora.errors import ConfigError
from tlora.protocol import JobGroup, ParallelPlan
from tlora.store.checkpoint import read_progress
from tlora.worker_protocol import Ending, JobEnd, Join, Joined, Left, Load, Report, Settled, Stepped

BACKLOG: WeakKeyDictionary[WorkerPool, list[Report | None]] = WeakKeyDictionary()  # heard by a crew and not asked for yet
PATIENCE_SECONDS = 600.0
GROUP = JobGroup("g0", "base", (0,), ParallelPlan(1, 90), ("long",), (1.0,))


@pytest.fixture
def long(made: Orders, data: Path, tmp_path: Path) -> Join:
    spec = run_spec(made.base, tmp_path, [job("long", str(data / "c.jsonl"), max_steps=100_000, batch_size=6)]).jobs[0]
    return Join(spec, train_set=made.join("mover").train_set, attempt=1)


@pytest.fixture
def crews(made: Orders, tmp_path: Path) -> Iterator[list[WorkerPool]]:
    opened: list[WorkerPool] = []
    yield opened
    for crew in opened:
        crew.close(PATIENCE_SECONDS)


def crew_of(crews: list[WorkerPool], directory: Path, load: Load, epoch: int = 1, **limits: float) -> WorkerPool:
    directory.mkdir(parents=True, exist_ok=True)
    crews.append(WorkerPool(directory, epoch, lambda base: load, (0,), Limits(**limits), print))
    return crews[-1]


def hear(crew: WorkerPool, kind: type[Report] | None) -> Any:
    """The next report of that kind (None: the end). A job that ends otherwise meanwhile reports nothing more."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        waiting = BACKLOG.setdefault(crew, [])
        waiting += [report for _, report in crew.listen(0.0 if waiting else 1.0)]
        crew.acknowledge()
        while waiting:
            report = waiting.pop(0)
            if report is None if kind is None else isinstance(report, kind):
                return report
            assert report is not None, "the worker has ended"
            assert kind is None or not isinstance(report, JobEnd), f"{report} has come, and {kind.__name__} is waited for"
    raise AssertionError(f"no {kind}")


def training(crew: WorkerPool, long: Join, base: Path) -> RemoteWorker:
    worker = crew.start((0,), str(base))
    worker.want(GROUP, (long,), False)
    assert hear(crew, Joined) == Joined("long", 0, 1)
    assert hear(crew, Settled).jobs == {"long": 1}
    assert hear(crew, Stepped).attempt == 1
    return worker


def shorten_lease(crew: WorkerPool, worker: RemoteWorker, seconds: float) -> None:
    """Of a worker that trains: on a busy machine a short one could end before. It may end as soon as the worker has it."""
    worker._tell(replace(worker._want, lease_seconds=seconds))
    while not (worker.is_settled or worker.process.wait(0)):
        crew.listen(0.1)
        crew.acknowledge()


@pytest.mark.parametrize("how", ["stop", *(pytest.param(how, marks=pytest.mark.slow) for how in ("lease", "refused", "sigterm"))])
def test_a_worker_that_is_ended_has_checkpointed_all(made: Orders, long: Join, tmp_path: Path, crews: list[WorkerPool], how: str) -> None:
    """A job that runs long is cut short, and goes on in another worker."""
    load = made.load(tmp_path / "out")
    crew = crew_of(crews, tmp_path / "workers", load, epoch=2)
    worker = training(crew, long, made.base)
    if how == "lease":
        shorten_lease(crew, worker, 1.0)
    if how == "sigterm":
        os.kill(worker.process.pid, signal.SIGTERM)
        assert hear(crew, Ending).reason == "SIGTERM"
    elif how == "stop":
        worker.stop()
    else:
        crew.abandon()
    if how == "refused":  # by a controller that must not be
        earlier, deadline = crew_of(crews, tmp_path / "workers", load, epoch=1), time.monotonic() + PATIENCE_SECONDS
        while not worker.process.wait(0) and time.monotonic() < deadline:
            earlier.listen(0.1)
    if how in ("sigterm", "stop"):
        left = hear(crew, Left)
        hear(crew, None)
    assert worker.process.wait(PATIENCE_SECONDS)
    ended = worker.process.how_it_ended()
    status = {"sigterm": 143, "refused": 2, "lease": EXPIRED}.get(how, 0)
    assert f"exit status {status};" in ended
    if how == "refused":
        assert "ends with 'error: refused by the controller: the worker that is process" in ended and "later controller" in ended
    told = work(load, [Join(long.job, long.train_set, attempt=2)], when(Joined, "long", 0, Stop()))
    (joined,) = of(told, Joined, "long")
    saved = Path(left.checkpoint) if how in ("sigterm", "stop") else tmp_path / "out" / "long" / f"checkpoint-{joined.steps}"
    assert joined.steps > 0 and read_progress(saved).step == joined.steps
    if how == "lease":
        assert "the lease is 1 s" in (tmp_path / "workers" / "gpu0.log").read_text()


def test_a_worker_without_a_base_says_why(tmp_path: Path, crews: list[WorkerPool]) -> None:
    crew = crew_of(crews, tmp_path / "workers", Load(str(tmp_path / "none"), str(tmp_path), "cpu", 0.0))
    worker = crew.start((0,), "none")
    worker.want(GROUP, (), False)
    hear(crew, None)
    ended = worker.process.how_it_ended()
    assert ended.startswith("ended with exit status 1; its log, ") and "no such directory" in ended and "gpu0.log" in ended


@pytest.mark.slow
def test_the_next_controller_finds_it_training(made: Orders, long: Join, tmp_path: Path, crews: list[WorkerPool]) -> None:
    """It says what it has and goes on with that; steps and attempt are those of before."""
    load = made.load(tmp_path / "out")
    first = crew_of(crews, tmp_path / "workers", load)
    worker = training(first, long, made.base)
    steps = hear(first, Stepped).steps
    first.abandon()
    first.workers.clear()
    second = crew_of(crews, tmp_path / "workers", load, epoch=2)
    second.find({(0,): worker.process.identity})  # type: ignore[attr-defined]
    found = second.workers[0]
    assert found.incarnation == worker.incarnation and found.loaded and found.found == GROUP and found.load == load
    assert found.jobs["long"].attempt == 1 and found.jobs["long"].steps >= steps
    found.want(GROUP, (long,), False)
    assert hear(second, Settled).jobs == {"long": 1}
    assert hear(second, Stepped).steps > steps
    assert second.workers[0].process.pid == worker.process.pid


def test_a_worker_started_by_hand_says_where_nobody_listens(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    bad = {f"unix:{tmp_path}/controller.sock": "no cluster listens", str(tmp_path): "neither an address", "unix:x": "must be unix:"}
    for address, fact in bad.items():
        done = subprocess.run([sys.executable, "-m", "tlora.engine.worker", "--connect", address], capture_output=True, check=False)
        assert done.returncode == 2 and fact in done.stderr.decode(), done.stderr


@pytest.mark.usefixtures("real_start")
def test_ctrl_c_ends_no_rank_that_begins(
    made: Orders, long: Join, tmp_path: Path, crews: list[WorkerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches all processes of a terminal: the rank died of it before it could save anything, and the worker with a traceback."""
    interrupt = 'import os, signal, sys\nif "tlora.engine.ranks.rank" in sys.orig_argv:\n    os.kill(os.getpid(), signal.SIGINT)\n'
    run_in_each_process(monkeypatch, tmp_path, interrupt)
    crew = crew_of(crews, tmp_path / "workers", made.load(tmp_path / "out"))
    worker = training(crew, long, made.base)
    worker.stop()
    assert hear(crew, Left).steps > 0


def test_ctrl_c_before_a_worker_serves_is_130_without_a_word() -> None:
    """As while it asks the driver for its GPUs."""
    code = (
        "import os, signal\nfrom tlora.engine import worker\n"
        "worker.find_entrance = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "worker.run('unix:/x', (0,))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_worker_that_is_refused_at_its_hello_says_why_in_a_line(tmp_path: Path, crews: list[WorkerPool]) -> None:
    crew = crew_of(crews, tmp_path / "workers", Load("none", str(tmp_path), "cpu", 0.0))
    command = [sys.executable, "-m", "tlora.engine.worker", "--connect", crew.address, "--gpus", "5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            crew.listen(0.1)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 2 and len(said.splitlines()) == 1, said
    assert said.startswith("error: refused by the controller: the worker that is process ") and "has GPUs [5]" in said, said


def test_gpus_are_different_numbers() -> None:
    assert parse_gpus("3") == (3,) and parse_gpus("2, 0") == (0, 2)
    for text in ("", "1,", "0,0", "one", "-1"):
        with pytest.raises(ConfigError, match=f"--gpus {text}: must be different numbers"):
            parse_gpus(text)
