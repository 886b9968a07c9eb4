"""A base in stages of which another host's worker lends a GPU for the first: real ranks, TLS on loopback, and the bytes of one process."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cluster.test_listeners import wait_for
from tests.engine.ranks.test_group_changes import PATIENCE_SECONDS, Worker, World
from tests.engine.ranks.test_group_changes import ended as ended
from tests.engine.ranks.test_lent_gpus import LENT, Host, listen
from tests.engine.tiny_runs import TWO_LINEARS, job, write_rows
from tests.process_hooks import REPORT_EACH_STEP, let_hold, slow_down
from tlora.engine.messages import SetGpus, SetPlan, Stop
from tlora.engine.ranks.lending_line import LENDING, Lent
from tlora.engine.ranks.lent_ranks import LostLenderError
from tlora.job import JobSpec
from tlora.link.keyed_listener import dial_keyed
from tlora.planning.base_parts import count_parts
from tlora.planning.memory import ACTIVATION_RANK, count_base, memory_limit
from tlora.protocol import Action, JobProfile, JobSubmitted, MemoryFound, NodeAdded, RejectJob, StartGroup
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.base_parts import with_stages
from tlora.shape.cost import CostModel
from tlora.shape.predicted_constants import live_constants
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import gib
from tlora.worker_protocol import Failed, GpusChanged, Join, Joined, Load, Loaded, Report

STEPS = 40


def orders(directory: Path) -> list[dict[str, Any]]:
    data = str(write_rows(directory / "a.jsonl", 26, 1, high=20))
    pairs = directory / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "red boat {n}", "chosen": "sings {n % 3}", "rejected": "falls never"}}\n' for n in range(12)))
    return [
        job("dropout", data, gpus=2, lora_dropout=0.1, max_steps=STEPS, save_steps=10, target_modules=TWO_LINEARS),
        job("evaluated", data, max_steps=6, batch_size=2, r=7, seed=3, eval_size=4, eval_steps=5, target_modules=["down_proj"]),
        job("preferred", str(pairs), objective="dpo", max_steps=4, batch_size=2, target_modules=TWO_LINEARS),
    ]


class Apart(World):
    """Each host has the base with the layers that it does not need as no numbers: those from the one on, and those before, at which it is
    cut.
    """

    def __init__(self, directory: Path, make: Callable[[Path], list[dict[str, Any]]], layers: int = 2, cut: int = 1) -> None:
        super().__init__(directory, make, num_hidden_layers=layers)
        first, last = ([f"model.layers.{n}." for n in numbers] for numbers in (range(cut), range(cut, layers)))
        self.first = self._spoil("first", *last, "model.norm.", "lm_head.")
        self.last = self._spoil("last", *first, "model.embed_tokens.")

    def _spoil(self, name: str, *parts: str) -> Path:
        where = self.directory / name
        shutil.copytree(self.base, where)
        tensors = load_file(where / "model.safetensors")
        spoiled = {name: torch.full_like(t, torch.nan) if name.startswith(parts) else t for name, t in tensors.items()}
        assert 0 < sum(bool(t.isnan().any()) for t in spoiled.values()) < len(spoiled)
        save_file(spoiled, where / "model.safetensors", {"format": "pt"})
        return where

    def leader(self, out: Path) -> Worker:
        worker = Worker(Load(str(self.last), str(out), "cpu", time.time(), deterministic=True, layout="stages", stages=2), (0,))
        self.workers.append(worker)
        return worker

    def spanning(self, out: Path, **lent: Any) -> tuple[Worker, Host]:
        """`lent`: settings of the other host's worker."""
        worker = self.leader(out)
        host = Host(self.first, out, listen(worker), **lent)
        worker.inbox.put(SetPlan(128))
        self.join(worker)  # before the other host's GPU is told of: the jobs wait for it
        worker.inbox.put(SetGpus((0, LENT), lent=(LENT,)))
        return worker, host


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("lent-stages")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        let_hold(monkeypatch, directory, REPORT_EACH_STEP)
        yield directory


@pytest.fixture(scope="module")
def world(environment: Path) -> Apart:
    return Apart(environment, orders)


def test_each_host_loads_its_layers_and_jobs_have_the_bytes_of_one_process(world: Apart, tmp_path: Path) -> None:
    """SFT with dropout and two replicas in turn, evaluations, and DPO."""
    with slow_down(STEPS):
        worker, host = world.spanning(tmp_path)
        told = worker.until(lambda told: GpusChanged((0, LENT)) in told)
        assert Loaded(whole=False) in told
        worker.inbox.put(SetGpus((0,)))
        told = worker.until(lambda told: any(isinstance(report, GpusChanged) and report.fixed for report in told))
    assert told[-1] != GpusChanged((0,)), "its stages stay where they are"
    world.finish(worker, tmp_path)
    host.thread.join(PATIENCE_SECONDS)
    assert host.ended and host.brought == [], "a stage before the last reads no data"


def long_samples(directory: Path) -> list[dict[str, Any]]:
    data = directory / "long.jsonl"
    data.write_text("".join(f'{{"input_ids": {[5 + (row + n) % 60 for n in range(600)]}}}\n' for row in range(4)))
    return [job("long", str(data), gpus=2, batch_size=2, max_steps=2, lora_dropout=0.1, target_modules=TWO_LINEARS, max_length=2048)]


