"""A base that does not fit on one rank is shared by all: the bytes of one process, also when a rank is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tlora
from tests.engine.conftest import save_base
from tests.engine.ranks.worlds import fork_children, hold_until_ranks_stop, record_ranks
from tests.engine.tiny_runs import job, run_spec, same_bytes, sha256, train, write_rows
from tests.process_hooks import hold
from tlora.engine.check import check
from tlora.engine.messages import ToRank
from tlora.engine.ranks import rank_group
from tlora.engine.results import Results
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import CapacityError
from tlora.json_file import read_object
from tlora.link.supervisor import SupervisedProcess
from tlora.worker_protocol import Join

NAMES = ("dropout", "evaluates", "long")


@dataclass
class World:
    base: Path
    orders: list[dict[str, Any]]
    whole: Path
    base_bytes: int
    job_bytes: int
    processes: list[SupervisedProcess] = field(default_factory=list[SupervisedProcess])

    def train(self, out: Path, gpus: int, share_of_base: float, **options: Any) -> Results:
        """With room on each rank for so much of the base, and for one job in micro-batches of 64 tokens."""
        self.processes.clear()
        limit = int(share_of_base * self.base_bytes) + self.job_bytes
        spec = run_spec(self.base, out, self.orders, deterministic=True, memory_limit=limit, token_budget=64)
        return tlora.train(spec, device="cpu", gpus=gpus, **options)

    def same_bytes(self, out: Path) -> None:
        same_bytes(out, self.whole, NAMES)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_servers: object) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("shared-runs")
    base = save_base(directory / "base", hidden_size=256, intermediate_size=512, num_hidden_layers=10)
    write_rows(directory / "a.jsonl", 24, high=6)
    data = str(directory / "a.jsonl")
    orders = [
        job("dropout", data, lora_dropout=0.1, max_steps=6, batch_size=2, save_steps=1, target_modules=["q_proj"]),
        job("evaluates", data, max_steps=5, batch_size=2, eval_size=2, eval_steps=2, seed=3, target_modules=["down_proj"]),
        job("long", data, max_steps=12, batch_size=2, save_steps=3, seed=4, target_modules=["v_proj"]),
    ]
    base_bytes = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        fork_children(monkeypatch, directory)
        train(base, directory / "whole", orders, deterministic=True)
        found = check(run_spec(base, directory / "out", orders, token_budget=64), device="cpu")
        job_bytes = found.activation_bytes + max(job.memory_bytes for job in found.jobs)
        world = World(base, orders, directory / "whole", base_bytes, job_bytes)
        record_ranks(monkeypatch, world.processes)
        monkeypatch.setattr(rank_group, "LOOK_SECONDS", 0.1)  # a stopped rank is lost after five looks
        yield world


@pytest.mark.slow
def test_a_base_that_does_not_fit_is_shared_with_the_same_bytes(world: World, tmp_path: Path) -> None:
    lines: list[str] = []
    results = world.train(tmp_path / "out", 2, 0.85, watcher=Watcher(note=lines.append))
    assert results.status == "done", {result.name: result.reason for result in results.values()}
    world.same_bytes(tmp_path / "out")
    assert any("with the whole base on each CPU process" in line for line in lines)
    assert read_object(tmp_path / "out" / "run.json")["base_shared"] is True


@pytest.mark.slow
def test_a_job_that_spans_over_a_shared_base(world: World, tmp_path: Path) -> None:
    """Its two replicas at the same time, on ranks that hold half of each layer; in one process one after the other, on a whole base."""
    orders = [{**world.orders[0], "name": "wide", "gpus": 2, "batch_size": 4}, world.orders[1]]
    whole = tlora.train(run_spec(world.base, tmp_path / "whole", orders, deterministic=True), device="cpu")
    found = check(run_spec(world.base, tmp_path / "out", orders, token_budget=64), device="cpu")
    limit = int(0.85 * world.base_bytes) + found.activation_bytes + max(job.memory_bytes for job in found.jobs)
    lines: list[str] = []
    spec = run_spec(world.base, tmp_path / "out", orders, deterministic=True, memory_limit=limit, token_budget=64)
    results = tlora.train(spec, device="cpu", gpus=2, watcher=Watcher(note=lines.append))
    assert (whole.status, results.status) == ("done", "done"), lines
    assert read_object(tmp_path / "out" / "run.json")["base_shared"] is True and any("a part of wide" in line for line in lines)
    for order in orders:
        assert sha256(tmp_path / "out" / order["name"]) == sha256(tmp_path / "whole" / order["name"])


@pytest.mark.slow
def test_saved_shared_and_resumed_whole(world: World, tmp_path: Path) -> None:
    told: list[int] = []

    def stop(progress: RunProgress) -> None:
        if not told and sum(job.step for job in progress.jobs) >= 5:
            told.append(progress.jobs[0].step)
            os.kill(os.getpid(), signal.SIGINT)

    with hold_until_ranks_stop(7):
        assert world.train(tmp_path / "out", 2, 0.85, watcher=Watcher(stop)).signal_number == signal.SIGINT
    assert world.train(tmp_path / "out", 1, 4.0, resume=True).status == "done"
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow
def test_a_lost_rank_ends_the_run_and_it_begins_again_on_what_is_left(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    killed: list[int] = []
    taken: list[Join] = []  # jobs that a rank was told to take: none, where all begin again

    def send(self: rank_group.RankGroup, rank: int, command: ToRank) -> None:
        taken.extend([command] if isinstance(command, Join) else [])
        tell(self, rank, command)

    tell = rank_group.RankGroup.send
    monkeypatch.setattr(rank_group.RankGroup, "send", send)

    def kill(progress: RunProgress) -> None:
        if not killed and sum(job.step for job in progress.jobs) >= 4:
            killed.append(world.processes[1].pid)
            os.kill(killed[0], signal.SIGKILL)
            release()

    with hold(6) as release:
        results = world.train(tmp_path / "out", 3, 0.85, watcher=Watcher(kill, lines.append))
    assert killed
    assert results.status == "done", lines
    world.same_bytes(tmp_path / "out")
    assert any("starting again from the last checkpoints, on 2 CPU processes" in line for line in lines)
    assert not taken


@pytest.mark.slow
def test_where_nothing_fits_on_what_is_left_one_message_says_how_to_go_on(world: World, tmp_path: Path) -> None:
    lines: list[str] = []
    killed: list[int] = []

    def kill(progress: RunProgress) -> None:
        if not killed and sum(job.step for job in progress.jobs) >= 4:
            killed.append(world.processes[0].pid)
            os.kill(killed[0], signal.SIGSTOP)
            release()

    with hold(6) as release:
        results = world.train(tmp_path / "out", 2, 0.85, watcher=Watcher(kill, lines.append))
    assert killed
    assert results.status == "stopped"
    told = "\n".join(lines)
    assert "resume with --resume on as many CPU processes" in told, told
    assert world.train(tmp_path / "out", 2, 0.85, resume=True).status == "done"
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow
def test_a_base_that_fits_in_no_form_is_refused_with_what_would_do(world: World, tmp_path: Path) -> None:
    spec = run_spec(world.base, tmp_path / "out", world.orders, memory_limit=int(0.6 * world.base_bytes))
    with pytest.raises(CapacityError, match="--gpus 3"):
        tlora.train(spec, device="cpu", gpus=2)
    assert not (tmp_path / "out").exists()
