"""A worker on a host that shares nothing with its controller but the line: it fetches base, data and checkpoints, trains, sends all back,
and is lost in all the ways in which hosts are.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_worker import Orders
from tests.engine.test_worker_process import PATIENCE_SECONDS, crew_of, hear, shorten_lease
from tests.engine.test_worker_process import crews as crews
from tests.engine.tiny_runs import sha256, steps_taken
from tests.hosts import Network, kill_host, network, start_worker, why_no_namespaces
from tlora.cluster.credentials import WorkerTokens
from tlora.cluster.hosts import STRIDE
from tlora.cluster.leased_process import LeasedProcess
from tlora.cluster.listeners import TlsListener
from tlora.cluster.remote_worker import Held, RemoteWorker
from tlora.cluster.worker_pool import WorkerPool
from tlora.engine import worker as worker_module
from tlora.protocol import JobGroup, ParallelPlan
from tlora.worker_protocol import Finished, Join, Joined, Left, Load, Stepped

# In each process of a host before anything else: no rank trains its job beyond step HELD_AT, and no worker gives its controller the
# files that a job leaves at its end.
HOOK = """
import os, sys, time
if "tlora.engine.ranks.rank" in sys.orig_argv:
    from tlora.group.job_run import JobRun
    batch_row = JobRun.batch_row
    def held(run, row):
        while not run.evaluating and run.progress.step >= int(os.environ["HELD_AT"]):
            time.sleep(1.0)
        return batch_row(run, row)
    JobRun.batch_row = held
else:
    from tlora.engine.job_copy import JOB_FILE, JobCopy
    send_file = JobCopy._send_file
    def withheld(copy, path):
        while path.name != JOB_FILE:
            time.sleep(1.0)
        send_file(copy, path)
    JobCopy._send_file = withheld
"""
LEASE = 8.0
NAME, STEPS = "mover", 14
ENDLESS = 100_000
GRACE_SECONDS = 25.0
GROUP = JobGroup("g0", "base", (STRIDE,), ParallelPlan(1, 90), (NAME,), (1.0,))

needs_namespaces = pytest.mark.skipif(bool(why_no_namespaces()), reason=f"no namespaces: {why_no_namespaces()}")


class Cluster:
    """A controller's pool whose store lies in `root`, and workers of host b."""

    def __init__(self, made: Orders, root: Path, crews: list[WorkerPool], apart: Network | None) -> None:
        self.made, self.root, self.apart = made, root, apart
        self.store = root / "store"
        self.load = Load(str(made.base), str(self.store / "jobs"), "cpu", time.time(), deterministic=True)
        self.pool = crew_of(crews, self.store / "workers", self.load)
        self.listener = TlsListener(self.store / "workers", (apart.here if apart is not None else "127.0.0.1", 0))
        self.pool.listen_on(self.listener)
        self.token = WorkerTokens(self.store / "workers").create(3600)[1]
        self.attempt, self.started = 0, list[Any]()

    @property
    def job(self) -> Path:
        return self.store / "jobs" / NAME

    def start(self) -> Any:
        options = ["--connect", self.listener.address, "--fingerprint", self.listener.fingerprint]
        hidden = [self.made.base, self.made.whole.parent, self.store]
        namespace = self.apart.namespace(0) if self.apart is not None else None
        made = start_worker(options, self.token, self.root / "home", hidden, namespace=namespace)
        self.started.append(made)
        return made

    def came(self) -> RemoteWorker:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while STRIDE not in self.pool.workers:
            assert time.monotonic() < deadline
            self.pool.listen(0.05)
        worker = self.pool.workers[STRIDE]
        assert worker.files_by_line and worker.display_name == "GPU 0 of host b"
        return worker

    def train(self, worker: RemoteWorker, **fields: Any) -> None:
        """Give it the job, with `fields` changed, as the reconciler does."""
        self.attempt += 1
        join = self.made.join(NAME)
        data = {
            "path": "/of the controller/rows.jsonl",
            "eval_path": "/of the controller/held-out.jsonl",
        }  # only what is made of them is sent
        spec = join.job.model_copy(update={"data": join.job.data.model_copy(update=data), **fields})
        worker.give(self.load)
        worker.jobs[NAME] = Held(self.attempt)
        worker.want(GROUP, (Join(spec, join.train_set, join.eval_set, self.attempt),), False)

    def wait_for_checkpoint(self, name: str = "checkpoint-*") -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not list(self.job.glob(name)):
            assert time.monotonic() < deadline
            self.pool.listen(0.05)
            self.pool.acknowledge()

    def lose(self, worker: RemoteWorker) -> None:
        """It is not heard any more. Its lease is short only now: on a busy machine it could have ended before."""
        assert isinstance(worker.process, LeasedProcess)
        worker.process.lease_seconds = LEASE
        hear(self.pool, None)
        silent = re.search(r"was not heard for (\d+) s, and its lease of 8 s has ended", worker.process.how_it_ended())
        assert silent is not None and int(silent[1]) >= LEASE
        del self.pool.workers[STRIDE]  # as the reconciler does

    def state(self) -> dict[str, bytes]:
        return {path.relative_to(self.job).as_posix(): path.read_bytes() for path in self.job.rglob("*") if path.is_file()}


