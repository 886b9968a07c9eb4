"""A job that orders more GPUs than a host has: real workers on hosts that share nothing but the line, the scheduler's own decisions, and
the bytes of `tlora train`.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tlora
from tests.engine.tiny_runs import job, run_spec, same_bytes, save_base, steps_taken, write_rows
from tests.hosts import Network, kill_host, network, start_worker, why_no_namespaces
from tests.process_hooks import let_hold, slow_down
from tlora.cluster.controller import run
from tlora.cluster.credentials import WorkerTokens
from tlora.cluster.event_log import EventLog
from tlora.cluster.hosts import STRIDE
from tlora.cluster.limits import Limits
from tlora.cluster.listeners import TlsListener
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.cluster.reconciler import LocalJob
from tlora.job import LayoutSetting
from tlora.planning.job_profile import ProfiledJob, profile_jobs
from tlora.protocol import Action, Event, GpusLost, GroupKept, GroupReady, JobFinished, JobSubmitted, NodeAdded, StartGroup, StepsDone
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.cost import CostModel
from tlora.shape.predicted_constants import live_constants

LEASE = 8.0  # where a host shall be lost; elsewhere none ends, however slow the machine is
NAME = "two"
STEPS = 150  # so that the other host's rank comes while it trains
needs_namespaces = pytest.mark.skipif(bool(why_no_namespaces()), reason=f"no namespaces: {why_no_namespaces()}")


@dataclass
class Cluster:
    """A controller in `root`, with `gpus` of its own, and hosts that dial it. `told`: all events and actions so far."""

    root: Path
    base: Path
    orders: list[dict[str, Any]]
    gpus: tuple[int, ...]
    network: Network | None
    layout: LayoutSetting = "auto"
    lease_seconds: float = 600.0
    told: list[Event | Action] = field(default_factory=list[Event | Action])
    hosts: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict[str, Any])
    act: Callable[[Event | Action], object] = lambda _: None

    def train(self, *hosts: str) -> None:
        """All orders, submitted when these hosts have come, to their end. "b:1" is the second GPU of host b, with a worker of its own."""
        out, address = self.root / "out", self.network.here if self.network is not None else "127.0.0.1"
        spec = run_spec(self.base, out, self.orders)
        made, jobs = profile_jobs(spec), dict[str, LocalJob]()
        machine = LocalMachine(
            self.gpus,
            "cpu",
            {"tiny": str(self.base)},
            out,
            deterministic=True,
            tick_seconds=1.0,
            limits=Limits(host_lease=self.lease_seconds),
            layout=self.layout,
        )
        scheduler = Scheduler(LIVE_POLICIES["residual_capacity"](), CostModel({"tiny": live_constants(1e6)}), print)
        with (
            TlsListener(out / "workers", (address, 0)) as listener,
            LocalBackend(machine, print, listener) as backend,
            closing(EventLog(out / "events.jsonl")) as log,
        ):
            token = WorkerTokens(out / "workers").create(3600)[1]
            self.start = lambda name: self._start(name, listener, token)
            for name in hosts:
                self.start(name)

            def record(now: float, item: Event | Action) -> None:
                log.write(now, item)
                self.told.append(item)
                self.act(item)
                there = {(node.node, node.gpus) for node in self.told if isinstance(node, NodeAdded)}
                if isinstance(item, NodeAdded) and len(there) == 1 + len(hosts):
                    threading.Thread(target=submit, daemon=True).start()

            def submit() -> None:
                for order in spec.jobs:
                    if order.name in jobs:
                        return
                    profiled = made[order.name]
                    assert isinstance(profiled, ProfiledJob)
                    jobs[order.name] = LocalJob(order, profiled.train_set, profiled.eval_set)
                    least = 2 if self.layout == "stages" else 1
                    submitted = JobSubmitted(order.name, "tiny", max(order.gpus, least), profiled.profile, least_gpus=least)
                    backend.submit(submitted, jobs[order.name])
                backend.seal()

            run(scheduler, backend, record)
        assert {item.job_id for item in self.told if isinstance(item, JobFinished)} == {order["name"] for order in self.orders}

    def _start(self, name: str, listener: TlsListener, token: str) -> None:
        host, _, gpu = name.partition(":")
        options = ["--connect", listener.address, "--fingerprint", listener.fingerprint, *(["--gpus", gpu] if gpu else [])]
        hidden = [self.base, self.root / "out", self.root / "cache"]
        place = list(self.hosts).index(name) if name in self.hosts else len(self.hosts)
        namespace = self.network.namespace(place) if self.network is not None else None
        self.hosts[name] = start_worker(options, token, self.root / name, hidden, name=host, namespace=namespace)

    def check(self) -> None:
        same_bytes(self.root / "out" / "jobs", self.root / "whole", [order["name"] for order in self.orders])
        for order in self.orders:
            assert steps_taken(self.root / "out" / "jobs" / order["name"]) == steps_taken(self.root / "whole" / order["name"])

    def spans(self) -> list[tuple[int, ...]]:
        return [item.group.gpus for item in self.told if isinstance(item, StartGroup) and len(item.group.gpus) > 1]


@contextmanager
def cluster(root: Path, steps: int, gpus: tuple[int, ...], namespace: bool, layout: LayoutSetting = "auto") -> Iterator[Cluster]:
    """With `layout` stages the job has no replicas, and its base is cut."""
    base = save_base(root / "base", hidden_size=64, intermediate_size=128, num_hidden_layers=2 if layout == "stages" else 1)
    data, replicas = str(write_rows(root / "a.jsonl", 26, 1, high=20)), 1 if layout == "stages" else 2
    orders = [job(NAME, data, gpus=replicas, lora_dropout=0.1, max_steps=steps, batch_size=6, save_steps=10)]
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setenv("TLORA_CACHE", str(root / "cache"))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        let_hold(monkeypatch, root, "")
        tlora.train(run_spec(base, root / "whole", orders, deterministic=True), device="cpu")
        made = Cluster(root, base, orders, gpus, stack.enter_context(network(3)) if namespace else None, layout)
        try:
            yield made
        finally:
            for process in made.hosts.values():
                kill_host(process)


def lent_trees(host: Path) -> list[Path]:
    return [path for path in (host / "cache" / "hosts" / "trees").iterdir() if path.is_dir()]


@pytest.mark.slow
@pytest.mark.parametrize("namespace", [False, pytest.param(True, marks=needs_namespaces)], ids=["process", "namespace"])
def test_a_job_spans_the_controllers_host_and_another(tmp_path: Path, namespace: bool) -> None:
    with cluster(tmp_path, STEPS, (0,), namespace) as there, slow_down(STEPS) as go_on:

        def wait_for_data() -> None:
            while not (tmp_path / "b" / "cache" / "hosts" / "trees").is_dir() or len(lent_trees(tmp_path / "b")) < 2:
                time.sleep(0.05)
            go_on()

        threading.Thread(target=wait_for_data, daemon=True).start()
        there.train("b")
        there.check()
        assert there.spans() == [(0, STRIDE)] and not any(isinstance(item, GpusLost) for item in there.told)
        assert len(lent_trees(tmp_path / "b")) == 2, "the base and the training set lie on the host that computes a part"
        assert not list((tmp_path / "b" / "cache" / "hosts" / "workers").glob("*/jobs/*/checkpoint*"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["auto", "stages"])
def test_a_job_spans_gpus_of_one_host_that_have_a_worker_each(tmp_path: Path, layout: LayoutSetting) -> None:
    """As an engine, and a person, starts them. A worker sees no GPU but its own, so that they lend as those of two hosts do."""
    with cluster(tmp_path, STEPS, (), False, layout) as there, slow_down(STEPS) as go_on:
        there.act = lambda item: go_on() if isinstance(item, GroupReady) else None
        there.train("b:0", "b:1")
        there.check()
        assert there.spans() == [(STRIDE, STRIDE + 1)] and any(isinstance(item, GroupReady) for item in there.told)
        assert not any(isinstance(item, GpusLost) for item in there.told)


@pytest.mark.slow
def test_a_job_spans_gpus_of_one_host_with_an_agent(tmp_path: Path) -> None:
    """One of its processes is the worker of both GPUs, as on the controller's host; nothing goes over a line between two."""
    with cluster(tmp_path, STEPS, (), False) as there, slow_down(STEPS) as go_on:
        there.act = lambda item: go_on() if isinstance(item, GroupReady) else None
        there.train("b:0,1")
        there.check()
        assert there.spans() == [(STRIDE, STRIDE + 1)] and any(isinstance(item, GroupReady) for item in there.told)
        assert not any(isinstance(item, GpusLost | GroupKept) for item in there.told)
        assert [item.gpus for item in there.told if isinstance(item, NodeAdded) and item.node == "b"] == [(STRIDE, STRIDE + 1)]


