"""What the process of a wide worker tells its ranks, and what it makes of their answers: with ranks that do nothing by themselves."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.full_stream import FullStream
from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import (
    Bye,
    Enter,
    Faulty,
    Hello,
    Leave,
    Meet,
    PartReady,
    SetGpus,
    SetPlan,
    Spread,
    Stop,
)
from tlora.engine.ranks import worker_group as worker_group_module
from tlora.engine.ranks.rank_group import Lost
from tlora.engine.ranks.worker_group import WorkerGroup
from tlora.errors import RankError
from tlora.job import JobSpec
from tlora.link.flight import FlightRecorder, flight_name, read_flight
from tlora.protocol import BaseSpeed
from tlora.worker_protocol import (
    Alive,
    Failed,
    Finished,
    GpusChanged,
    Join,
    Joined,
    Left,
    Load,
    Loaded,
    Measured,
    Memory,
    Refused,
    Report,
    Stepped,
)


class Ranks:
    """Stands in for `RankGroup`: `sent` is what was told to which rank."""

    store = "the store"

    def __init__(self, count: int, program: object) -> None:
        self.living = list(range(count))
        self.hellos: dict[int, Any] = {}
        self.memory: dict[int, Memory] = {}
        self.going: set[int] = set()
        self.sent: list[tuple[int, Any]] = []
        self.spans: dict[str, ReplicaPlacement] = {}
        self.is_killed = self.is_stopped = False
        self.count, self.ended, self.dropped = count, list[int](), list[int]()

    def send(self, rank: int, command: object) -> None:
        self.sent.append((rank, command))

    def send_all(self, command: object) -> None:
        self.sent += [(rank, command) for rank in self.living]

    def wake(self) -> None:
        pass

    def add(self) -> int:
        self.count += 1
        return self.count - 1

    def is_lent(self, rank: int) -> bool:
        return False

    def release_lenders(self, wanted: object) -> None:
        pass

    def end(self, rank: int) -> None:
        self.ended.append(rank)

    def drop(self, rank: int) -> None:
        self.dropped.append(rank)

    def stop(self) -> None:
        self.is_stopped = True

    def kill(self) -> None:
        self.is_killed = True

    def take(self) -> list[tuple[int, Any]]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[WorkerGroup, Ranks, list[Report]]]]:
    def make(count: int = 2, deterministic: bool = True) -> tuple[WorkerGroup, Ranks, list[Report]]:
        monkeypatch.setattr(worker_group_module, "RankGroup", Ranks)
        told: list[Report] = []
        load = Load("base", str(tmp_path), "cpu", 0.0, deterministic)
        worker_group = WorkerGroup(
            load, tuple(range(4, 4 + count)), queue.SimpleQueue(), told.append, Heartbeat(), lambda: (order("first").job,)
        )
        return worker_group, worker_group._rank_group, told  # type: ignore[return-value]

    yield make


def order(name: str, gpus: int = 2) -> Join:
    return Join(JobSpec.model_validate({"name": name, "data": "d.jsonl", "gpus": gpus, "batch_size": 4}), "train", None, 3)


def spread(worker_group: WorkerGroup, ranks: Ranks, join: Join) -> None:
    """The job is on both ranks, and has met."""
    name = join.job.name
    worker_group._obey(join)
    number = worker_group._placements
    worker_group._hear(0, PartReady(name, 100, "train", number=number))
    worker_group._hear(1, PartReady(name, 100, "train", number=number))
    assert [type(command) for _, command in ranks.take()] == [Spread, Spread, Meet, Meet]


def greet(worker_group: WorkerGroup, rank: int) -> None:
    """The rank has connected: its group knows its `Hello` before it hands it on."""
    worker_group._rank_group.hellos[rank] = Hello(rank, 1, "here", {})
    worker_group._hear(rank, worker_group._rank_group.hellos[rank])


def test_ranks_are_entered_and_loaded_together(made: Callable[..., Any]) -> None:
    worker_group, ranks, told = made()
    worker_group._load = replace(worker_group._load, calibrate=True)
    for rank in (1, 0):
        greet(worker_group, rank)
    entered = [(rank, command.device, command.store, command.load.calibrate, command.expected) for rank, command in ranks.take()]
    expected = (order("first").job,)
    assert entered == [(1, "cpu", "the store", False, expected), (0, "cpu", "the store", True, expected)]
    assert ranks.going == {0, 1}
    worker_group._hear(0, Measured("CPU", BaseSpeed(1.0, 0.1, 0.1, 0.0)))
    ranks.memory = {0: Memory((30,)), 1: Memory((20,))}
    worker_group._hear(0, Loaded())
    assert told == [Measured("CPU", BaseSpeed(1.0, 0.1, 0.1, 0.0))]
    worker_group._hear(1, Loaded())
    assert told[1:] == [Memory((30, 20)), Loaded()]


def test_ranks_on_gpus_have_one_each(made: Callable[..., Any], tmp_path: Path) -> None:
    worker_group, ranks, _ = made()
    worker_group._load = Load("base", str(tmp_path), "cuda", 0.0)
    greet(worker_group, 1)
    ((_, command),) = ranks.take()
    assert isinstance(command, Enter) and command.device == "cuda:1"


def test_a_job_that_spans_is_opened_at_home_then_elsewhere_and_begins_together(made: Callable[..., Any]) -> None:
    worker_group, ranks, told = made()
    join = order("a")
    worker_group._obey(join)
    assert ranks.take() == [(0, Spread(join, ReplicaPlacement(2, (0, 1)), 1))]
    worker_group._hear(0, PartReady("a", 100, "its set", "its other set", 1))
    ((rank, follow),) = ranks.take()
    assert rank == 1 and isinstance(follow, Spread) and (follow.join.train_set, follow.join.eval_set) == ("its set", "its other set")
    assert not ranks.spans, "what is said now is of an earlier attempt: it has not met"
    worker_group._hear(1, PartReady("a", 100, "its set", number=1))
    assert ranks.take() == [(rank, Meet("a", ReplicaPlacement(2, (0, 1)), 100, 1)) for rank in (0, 1)]
    assert ranks.spans == {"a": ReplicaPlacement(2, (0, 1))}
    worker_group._hear(0, Joined("a", 0))
    worker_group._hear(0, Stepped("a", 1, 0.5))
    assert told == [Joined("a", 0), Stepped("a", 1, 0.5)]


def test_jobs_of_one_replica_are_spread_over_the_ranks(made: Callable[..., Any]) -> None:
    worker_group, ranks, _ = made()
    joins = [order(name, 1) for name in "abc"]
    for join in joins:
        worker_group._obey(join)
    assert ranks.take() == [(0, joins[0]), (1, joins[1]), (0, joins[2])]


@pytest.mark.parametrize("end", [Finished("a", {}), Failed("a", "why"), Left("a", 3, None), Refused("a", "no memory")])
def test_an_end_at_home_is_one_everywhere(made: Callable[..., Any], end: Report) -> None:
    worker_group, ranks, told = made()
    spread(worker_group, ranks, order("a"))
    worker_group._hear(0, end)
    assert ranks.take() == [(1, Leave("a"))] and told == [end]
    worker_group._obey(Leave("a"))
    assert not ranks.take() and not ranks.spans
    spread(worker_group, ranks, order("a"))  # its next attempt


def test_a_job_leaves_through_its_home(made: Callable[..., Any]) -> None:
    worker_group, ranks, told = made()
    spread(worker_group, ranks, order("a"))
    worker_group._obey(Leave("a")), worker_group._obey(Leave("a"))
    assert ranks.take() == [(0, Leave("a"))]
    worker_group._hear(0, Left("a", 2, "there"))
    assert told == [Left("a", 2, "there")]


def test_a_part_that_cannot_be_computed_makes_the_job_go_on_in_one_place(
    made: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    worker_group, ranks, told = made()
    join = order("a")
    spread(worker_group, ranks, join)
    worker_group._hear(1, Faulty("a", "no memory"))
    worker_group._hear(1, Faulty("a", "no memory"))
    assert ranks.take() == [(0, Leave("a"))] and "rank 1 cannot compute its part (no memory)" in capsys.readouterr().err
    worker_group._hear(0, Left("a", 2, "there"))
    assert ranks.take() == [(1, Leave("a")), (0, join)] and not told, "nobody else is to notice"
    worker_group._hear(0, Finished("a", {}))
    assert told == [Finished("a", {})]


def test_a_part_is_given_up_where_the_log_takes_nothing(made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group, ranks, _ = made()
    spread(worker_group, ranks, order("a"))
    monkeypatch.setattr(sys, "stdout", FullStream())
    monkeypatch.setattr(sys, "stderr", FullStream())
    worker_group._hear(1, Faulty("a", "no memory"))
    assert ranks.take() == [(0, Leave("a"))]


def test_a_part_that_cannot_be_opened_is_no_part(made: Callable[..., Any]) -> None:
    worker_group, ranks, _ = made()
    join = order("a")
    worker_group._obey(join)
    worker_group._hear(0, PartReady("a", 100, "train", number=1))
    ranks.take()
    worker_group._hear(1, Faulty("a", "no such set"))
    assert ranks.take() == [(0, Leave("a"))]
    worker_group._hear(0, Left("a", 0, None))
    assert ranks.take() == [(1, Leave("a")), (0, join)]


@pytest.mark.parametrize("wanted_first", [True, False])
def test_a_job_that_goes_on_in_one_place_may_leave_meanwhile(made: Callable[..., Any], wanted_first: bool) -> None:
    worker_group, ranks, told = made()
    spread(worker_group, ranks, order("a"))
    steps: list[Callable[[], None]] = [lambda: worker_group._obey(Leave("a")), lambda: worker_group._hear(1, Faulty("a", "why"))]
    for step in steps if wanted_first else steps[::-1]:
        step()
    assert ranks.take() == [(0, Leave("a"))]
    worker_group._hear(0, Left("a", 2, None))
    assert ranks.take() == [(1, Leave("a"))] and told == [Left("a", 2, None)]


def test_a_share_is_divided(made: Callable[..., Any]) -> None:
    worker_group, ranks, _ = made()
    worker_group._obey(SetPlan(1025, {"a": 1.0}))
    assert ranks.take() == [(rank, SetPlan(512, {"a": 1.0})) for rank in (0, 1)]


def test_nothing_begins_after_a_stop(made: Callable[..., Any]) -> None:
    worker_group, ranks, _ = made()
    worker_group._obey(order("a"))
    worker_group._hear(0, PartReady("a", 100, "train", number=1))
    worker_group._obey(Stop())
    ranks.take()
    worker_group._hear(1, PartReady("a", 100, "train", number=1))
    assert ranks.is_stopped and not ranks.take()


def test_the_pulse_is_that_of_the_rank_that_has_not_moved(made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group, _, _ = made()
    clock = iter(range(100))
    monkeypatch.setattr(worker_group_module.time, "monotonic", lambda: float(next(clock)))
    worker_group._hear(0, Alive(0, "training", 5, ("a",)))
    worker_group._hear(1, Alive(0, "training", 7, ("b",)))
    stuck = worker_group._heartbeat.count
    assert worker_group._heartbeat.phase == "training" and set(worker_group._heartbeat.in_flight) == {"a", "b"}
    worker_group._hear(1, Alive(0, "training", 8))
    assert worker_group._heartbeat.count == stuck, "rank 0 has not moved"
    worker_group._hear(0, Alive(0, "waiting", 6))
    assert worker_group._heartbeat.count != stuck and worker_group._heartbeat.phase == "training"
    worker_group._hear(1, Alive(0, "waiting", 9))
    assert worker_group._heartbeat.phase == "waiting"


def test_with_a_rank_all_is_lost_and_it_alone_is_suspected(
    made: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_group, ranks, _ = made()
    monkeypatch.setattr(worker_group_module.os, "getpid", lambda: 77)
    for rank, jobs in enumerate((("a",), ("b",))):
        FlightRecorder(tmp_path, flight_name(77, rank)).begin(jobs)
    with pytest.raises(RankError, match=r"rank 1 \(CPU process 5\) is lost: was stopped"):
        worker_group._hear(1, Lost("was stopped for 5 s"))
    assert ranks.is_killed and read_flight(tmp_path, 77) == {"b"}


def loaded(worker_group: WorkerGroup, *ranks: int, whole: bool = True) -> None:
    for rank in ranks:
        worker_group._rank_group.memory[rank] = Memory((10 + rank,))
        worker_group._hear(rank, Loaded(whole))


def test_a_gpu_that_comes_takes_a_job_and_nobody_above_hears_of_its_move(made: Callable[..., Any]) -> None:
    worker_group, ranks, told = made(1)
    joins = [order(name, 1) for name in "abc"]
    for join in joins:
        worker_group._obey(join)
    worker_group._obey(SetPlan(512))
    loaded(worker_group, 0)
    worker_group._obey(SetGpus((4, 9)))
    worker_group._obey(SetPlan(1024))
    ranks.take(), told.clear()
    greet(worker_group, 1)
    ((_, entered),) = ranks.take()
    assert (entered.load.layout, entered.together) == ("whole", 1) and [spec.name for spec in entered.expected] == ["a", "b", "c"]
    assert not told, "the jobs train on while the base is loaded"
    loaded(worker_group, 1)
    assert ranks.take() == [(0, SetPlan(512)), (1, SetPlan(512)), (0, Leave("c"))]
    assert told == [GpusChanged((4, 9)), Memory((10, 11))]
    worker_group._hear(0, Left("c", 3, "there"))
    assert ranks.take() == [(1, joins[2])] and len(told) == 2
    worker_group._hear(1, Joined("c", 3))
    assert told[2:] == [Joined("c", 3)]


def test_a_job_without_room_where_it_moves_goes_back(made: Callable[..., Any]) -> None:
    worker_group, ranks, told = made(1)
    joins = [order(name, 1) for name in "ab"]
    for join in joins:
        worker_group._obey(join)
    loaded(worker_group, 0)
    worker_group._obey(SetGpus((4, 9)))
    loaded(worker_group, 1)
    worker_group._hear(0, Left("b", 3, "there"))
    ranks.take(), told.clear()
    worker_group._hear(1, Refused("b", "too little memory"))
    assert ranks.take() == [(0, joins[1])] and not told
    worker_group._hear(0, Refused("b", "too little memory"))
    assert told == [Refused("b", "too little memory")], "once"


def test_a_gpu_is_given_back_when_its_jobs_have_left(made: Callable[..., Any]) -> None:
    worker_group, ranks, told = made(2)
    joins = [order(name, 1) for name in "ab"]
    for join in joins:
        worker_group._obey(join)
    loaded(worker_group, 0, 1)
    ranks.take(), told.clear()
    worker_group._obey(SetGpus((4,)))
    assert ranks.take() == [(1, Leave("b"))] and not ranks.ended
    worker_group._hear(1, Left("b", 3, "there"))
    assert ranks.take() == [(0, joins[1])] and ranks.ended == [1] and not told
    worker_group._hear(1, Bye())
    assert told == [GpusChanged((4,)), Memory((10,))]


@pytest.mark.parametrize("end", ["dies", "late"])
def test_a_rank_that_does_not_join_changes_nothing(made: Callable[..., Any], end: str, capsys: pytest.CaptureFixture[str]) -> None:
    worker_group, ranks, told = made(1)
    worker_group._obey(order("a", 1))
    loaded(worker_group, 0)
    worker_group._obey(SetGpus((4, 8, 9)))
    ranks.take(), told.clear()
    if end == "dies":
        worker_group._hear(2, Lost("was killed by signal 9"))
        reason = "the rank on CPU process 9 has ended while it joined: was killed by signal 9"
    else:
        worker_group._refuse_change(None, reason := "the rank on GPU 8 has not loaded the base in time")
    assert told == [GpusChanged((4,), reason)] and reason in capsys.readouterr().err
    assert ranks.dropped == ([1] if end == "dies" else [1, 2]) and not ranks.take()
    worker_group._obey(SetGpus((4, 9)))  # another time
    loaded(worker_group, 3)
    assert told[1] == GpusChanged((4, 9))


def test_gpus_of_a_base_in_parts_are_fixed(made: Callable[..., Any]) -> None:
    worker_group, ranks, told = made(2)
    loaded(worker_group, 0, 1, whole=False)
    told.clear()
    worker_group._obey(SetGpus((4, 5, 6)))
    assert told == [GpusChanged((4, 5), "the base is held in parts, by 2 GPUs or the host's memory", fixed=True)] and ranks.count == 2
    worker_group._obey(SetGpus((4, 5)))
    assert told[1] == GpusChanged((4, 5))


def test_gpus_may_change_before_the_base_is_loaded(made: Callable[..., Any]) -> None:
    worker_group, ranks, _ = made(1)
    worker_group._obey(SetGpus((4, 9)))
    assert ranks.count == 1, "it may turn out that it is held in parts"
    loaded(worker_group, 0)
    assert ranks.count == 2


def test_a_stop_ends_what_still_joins(made: Callable[..., Any]) -> None:
    worker_group, ranks, _ = made(1)
    loaded(worker_group, 0)
    worker_group._obey(SetGpus((4, 9)))
    worker_group._obey(Stop())
    assert ranks.dropped == [1] and ranks.is_stopped


def test_what_is_ready_for_an_earlier_placement_does_not_count(made: Callable[..., Any]) -> None:
    worker_group, ranks, _ = made()
    worker_group._obey(order("a"))
    worker_group._hear(0, Refused("a", "no memory"))
    worker_group._obey(order("a"))
    ranks.take()
    worker_group._hear(1, PartReady("a", 100, "train", number=1))
    worker_group._hear(0, PartReady("a", 100, "train", number=2))
    assert [type(command) for _, command in ranks.take()] == [Spread], "and no Meet"


def test_a_gpu_that_a_worker_does_not_see_is_refused(made: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker_group, ranks, told = made(1)
    worker_group._load = Load("base", str(tmp_path), "cuda", 0.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,2")
    loaded(worker_group, 0)
    worker_group._obey(SetGpus((2, 4)))
    greet(worker_group, 1)
    assert ranks.take()[-1][1].device == "cuda:1"
    loaded(worker_group, 1)
    worker_group._obey(SetGpus((2, 3, 4)))
    assert told[-1].gpus == (2, 4) and told[-1].refused.startswith("GPU 3: CUDA_VISIBLE_DEVICES hides it") and not told[-1].fixed
