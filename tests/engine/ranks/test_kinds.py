"""GPUs of two kinds, which ranks on a CPU are said to be: who computes what, what a deterministic run keeps, and the same bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.ranks.worlds import Told, World, open_world
from tests.engine.tiny_runs import TWO_LINEARS, job, run_spec, write_rows
from tlora.engine.ranks import coordinator
from tlora.engine.ranks.kinds import Gpus, check_stages_alike, gpus_of, place_on
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.worker_protocol import Memory

TWO = Gpus(("new", "old"), (1.0, 0.4), (24 << 30, 12 << 30))
THREE = Gpus(("new", "old", "old"), (1.0, 0.4, 0.4), (1, 1, 1))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_servers: object) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("kinds")
    data = str(write_rows(directory / "a.jsonl", 12, 1, high=20))
    orders = [
        job("long", data, max_steps=12, save_steps=4, target_modules=TWO_LINEARS),
        job("wide", data, gpus=2, max_steps=6, lora_dropout=0.1, seed=4, target_modules=TWO_LINEARS),
        job("short", data, max_steps=3, r=8, target_modules=TWO_LINEARS),
    ]
    with open_world(directory, lambda _: orders) as world:
        yield world


def test_ranks_say_what_they_are() -> None:
    memory = {0: Memory((10,), "new", True, 4e14), 1: Memory((5,), "old", True, 1e14), 2: Memory((5,), "old", True, 1.1e14)}
    found = gpus_of(memory, 4)
    assert found == Gpus(("new", "old", "old", "new"), (1.0, 0.25, 0.25, 1.0), (10, 5, 5, 10), 4e14), "the fourth is lost"
    assert found.kinds == ("new", "old") and found.describe()[0].startswith("GPUs of 2 kinds: 0 is new (1.00 x, ")
    on_cpus = gpus_of({0: Memory((10,), "cpu"), 1: Memory((10,), "cpu")}, 2)
    assert on_cpus == Gpus(("cpu", "cpu"), (1.0, 1.0), (10, 10), None)


def test_a_deterministic_run_keeps_each_job_on_a_kind() -> None:
    seconds = {"a": 10.0, "b": 4.0, "wide": 6.0}
    free, may_have = place_on(THREE, seconds, {"wide": 2}, {}, False, {})
    assert may_have == {} and free.spans["wide"].weights
    kept, may_have = place_on(THREE, seconds, {"wide": 2}, {}, True, {})
    assert kept.spans["wide"].ranks in ((1, 2), (2, 1)), "of the new kind there is one"
    assert may_have.keys() == seconds.keys() and set(may_have.values()) <= {(0,), (1, 2)} and may_have["wide"] == (1, 2)
    kinds = THREE.kinds_by_job(may_have)
    again, _ = place_on(THREE, seconds, {}, {}, True, dict.fromkeys(seconds, "old"))
    assert again.jobs[0] == () and kinds["wide"] == "old"
    assert THREE.strayed(kinds, ["wide", "a"], [0]).startswith("no GPU of their kind is left: wide") and not THREE.strayed(kinds, ["a"], [])
    alike = Gpus(("new", "new"), (1.0, 1.0), (1, 1))
    assert place_on(alike, seconds, {}, {}, True, {})[1] == {}, "all may go anywhere"


def test_stages_over_two_kinds_are_not_deterministic(tmp_path: Path) -> None:
    run = run_spec(tmp_path, tmp_path, [job("a", "a.jsonl")], deterministic=True)
    with pytest.raises(ConfigError, match=r"in stages over new and old, .* Take GPUs of one kind \(--gpus 1,2,\), or deterministic: false"):
        check_stages_alike(run, THREE, True)
    check_stages_alike(run, THREE, False)
    check_stages_alike(run.model_copy(update={"deterministic": False}), THREE, True)


def test_the_bytes_on_two_kinds_are_those_of_one_process(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "gpus_of", lambda *_: TWO)
    told = Told()
    results = world.train(tmp_path / "out", 2, watcher=told.watcher)
    assert results.status == "done", told.lines
    world.same_bytes(tmp_path / "out")
    facts = read_object(tmp_path / "out" / "run.json")
    homes, kinds = facts["homes"], facts["kinds"]
    assert kinds == {name: TWO.names[homes[name]] for name in world.names} and "spans" not in facts
    assert told.said("GPUs of 2 kinds: 0 is new (1.00 x, 24.00 GiB), 1 is old (0.40 x, 12.00 GiB)")
    assert told.said("deterministic: each job stays on one kind of GPU, for another gives other last bits (new: ")


def test_a_resume_goes_back_to_the_kind(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "gpus_of", lambda *_: TWO)
    stopped = Told(3, lambda: os.kill(os.getpid(), signal.SIGINT)).before_any_job_ends(monkeypatch)
    assert world.train(tmp_path / "out", 2, watcher=stopped.watcher).signal_number == signal.SIGINT
    kinds = read_object(tmp_path / "out" / "run.json")["kinds"]
    monkeypatch.setattr(coordinator, "gpus_of", lambda *_: Gpus(("old", "new"), (1.0, 2.5), TWO.limits))
    told = Told()
    results = world.train(tmp_path / "out", 2, resume=True, watcher=told.watcher)
    assert results.status == "done", told.lines
    world.same_bytes(tmp_path / "out")
    after = read_object(tmp_path / "out" / "run.json")["kinds"]
    assert after and after == {name: kinds[name] for name in after}, "those that had not ended"


def test_a_job_that_spans_two_kinds_is_cut_by_their_speeds(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And Ctrl-C while the page is written ends nothing."""

    def interrupted(out: Path) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return write(out)

    write = coordinator.write_report
    monkeypatch.setattr(coordinator, "gpus_of", lambda *_: TWO)
    monkeypatch.setattr(coordinator, "write_report", interrupted)
    told = Told()
    results = world.train(tmp_path / "out", 2, watcher=told.watcher, deterministic=False)
    assert results.status == "done" and results.report is not None, told.lines
    assert told.said("Interrupted: all jobs have ended, the page is written")
    facts = read_object(tmp_path / "out" / "run.json")
    assert len(facts["spans"]["wide"]["gpus"]) == 2 and "kinds" not in facts
    assert facts["spans"]["wide"]["weights"] == pytest.approx([1 / 1.4, 0.4 / 1.4] if facts["homes"]["wide"] == 0 else [0.4 / 1.4, 1 / 1.4])
