"""`tlora cluster`: jobs of a file as they arrive, under the scheduler, on real workers; stopped, killed, and gone on with."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.engine.conftest import save_base
from tests.engine.tiny_runs import TWO_LINEARS, job, run_spec, same_bytes, sha256, steps_taken, train, write_rows
from tests.process_hooks import let_hold, run_in_each_process, slow_down
from tlora.cluster.epochs import lock_store
from tlora.engine.interrupts import recorded_end
from tlora.engine.ranks.devices import rank_devices
from tlora.engine.results import Results
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import CheckpointError, ConfigError, ModelError
from tlora.json_file import read_object
from tlora.live import cluster_run
from tlora.live.cluster_run import train_on_cluster
from tlora.protocol import (
    BaseAdded,
    GpusUnheard,
    GroupFound,
    JobDelayed,
    JobFinished,
    JobGroup,
    JobSubmitted,
    MemoryFound,
    NodeAdded,
    ParallelPlan,
    StartGroup,
    Tick,
)
from tlora.sim.scenario import Scenario, scene_of
from tlora.sim.trace import read_event_log


@dataclass(frozen=True)
class World:
    """A base, three orders, and what one process makes of them."""

    base: Path
    data: Path
    orders: list[dict[str, Any]]

    @cached_property
    def whole(self) -> Path:
        train(self.base, self.data / "whole", self.orders, deterministic=True)
        return self.data / "whole"

    def train(self, out: Path, orders: list[dict[str, Any]] | None = None, **options: Any) -> Results:
        return train_on_cluster(run_spec(self.base, out, orders or self.orders, deterministic=True), gpus=2, device="cpu", **options)

    def same_bytes(self, out: Path) -> None:
        same_bytes(out / "jobs", self.whole, [order["name"] for order in self.orders])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("world")
    base = save_base(directory / "base", hidden_size=128, intermediate_size=160, num_hidden_layers=1)
    a, b = (str(write_rows(directory / f"{name}.jsonl", count, seed, high=20)) for seed, (name, count) in enumerate((("a", 40), ("b", 9))))
    orders = [
        job("dropout", a, lora_dropout=0.1, max_steps=60, batch_size=3, save_steps=7, target_modules=TWO_LINEARS),
        job("brief", b, max_steps=5, batch_size=2, priority=2, target_modules=TWO_LINEARS),
        job("late", a, max_steps=30, batch_size=3, r=7, arrival_seconds=0.5, max_slowdown=3, target_modules=TWO_LINEARS),
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
        yield World(base, directory, orders)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["residual_capacity", pytest.param("fifo", marks=pytest.mark.soak)])
def test_jobs_arrive_and_end_with_the_bytes_of_one_process(world: World, tmp_path: Path, policy: str) -> None:
    seen: list[RunProgress] = []
    results = world.train(tmp_path, policy=policy, watcher=Watcher(seen.append))
    assert results.status == "done" and list(results) == [order["name"] for order in world.orders]
    world.same_bytes(tmp_path)
    log = read_event_log(tmp_path / "events.jsonl")
    submitted = {item.job_id: (seconds, item) for seconds, item in log if isinstance(item, JobSubmitted)}
    assert submitted["late"][0] >= 0.5 and submitted["late"][1].max_slowdown == 3 and submitted["brief"][1].priority == 2
    assert {item.job_id for _, item in log if isinstance(item, JobFinished)} == set(results)
    assert {gpu for _, item in log if isinstance(item, StartGroup) for gpu in item.group.gpus} == {0, 1}
    replayed = scene_of(Scenario(trace=str(tmp_path / "events.jsonl"), nodes=1, gpus_per_node=2)).jobs
    assert [(each.submit_seconds, each.job) for each in replayed] == sorted(submitted.values(), key=lambda order: order[0])
    assert {row.status for row in seen[-1].jobs} == {"done"}
    assert {row.name: row.loss for row in seen[-1].jobs} == pytest.approx({name: found.train_loss for name, found in results.items()})
    assert results.report == tmp_path / "jobs" / "report.html" and results.report.is_file()
    assert read_object(tmp_path / "jobs" / "run.json")["status"] == "done"


@pytest.mark.slow
def test_a_job_of_two_gpus_has_both(world: World, tmp_path: Path) -> None:
    orders = [{**world.orders[0], "gpus": 2, "max_steps": 20}, world.orders[1], {**world.orders[2], "gpus": 3, "max_steps": 5}]
    whole = train(world.base, tmp_path / "whole", orders, deterministic=True)
    seen, said = list[RunProgress](), list[str]()
    results = world.train(tmp_path / "out", orders, watcher=Watcher(seen.append, said.append))
    assert results.status == whole.status == "done"
    told = [item for _, item in read_event_log(tmp_path / "out" / "events.jsonl")]
    asked = {item.job_id: item.gpus for item in told if isinstance(item, JobSubmitted)}
    assert asked == {"dropout": 2, "brief": 1, "late": 2} and any("late: some of its 3 replicas run in turn" in line for line in said)
    assert any(item.group.gpus == (0, 1) for item in told if isinstance(item, StartGroup))
    assert any((row.name, row.gpu, row.parts_on) == ("dropout", 0, (1,)) for progress in seen for row in progress.jobs)
    for order in orders:
        assert sha256(tmp_path / "out" / "jobs" / order["name"]) == sha256(tmp_path / "whole" / order["name"])


@pytest.mark.slow
def test_stages_hold_the_base(tmp_path: Path) -> None:
    """A worker of two GPUs has one stage on each, and for two layers it gets no third. What cannot go through them fails alone."""
    base, data = save_base(tmp_path / "base", num_hidden_layers=2), str(write_rows(tmp_path / "a.jsonl", 20, 1, high=20))
    orders = [job("one", data, gpus=3, lora_dropout=0.1), job("two", data, max_steps=8, r=7, seed=2, target_modules=["down_proj"])]
    train(base, tmp_path / "whole", orders, deterministic=True)
    rows = job("rows", data, trainable_token_indices=[1, 2])
    results = train_on_cluster(run_spec(base, tmp_path / "out", [*orders, rows], deterministic=True, layout="stages"), gpus=3, device="cpu")
    assert "base is in stages" in results["rows"].reason
    same_bytes(tmp_path / "out" / "jobs", tmp_path / "whole", ["one", "two"])
    started = [item for _, item in read_event_log(tmp_path / "out" / "events.jsonl") if isinstance(item, StartGroup)]
    assert {len(item.group.gpus) for item in started} == {2}


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "stopped"), (RuntimeError, "failed")])
def test_a_run_that_does_not_come_to_its_results_is_not_left_as_running(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], status: str
) -> None:
    """A second Ctrl-C, or what only a bug can raise."""

    def end(*_: object) -> None:
        assert read_object(tmp_path / "out" / "jobs" / "run.json")["status"] == "running"
        raise error

    monkeypatch.setattr(cluster_run, "run_controller", end)
    with pytest.raises(error):
        train_on_cluster(run_spec(world.base, tmp_path / "out", world.orders), device="cpu")
    assert read_object(tmp_path / "out" / "jobs" / "run.json")["status"] == status


def test_a_run_that_is_refused_leaves_that_of_the_other_controller_as_it_is(world: World, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cluster_run, "run_controller", interrupt)
        train_on_cluster(run_spec(world.base, tmp_path / "out", world.orders), device="cpu")
    before = (tmp_path / "out" / "jobs" / "run.json").read_bytes()
    held = lock_store(tmp_path / "out")
    with pytest.raises(ConfigError, match="is in use by another controller"):
        train_on_cluster(run_spec(world.base, tmp_path / "out", world.orders), device="cpu")
    os.close(held)
    assert (tmp_path / "out" / "jobs" / "run.json").read_bytes() == before


def test_a_stopped_job_that_no_worker_had_has_its_number_of_steps(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose worker was killed: its row said 800/0 steps."""
    monkeypatch.setattr(cluster_run, "run_controller", lambda *_: None)
    order = {**job("a", str(world.data / "b.jsonl"), batch_size=2), "max_steps": None, "num_train_epochs": 3}
    result = train_on_cluster(run_spec(world.base, tmp_path / "out", [order]), device="cpu")["a"]
    assert (result.status, result.steps, result.total_steps) == ("stopped", 0, 15)


