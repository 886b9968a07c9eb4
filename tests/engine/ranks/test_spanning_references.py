"""DPO over an adapter on several ranks, each of which computes a part of the job: bytes of one process, also when a rank is lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks.worlds import Told, World, open_world
from tests.engine.test_references import write_sets
from tests.engine.tiny_runs import job, same_bytes, train, write_rows
from tests.process_hooks import hold


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_servers: object) -> Iterator[World]:
    """A DPO job of two replicas and one of one, both over an adapter that was trained before."""
    directory = tmp_path_factory.mktemp("spanning")
    write_sets(directory)

    def make_orders(base: Path) -> list[dict[str, Any]]:
        train(base, directory / "sft", [job("j", str(write_rows(directory / "d.jsonl", 20)), max_steps=8)])
        shared = {"adapter_path": str(directory / "sft" / "j"), "save_steps": 3}
        return [
            job("two", str(directory / "pairs.jsonl"), objective="dpo", gpus=2, max_steps=10, **shared),
            job("one", str(directory / "answers.jsonl"), objective="kto", max_steps=10, **shared),
        ]

    with open_world(directory, make_orders) as world:
        yield world


@pytest.mark.slow
def test_the_bytes_are_those_of_one_process(world: World, tmp_path: Path) -> None:
    told = Told()
    results = world.train(tmp_path / "out", 2, watcher=told.watcher)
    assert results.status == "done" and told.said("a part of two"), told.lines
    world.same_bytes(tmp_path / "out")


@pytest.mark.slow
def test_a_rank_that_takes_a_job_over_has_its_reference(world: World, tmp_path: Path) -> None:
    """The adapter that the job starts from is gone by then."""
    start, out = shutil.copytree(world.data / "sft" / "j", tmp_path / "start"), tmp_path / "out"
    orders = [{**world.orders[0], "adapter_path": str(start)}]

    def lose() -> None:
        if any((out / "two").glob("checkpoint-*/MANIFEST.json")):  # without one the job begins anew, for which it needs its start
            shutil.rmtree(start)
        os.kill(world.processes[0].pid, signal.SIGKILL)
        release()

    told = Told(6, lose)
    with hold(7) as release:
        results = world.train(out, 2, orders, watcher=told.watcher)
    assert told.said("CPU process 0 is lost") and results.status == "done", told.lines
    same_bytes(out, world.whole, ["two"])