@pytest.fixture
def cluster(made: Orders, tmp_path: Path, crews: list[WorkerPool]) -> Iterator[Callable[[bool], Cluster]]:
    opened: list[Cluster] = []
    with ExitStack() as stack:

        def open_one(namespace: bool) -> Cluster:
            apart = stack.enter_context(network()) if namespace else None
            opened.append(Cluster(made, tmp_path, crews, apart))
            return opened[-1]

        yield open_one
        for one in opened:
            for process in one.started:
                kill_host(process)
            for worker in one.pool.workers.values():
                if isinstance(worker.process, LeasedProcess):
                    worker.process.prove_end("was killed")


@pytest.mark.parametrize(
    ("namespace", "steps"),
    [
        pytest.param(False, 8, id="process"),
        pytest.param(True, 8, marks=[needs_namespaces, pytest.mark.slow], id="namespace"),
        pytest.param(False, STEPS, marks=pytest.mark.slow, id="at_its_end"),
    ],
)
def test_a_job_goes_on_where_a_killed_host_left_it_and_no_bit_differs(
    cluster: Callable[[bool], Cluster], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, namespace: bool, steps: int
) -> None:
    """Nothing is shared but the line. The host is killed after a checkpoint; the next one comes to the files of an undisturbed run. From
    the last checkpoint of all it has nothing to train: the job does not join, and is handed over once more.
    """
    there = cluster(namespace)
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    with monkeypatch.context() as of_first:
        of_first.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "hook"), os.environ.get("PYTHONPATH", "")]))
        of_first.setenv("HELD_AT", str(steps))
        host = there.start()
    first = there.came()
    there.train(first)
    there.wait_for_checkpoint(f"checkpoint-{steps}")
    kill_host(host)
    there.lose(first)
    assert not (there.job / "result.json").exists()
    there.start()
    second = there.came()
    there.train(second)
    if steps < STEPS:
        assert hear(there.pool, Joined).steps == steps
    done = hear(there.pool, Finished)
    del second.jobs[NAME]
    assert done.result["path"] == str(there.job) and done.result["status"] == "done"
    assert sha256(there.job) == there.made.shas[NAME]
    whole = there.made.whole / NAME
    assert steps_taken(there.job) == steps_taken(whole)
    files, of_train = ({path.name for path in directory.iterdir()} for directory in (there.job, whole))
    not_removed = {path.name for path in there.job.glob("checkpoint-*")} if steps == STEPS else set[str]()  # by the host that was killed
    assert of_train <= files and files - of_train <= not_removed
    assert (there.job / "adapter_config.json").read_bytes() == (whole / "adapter_config.json").read_bytes()
    trees = [path for path in (there.root / "home" / "cache" / "hosts" / "trees").iterdir() if path.is_dir()]
    assert len(trees) == 3, "base, training and evaluation set, each once for both workers"
    known = json.loads((max(there.job.glob("checkpoint-*"), key=lambda path: path.stat().st_mtime) / "state.json").read_text())
    join = there.made.join(NAME)
    for path, key in ((join.train_set, "data"), (join.eval_set, "eval_data")):
        assert known[key].partition("/")[0] == Path(path or "").name, "a worker that sees the store goes on from it too"
    second.stop()
    hear(there.pool, None)
    assert second.process.how_it_ended() == "has ended by itself"


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_line_that_is_cut_one_way_and_heals_after_the_lease_lets_nothing_through(
    cluster: Callable[[bool], Cluster], direction: str
) -> None:
    """Whichever way is cut, the worker has ended when its lease has. What the controller's host has by then stays as it is."""
    there = cluster(True)
    assert there.apart is not None
    host = there.start()
    worker = there.came()
    there.train(worker, max_steps=ENDLESS)
    there.wait_for_checkpoint()
    shorten_lease(there.pool, worker, LEASE)
    there.apart.cut(0, direction)
    there.lose(worker)
    assert host.poll() is not None, "it has ended before its controller counted it as lost"
    before = there.state()
    there.apart.cut(0, direction, yes=False)
    there.start()
    again = there.came()
    assert again.incarnation != worker.incarnation and not again.jobs
    for _ in range(20):
        there.pool.listen(0.1)
    assert there.state() == before


@pytest.mark.slow
def test_sigterm_hands_the_job_back_within_the_grace_period(cluster: Callable[[bool], Cluster]) -> None:
    there = cluster(False)
    host = there.start()
    worker = there.came()
    there.train(worker, max_steps=ENDLESS)
    assert hear(there.pool, Stepped).steps > 0
    host.terminate()
    left = hear(there.pool, Left)
    del worker.jobs[NAME]
    there.pool.acknowledge()
    assert left.checkpoint == str(there.job / f"checkpoint-{left.steps}") and Path(left.checkpoint).is_dir()
    assert host.wait(PATIENCE_SECONDS) == 143
    assert worker_module._STORE_SECONDS + worker_module._DRAIN_SECONDS < GRACE_SECONDS, "of what it may wait for at its end"
    assert not (there.root / "home" / "cache" / "hosts" / "workers").exists() or not list(
        (there.root / "home" / "cache" / "hosts" / "workers").iterdir()
    )