def test_a_host_that_is_not_heard_is_told_with_its_jobs(tmp_path: Path) -> None:
    notes = list[str]()
    run = run_spec(tmp_path / "base", tmp_path / "out", [job("a", "none.jsonl")])
    seen = cluster_run._Run(run, tmp_path / "out", rank_devices(1, "cpu"), "fifo", Watcher(note=notes.append), 0.0)
    group = JobGroup("g0", "base", (1000,), ParallelPlan(1, 1024), ("a",), (1.0,))
    silent = GpusUnheard((1000,), "nothing is heard")
    for item in (silent, StartGroup(group), silent, GpusUnheard((1000,), "")):
        seen._see(item)
    assert notes == ["a: nothing is heard", "a: its host is heard again"]
    for item in [JobDelayed("a", "room on the disk")] * 2:
        seen._see(item)
    assert notes[2:] == ["a waits for room on the disk"]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_ended_a_run_is_said_also_where_its_end_cannot_be_recorded() -> None:
    def record(_: str) -> None:
        raise CheckpointError("run.json cannot be written")

    with pytest.raises(RuntimeError, match="the cause"), recorded_end(record):
        raise RuntimeError("the cause")


class Cluster:
    """`tlora cluster` in a process of its own, which may be killed and started again."""

    def __init__(self, world: World, directory: Path, orders: list[dict[str, Any]] | None = None) -> None:
        file, self.out = directory / "jobs.yaml", directory / "out"
        order = {"base_model": str(world.base), "output_dir": str(self.out), "deterministic": True, "jobs": orders or world.orders}
        file.write_text(yaml.safe_dump(order))
        self.command = [sys.executable, "-m", "tlora", "cluster", str(file), "--device", "cpu", "--gpus", "2", "--quiet"]

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self.command)

    @property
    def rows(self) -> int:
        """Of metrics, of all jobs."""
        return sum(len(path.read_bytes().splitlines()) for path in self.out.glob("jobs/*/metrics.jsonl"))

    @property
    def training(self) -> list[Path]:
        """What the jobs that have taken a step write."""
        return [path for path in self.out.glob("jobs/*/metrics.jsonl") if path.stat().st_size]

    @property
    def workers(self) -> dict[str, int]:
        """Their processes, by record."""
        return {path.stem: read_object(path)["pid"] for path in sorted((self.out / "workers").glob("gpu*.json"))}

    def wait_for_rows(self, rows: int, process: subprocess.Popen[bytes]) -> None:
        while self.rows < rows and process.poll() is None:
            time.sleep(0.01)

    @property
    def events(self) -> list[Any]:
        return [item for _, item in read_event_log(self.out / "events.jsonl")]

    @property
    def adoptions(self) -> int:
        """Groups of workers that controllers have found so far."""
        path = self.out / "events.jsonl"
        return path.read_bytes().count(b'"GroupFound"') if path.exists() else 0

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.out / "workers").glob("gpu*.log")))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 8))])
def test_a_cluster_that_is_killed_with_its_workers_goes_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    cluster = Cluster(world, tmp_path)
    let_hold(monkeypatch, tmp_path, "")
    with slow_down(world.orders[0]["max_steps"]), cluster.start() as process:
        cluster.wait_for_rows(5 + 8 * seed, process)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.kill()
    assert process.returncode == -signal.SIGKILL
    assert cluster.start().wait() == 0
    world.same_bytes(cluster.out)


