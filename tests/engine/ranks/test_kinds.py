"""GPUs of two kinds, which ranks on a CPU are said to be: who computes what, what a deterministic run keeps, and the same bytes."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.ranks.worlds import Told, World, open_world
from tests.engine.tiny_runs import TWO_LINEARS, job, rows, run_spec, write_rows
from tlora.batching.replicas import Held, ReplicaPlacement
from tlora.engine.messages import Faulty
from tlora.engine.ranks import coordinator
from tlora.engine.ranks.kinds import Gpus, check_stages_alike, gpus_of, place_on
from tlora.engine.ranks.rank import RemoteGuard
from tlora.engine.run_monitor import RunMonitor
from tlora.engine.session import Assignment, Loaded, Session, load
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.job import RunSpec
from tlora.json_file import read_object
from tlora.planning.base_placement import BasePlacement, choose_form
from tlora.planning.holders import Holders
from tlora.planning.plan import take_whole
from tlora.planning.planned_job import PlannedJob
from tlora.store.serving import ServingFiles
from tlora.worker_protocol import Memory

TWO = Gpus(("new", "old"), (1.0, 0.4), (24 << 30, 12 << 30))
SHORT = 40  # tokens of a sample; there are shorter and longer ones
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
    free, may_have = place_on(THREE, seconds, {"wide": 2}, Holders(), False, {})
    assert may_have == {} and free.spans["wide"].weights
    kept, may_have = place_on(THREE, seconds, {"wide": 2}, Holders(), True, {})
    assert kept.spans["wide"].ranks in ((1, 2), (2, 1)), "of the new kind there is one"
    assert may_have.keys() == seconds.keys() and set(may_have.values()) <= {(0,), (1, 2)} and may_have["wide"] == (1, 2)
    kinds = THREE.kinds_by_job(may_have)
    again, _ = place_on(THREE, seconds, {}, Holders(), True, dict.fromkeys(seconds, "old"))
    assert again.jobs[0] == () and kinds["wide"] == "old"
    assert THREE.strayed(kinds, ["wide", "a"], [0]).startswith("no GPU of their kind is left: wide") and not THREE.strayed(kinds, ["a"], [])
    alike = Gpus(("new", "new"), (1.0, 1.0), (1, 1))
    assert place_on(alike, seconds, {}, Holders(), True, {})[1] == {}, "all may go anywhere"


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


def test_a_rank_with_less_memory_computes_the_short_samples_alone(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It plans with the longest that it gets. A deterministic run is made to do what others do, to compare losses."""
    lengths = sorted(len(row["prompt"].split()) + len(row["completion"].split()) for row in rows(world.data / "a.jsonl"))

    def form_of_unequal(run: RunSpec, jobs: tuple[PlannedJob, ...], *others: Any, **named: Any) -> BasePlacement:
        (wide,) = [job for job in jobs if job.spec.name == "wide"]
        assert wide.data is not None and wide.longest > SHORT > int(wide.data.train.lengths.min()), lengths
        held = {"wide": {1: Held(SHORT, 0.5)}}
        return replace(choose_form(run, jobs, *others, **named), holders=Holders({"wide": (0,)}, held))

    monkeypatch.setattr(coordinator, "choose_form", form_of_unequal)
    told = Told()
    orders = [order for order in world.orders if order["name"] == "wide"]
    results = world.train(tmp_path / "out", 2, orders, watcher=told.watcher)
    assert results.status == "done", told.lines
    facts = read_object(tmp_path / "out" / "run.json")
    assert facts["homes"]["wide"] == 0 and facts["spans"]["wide"] == {"replicas": 2, "gpus": [0, 1], "longest_samples": [0, SHORT]}
    assert told.said(f"CPU process 0: wide; CPU process 1: a part of wide (samples of up to {SHORT} tokens)")
    assert told.said(f"(the longest sample has {SHORT})"), told.lines
    whole, found = (
        [row["loss"] for row in rows(out / "wide" / "metrics.jsonl") if "loss" in row] for out in (world.whole, tmp_path / "out")
    )
    assert found == pytest.approx(whole, rel=1e-5) and found != whole, "other replicas are summed, and rounded"


def test_a_part_that_finds_too_little_memory_is_told(world: World, tmp_path: Path) -> None:
    """Else its lead rank would wait for it without an end. All of the job, which comes here later, is refused."""
    orders, place = [order for order in world.orders if order["name"] == "wide"], torch.device("cpu")
    run = run_spec(world.base, tmp_path / "out", orders, token_budget=SHORT)
    monitor, inbox, said = RunMonitor(tmp_path / "out", {"wide": 4}, Watcher(), False), queue.SimpleQueue[Any](), list[Any]()

    def session_with(limit: int | None, span: ReplicaPlacement) -> tuple[Session, Loaded]:
        ordered = run if limit is None else run.model_copy(update={"memory_limit": limit})
        assignment = Assignment(ordered, frozenset(), None, {"wide": span}, frozenset({"wide"}), (), frozenset({"wide"}), 1)
        loaded = load(ordered, place, monitor, False, None, lambda: assignment)
        return Session(ordered, loaded, monitor, ServingFiles(run.base_model), RemoteGuard(), inbox, said.append), loaded

    part = ReplicaPlacement(2, (0, 1), (), (0, SHORT), (0.5, 0.5))
    session, loaded = session_with(None, part)
    (job,) = loaded.plan.jobs
    assert loaded.plan.longest == SHORT and not job.problems, "there is memory for its part"
    too_little = loaded.plan.total_bytes([job.layout]) - 1 if job.layout is not None else 0
    session.driver.close()
    session, loaded = session_with(too_little, part)
    session.turn()
    (fault,) = said
    assert isinstance(fault, Faulty) and fault.job == "wide" and fault.reason.startswith("job 'wide' needs ")
    session.driver.close()
    said.clear()
    session, loaded = session_with(too_little + 1, part)
    (job,) = loaded.plan.jobs
    assert not job.problems
    take_whole(job, loaded.plan)
    assert job.span is None and job.longest > SHORT and job.problems and job.problems[0].startswith("job 'wide' needs ")
    session.driver.close()