def scheduled(model: SuperModel, parameters: int, limits: tuple[int, int], **longest: int) -> list[Action]:
    """What a scheduler does with a job of each name, by its longest sample, on the leader's GPU and the small host's; each with an adapter
    of so many `parameters`.
    """
    cpu, gpus = torch.device("cpu"), (0, LENT)
    cost = CostModel({"base": live_constants(1e6)})
    cost.memory["base"] = with_stages(count_base(model, cpu, "stages"), count_parts(model, cpu, ACTIVATION_RANK), ordered=True)
    scheduler = Scheduler(LIVE_POLICIES["fifo"](), cost)
    jobs = [JobSubmitted(name, "base", 2, JobProfile(1200.0, 2, own, parameters), least_gpus=2) for name, own in longest.items()]
    hosts = [NodeAdded(name, (gpu,)) for name, gpu in zip(("leader", "small"), gpus, strict=True)]
    return [action for event in (*hosts, MemoryFound(gpus, limits), *jobs) for action in scheduler.handle(event, 1.0)]


@pytest.mark.slow
def test_a_job_that_fits_with_few_layers_on_the_small_host_trains_there(environment: Path, tmp_path: Path) -> None:
    """With half of the layers on each, as the two are equally fast, the small one has no memory for it. What does not fit is refused in
    words that name the stage, and by a scheduler, which lets in what the worker trains.
    """
    (environment / "unequal").mkdir()
    world = Apart(environment / "unequal", long_samples, layers=12, cut=2)
    model, spec = SuperModel(outline(str(world.base))), JobSpec.model_validate(world.orders[0])
    parts, layout = count_parts(model, torch.device("cpu"), ACTIVATION_RANK), model.layout(spec)
    limit = parts.stage_memory(0, 2, 0, 2).total_bytes([layout], 1024)
    assert parts.stage_memory(0, 6, 0, 2).total_bytes([layout], 600) > limit, "not with half of them"
    (world.directory / "never.jsonl").write_text(f'{{"input_ids": {[5 + n % 60 for n in range(1600)]}}}\n')
    never = world.orders[0] | {"name": "never", "data": str(world.directory / "never.jsonl")}
    rejected, started = scheduled(model, layout.numel, (memory_limit(torch.device("cpu")), limit), never=1600, long=600)
    assert isinstance(rejected, RejectJob) and rejected.job_id == "never"
    assert isinstance(started, StartGroup) and started.group.job_ids == ("long",) and started.group.gpus == (0, LENT)
    worker, host = world.spanning(tmp_path, memory_limit=limit)
    try:
        worker.inbox.put(Join(JobSpec.model_validate(never), attempt=9))
        told = worker.until(lambda told: any(isinstance(report, Failed) for report in told))
        (failed,) = [report for report in told if isinstance(report, Failed)]
        assert failed.job_id == "never" and f"and the limit is {gib(limit)}" in failed.reason
        assert "on the stage with layers 0 to 1 (base" in failed.reason and "activations of 1600 tokens" in failed.reason
        world.finish(worker, tmp_path)
        host.thread.join(PATIENCE_SECONDS)
        assert host.ended
    finally:
        while world.workers:
            world.workers.pop().stop()


@pytest.mark.slow
def test_a_lost_host_costs_what_followed_the_checkpoint(world: Apart, tmp_path: Path) -> None:
    with slow_down(STEPS):
        worker, host = world.spanning(tmp_path)
        worker.until(lambda _: any(int(path.name.removeprefix("checkpoint-")) >= 10 for path in tmp_path.glob("dropout/checkpoint-*")))
        os.kill(host.lender._processes[1].pid, signal.SIGKILL)
    worker._thread.join(PATIENCE_SECONDS)
    assert isinstance(worker.error, LostLenderError) and "was killed by signal 9" in str(worker.error)
    host.thread.join(PATIENCE_SECONDS)
    assert host.ended, "nor does a lender stay alone"
    again, _ = world.spanning(tmp_path)

    def joined(told: list[Report]) -> list[int]:
        return [report.steps for report in told if isinstance(report, Joined) and report.job_id == "dropout"]

    assert joined(again.until(lambda told: bool(joined(told)))) >= [10]
    world.finish(again, tmp_path)


def test_a_leader_that_waits_for_its_hosts_can_be_stopped(world: Apart, tmp_path: Path) -> None:
    """A host that has come, and starts no rank yet."""
    worker = world.leader(tmp_path)
    lending = listen(worker)
    line = dial_keyed(lending.address, lending.fingerprint, lending.key)
    line.send(LENDING.encode(Lent("b", 1, (LENT,))))
    worker.inbox.put(SetGpus((0, LENT), lent=(LENT,)))
    wait_for(lambda: worker.heartbeat.phase == "waiting")
    worker.stop()
    assert worker.error is None
    line.close()


@pytest.mark.slow
def test_stages_that_are_stopped_save_all_jobs(world: Apart, tmp_path: Path) -> None:
    """The parts of the first stage too, whose host is stopped at the same time."""
    with slow_down(STEPS):
        worker, host = world.spanning(tmp_path)
        worker.until(lambda _: worker.steps("dropout")[-1:] > [5])
        host.commands.put(Stop())
        worker.stop()
    assert worker.error is None
    saved = [int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("dropout/checkpoint-*")]
    assert STEPS > max(saved) >= worker.steps("dropout")[-1] > 5
    host.thread.join(PATIENCE_SECONDS)
    again, _ = world.spanning(tmp_path)
    world.finish(again, tmp_path)