# Runs in each rank's process before anything else does: a step takes a while, and a job takes only the part of its steps that it may
# take by now, so that jobs train at every kill, whatever the machine's speed.
HOOK = """
import os, sys, time
if "tlora.engine.ranks.rank" in sys.orig_argv:
    from tlora.group.job_run import JobRun
    batch_row = JobRun.batch_row
    def part():
        with open(os.environ["ALLOWED_PART"]) as file:
            return float(file.read())
    def slowly(run, row):
        time.sleep(0.05 / run.spec.batch_size)
        while run.progress.step > part() * run.spec.max_steps:
            time.sleep(0.01)
        return batch_row(run, row)
    JobRun.batch_row = slowly
"""


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(47, marks=pytest.mark.soak)])
def test_a_killed_controller_finds_its_workers_training(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    """Killed at random moments, before and after it has found its workers: none ends or begins a job again, no step is done twice."""
    chance, allowed = random.Random(kills), tmp_path / "allowed"
    longer = [{**order, "max_steps": (1 + kills) * order["max_steps"] // 3} for order in world.orders if order["name"] != "brief"]
    train(world.base, tmp_path / "whole", longer, deterministic=True)
    run_in_each_process(monkeypatch, tmp_path, HOOK)
    monkeypatch.setenv("ALLOWED_PART", str(allowed))
    allowed.write_text(str(1 / (1 + kills)))
    cluster = Cluster(world, tmp_path, longer)
    found: list[dict[str, int]] = []
    rows: list[int] = []
    for number in range(kills):
        adopted = cluster.adoptions
        with cluster.start() as process:
            while not found and len(cluster.training) < len(longer) and process.poll() is None:
                time.sleep(0.01)
            while found and number % 2 and cluster.adoptions == adopted and process.poll() is None:
                time.sleep(0.01)
            before = cluster.rows
            (tmp_path / "more").write_text(str((1 + number) / (1 + kills)))
            (tmp_path / "more").replace(allowed)
            time.sleep(4 * chance.random())
            cluster.wait_for_rows(before + bool(number), process)
            workers = cluster.workers
            rows.append(cluster.rows)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        found.append(workers)
    (tmp_path / "more").write_text("1")
    (tmp_path / "more").replace(allowed)
    assert cluster.start().wait() == 0
    assert len(found[0]) == 2 and all(workers == found[0] for workers in found)
    assert len(set(rows)) > kills / 2, f"nothing was trained between most kills: {rows}"
    total = {order["name"]: order["max_steps"] for order in longer}
    begun_again = re.findall(r"(\w+): goes on from .*checkpoint-(\d+)", cluster.log)
    assert all(total[name] == int(steps) for name, steps in begun_again), "only one that had ended may hand its adapter over once more"
    for name in ("dropout", "late"):
        assert sha256(cluster.out / "jobs" / name) == sha256(tmp_path / "whole" / name), name
        assert steps_taken(cluster.out / "jobs" / name) == steps_taken(tmp_path / "whole" / name), name
    adopted = [item for item in cluster.events if isinstance(item, GroupFound)]
    assert adopted and all(job.submitted_at is not None for item in adopted for job in item.jobs)
    assert {item.job_id for item in cluster.events if isinstance(item, JobFinished)} == set(total)


def test_what_was_done_before_is_taken_from_the_disk(world: World, tmp_path: Path) -> None:
    """No worker is started for it. Its end stands in the log also where no controller was there; one that shall get further goes on."""
    brief = world.orders[1]
    first = world.train(tmp_path, [brief])
    log = tmp_path / "events.jsonl"
    told = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in told if '"JobFinished"' not in line))
    seen: list[RunProgress] = []
    again = world.train(tmp_path, [brief], watcher=Watcher(seen.append))
    assert again == first and seen[-1].jobs[0].status == "done" and seen[-1].jobs[0].step == first["brief"].steps
    new = [item for _, item in read_event_log(log)[len(told) - 1 :]]
    assert [type(item).__name__ for item in new if not isinstance(item, NodeAdded | BaseAdded | MemoryFound | Tick)] == ["JobFinished"]
    assert world.train(tmp_path, [brief]) == first
    assert len([item for _, item in read_event_log(log) if isinstance(item, JobFinished)]) == 1
    longer = world.train(tmp_path, [brief | {"max_steps": brief["max_steps"] + 2}])
    assert (longer["brief"].status, longer["brief"].steps) == ("done", first["brief"].steps + 2)
    (tmp_path / "jobs" / "brief" / "adapter_model.safetensors").unlink()
    assert sha256(Path(world.train(tmp_path, [brief | {"max_steps": brief["max_steps"] + 2}])["brief"].path))


def test_bad_jobs_fail_alone_and_say_why(world: World, tmp_path: Path) -> None:
    orders = [
        job("missing", str(tmp_path / "none.jsonl")),
        job("sound", str(world.data / "b.jsonl"), max_steps=3, gpus=3),
        job("impossible", str(world.data / "b.jsonl"), target_modules=["none_such"]),
    ]
    lines: list[str] = []
    results = world.train(tmp_path / "out", orders, watcher=Watcher(note=lines.append))
    assert {name: result.status for name, result in results.items()} == {"missing": "failed", "sound": "done", "impossible": "failed"}
    assert "none.jsonl" in results["missing"].reason and "none_such" in results["impossible"].reason
    assert any("sound: some of its 3 replicas run in turn" in line for line in lines)
    assert read_object(tmp_path / "out" / "jobs" / "missing" / "result.json")["status"] == "failed"


def test_what_concerns_all_is_one_error(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--policy chess"):
        world.train(tmp_path, policy="chess")
    with pytest.raises(ConfigError, match="do not make it faster"):
        world.train(tmp_path, policy="residual_capacity-growth")
    with pytest.raises(ConfigError, match="layout: shared is for `tlora train`"):
        train_on_cluster(run_spec(world.base, tmp_path, world.orders, layout="shared"), gpus=2, device="cpu")
    assert world.train(tmp_path / "out", world.orders[1:2]).status == "done"
    other = save_base(tmp_path / "base", hidden_size=128, intermediate_size=160, num_hidden_layers=2)
    with pytest.raises((ModelError, ConfigError)):
        train_on_cluster(run_spec(other, tmp_path / "out", world.orders[1:2], deterministic=True), device="cpu")


def test_memory_is_counted_for_the_largest_adapter(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def count(_model: object, _device: object, _layout: str, *adapters: object) -> None:
        asked.append(adapters)
        raise ModelError("enough")

    monkeypatch.setattr(cluster_run, "count_base", count)
    run = run_spec(world.base, tmp_path, [job("a", str(world.data), r=8), job("b", str(world.data), r=130)])
    with pytest.raises(ModelError, match="enough"):
        train_on_cluster(run, device="cpu")
    assert asked == [(192, False)]


def test_train_says_what_it_does_not_read(world: World, tmp_path: Path) -> None:
    lines: list[str] = []
    train(world.base, tmp_path, [{**world.orders[1], "arrival_seconds": 5, "max_steps": 1}], watcher=Watcher(note=lines.append))
    assert any("arrival_seconds, priority" in line and "tlora cluster" in line for line in lines)