@pytest.mark.slow
@needs_namespaces
def test_a_base_in_stages_spans_hosts(tmp_path: Path) -> None:
    with cluster(tmp_path, STEPS // 2, (0,), True, "stages") as there:
        there.train("b")
        there.check()
        assert there.spans() == [(0, STRIDE)] and not any(isinstance(item, GpusLost) for item in there.told)
        assert len(lent_trees(tmp_path / "b")) == 1, "the base alone: a stage before the last reads no data"


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize(("killed", "layout"), [("lender", "auto"), ("leader", "auto"), ("lender", "stages"), ("leader", "stages")])
def test_a_host_is_killed_in_the_middle(tmp_path: Path, killed: str, layout: LayoutSetting) -> None:
    """A controller without GPUs, and two hosts. With either the job waits; it goes on at a checkpoint, in stages with a new host, and with
    its replicas in turn where none is there yet.
    """
    steps = 2 * STEPS if layout == "auto" else STEPS
    with cluster(tmp_path, steps, (), True, layout) as there, slow_down(steps) as go_on:
        first, gone = dict[int, str](), set[str]()

        def act(item: Event | Action) -> None:
            if isinstance(item, NodeAdded):
                first.update(dict.fromkeys(item.gpus, item.node))
            is_whole = any(isinstance(item, GroupReady) for item in there.told)  # both hosts compute it
            if isinstance(item, StepsDone) and item.steps >= 40 and is_whole and not gone:
                gone.add(list(first.values())[0 if killed == "leader" else 1])
                kill_host(there.hosts[min(gone)])
                go_on()
                there.start("d")
            if isinstance(item, GpusLost) and (host := first[item.gpus[0]]) not in gone:  # a slow machine was silent for a lease
                kill_host(there.hosts[host])
                there.start(host)

        there.act, there.lease_seconds = act, LEASE
        there.train("b", "c")
        there.check()
        assert any(isinstance(item, GpusLost) for item in there.told)
        begun = [item.group.gpus for item in there.told if isinstance(item, StartGroup)]
        assert begun[0] == (STRIDE, 2 * STRIDE) and len(there.spans() if layout == "stages" else begun) >= 2, begun
