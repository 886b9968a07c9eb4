"""Ranks that are lost before the run has begun, where the others would wait for them: jobs that span, and a shared base."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tlora
from tests.engine.ranks.worlds import Told, World, open_world
from tests.engine.tiny_runs import job, run_spec, write_rows
from tlora.engine.check import check
from tlora.engine.messages import Assign, ToRank
from tlora.engine.ranks import rank_group
from tlora.errors import CapacityError, ModelError, RankError, TloraError
from tlora.json_file import read_object


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_servers: object) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("early")
    write_rows(directory / "a.jsonl", 12, high=6)
    data = str(directory / "a.jsonl")
    orders = [
        job("wide", data, gpus=2, max_steps=4, batch_size=4, target_modules=["q_proj"]),
        job("narrow", data, max_steps=3, batch_size=2, target_modules=["v_proj"]),
    ]
    with open_world(directory, lambda _: orders, hidden_size=256, intermediate_size=512, num_hidden_layers=10) as world:
        yield world


def kill(world: World, rank: int) -> None:
    os.kill(world.processes[rank].pid, signal.SIGKILL)


def at_assignment(monkeypatch: pytest.MonkeyPatch, act: Callable[[rank_group.RankGroup], None]) -> None:
    """Do so once, before a rank is told what it shall train."""
    tell, acts = rank_group.RankGroup.send, [act]

    def send(self: rank_group.RankGroup, rank: int, command: ToRank) -> None:
        if isinstance(command, Assign) and acts:
            acts.pop()(self)
        tell(self, rank, command)

    monkeypatch.setattr(rank_group.RankGroup, "send", send)


@pytest.mark.slow
def test_a_rank_that_is_lost_before_it_is_assigned_its_jobs_is_done_without(world: World, tmp_path: Path) -> None:
    told = Told(0, lambda: kill(world, 1))
    results = world.train(tmp_path / "out", 3, watcher=told.watcher)
    assert told.acted
    assert results.status == "done", told.lines
    assert told.said("CPU process 1 is lost before training: was killed by signal 9 (SIGKILL)")
    assert told.said("starting again on 2 CPU processes")
    world.same_bytes(tmp_path / "out")
    assert len(read_object(tmp_path / "out" / "run.json")["gpus"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_and_one_that_is_lost_while_the_others_wait_for_it(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    told = Told()
    at_assignment(monkeypatch, lambda _: kill(world, victim))
    results = world.train(tmp_path / "out", 2, watcher=told.watcher)
    assert results.status == "done", told.lines
    assert told.said(f"CPU process {victim} is lost before training") and told.said("starting again on 1 CPU process")
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow
def test_all_are_lost_at_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_all(rank_group: rank_group.RankGroup) -> None:
        for rank in range(2):
            kill(world, rank)
        while rank_group._meeting.inbox.qsize() < 2:  # the ends of both lines, to be heard together
            time.sleep(0.01)

    at_assignment(monkeypatch, kill_all)
    with pytest.raises(RankError, match=r"CPU process \d .*SIGKILL.*Start the run"):
        world.train(tmp_path / "out", 2)
    assert not (tmp_path / "out").exists()


def test_all_are_lost_before_anything_is_known(world: World, tmp_path: Path) -> None:
    def kill_all() -> None:
        for rank in range(2):
            kill(world, rank)

    with pytest.raises(TloraError, match=r"was killed by signal 9 \(SIGKILL\)"):
        world.train(tmp_path / "out", 2, watcher=Told(0, kill_all).watcher)
    assert not (tmp_path / "out").exists()


def test_all_are_lost_one_after_the_other(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last, and then the one on which the run is begun again."""
    told = Told()
    began = rank_group.RankGroup.start

    def start(self: rank_group.RankGroup) -> None:
        began(self)
        kill(world, -1)

    monkeypatch.setattr(rank_group.RankGroup, "start", start)
    with pytest.raises(TloraError, match=r"was killed by signal 9 \(SIGKILL\)"):
        world.train(tmp_path / "out", 2, watcher=told.watcher)
    assert told.said("starting again on 1 CPU process")
    assert not (tmp_path / "out").exists()


def test_under_a_launcher_the_run_ends(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends all ranks when one is lost, and none can be started in place of it."""
    monkeypatch.setattr(rank_group.RankGroup, "launched_elsewhere", property(lambda _: True))
    told = Told(0, lambda: kill(world, 1))
    with pytest.raises(RankError, match="CPU process 1 is lost .*SIGKILL.* Launch all ranks"):
        world.train(tmp_path / "out", 2, watcher=told.watcher)
    assert not (tmp_path / "out").exists()


def test_what_a_rank_ends_with_itself_is_raised(world: World, tmp_path: Path) -> None:
    """Every GPU would end so: a base with a torn file."""
    base = tmp_path / "base"
    base.mkdir()
    for file in world.base.iterdir():
        content = file.read_bytes()
        (base / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    told = Told()
    with pytest.raises(ModelError):
        tlora.train(run_spec(base, tmp_path / "out", world.orders, deterministic=True), device="cpu", gpus=2, watcher=told.watcher)
    assert not told.said("starting again")


@pytest.mark.slow
def test_a_base_that_was_to_be_shared_does_not_fit_on_what_is_left(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = check(run_spec(world.base, tmp_path / "out", world.orders, token_budget=64), device="cpu")
    base_bytes = sum(file.stat().st_size for file in world.base.glob("*.safetensors"))
    limit = int(0.85 * base_bytes) + found.activation_bytes + max(job.memory_bytes for job in found.jobs)
    spec = run_spec(world.base, tmp_path / "out", world.orders, deterministic=True, memory_limit=limit, token_budget=64)
    told = Told()
    at_assignment(monkeypatch, lambda _: kill(world, 1))
    world.processes.clear()
    with pytest.raises(CapacityError):
        tlora.train(spec, device="cpu", gpus=2, watcher=told.watcher)
    assert told.said("CPU process 1 is lost before training") and not (tmp_path / "out").exists()
