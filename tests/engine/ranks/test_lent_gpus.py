"""A worker with GPUs of another host, whose worker starts ranks for it: real ranks, TLS on loopback. A job that spans both has the bytes of
one process, and who does not know the key comes in nowhere.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.ranks.test_group_changes import PATIENCE_SECONDS, Worker, World
from tests.engine.tiny_runs import TWO_LINEARS, job, write_rows
from tests.process_hooks import REPORT_EACH_STEP, hold, let_hold, slow_down
from tlora.engine.messages import Listen, SetGpus, SetPlan, Stop
from tlora.engine.ranks import lending, lent_ranks
from tlora.engine.ranks.lending import Lender
from tlora.engine.ranks.lending_line import LENDING, Lent
from tlora.engine.ranks.lent_ranks import LentRank, LentRanks, LostLenderError
from tlora.engine.ranks.rank_group import RankGroup
from tlora.errors import ConfigError
from tlora.link.keyed_listener import KeyedListener, dial_keyed
from tlora.link.lines import LONGEST_LINE, Line
from tlora.link.supervisor import SupervisedProcess, start_process
from tlora.worker_protocol import GpusChanged, Joined, Lending, Listening, Load

LENT = 1000


class Host:
    """Another host's worker, in a thread of this process; its ranks are processes of their own."""

    def __init__(self, base: Path, directory: Path, lending: Lending, **settings: Any) -> None:
        load = Load(str(base), str(directory / "elsewhere"), "cpu", time.time(), deterministic=True, **settings)
        self.lender, self.commands = Lender(load, (0,), lending, self._bring), queue.SimpleQueue[Any]()
        self.brought: list[str] = []
        self.ended: str | BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _bring(self, join: Any) -> Any:
        self.brought.append(join.job.name)
        return join

    def _run(self) -> None:
        try:
            self.ended = self.lender.run(self.commands)
        except ConfigError as error:
            self.ended = error


def orders(directory: Path) -> list[dict[str, Any]]:
    data = str(write_rows(directory / "a.jsonl", 26, 1, high=20))
    return [
        job("two", data, gpus=2, lora_dropout=0.1, max_steps=60, batch_size=2, save_steps=20, target_modules=TWO_LINEARS),
        job("short", data, max_steps=4, r=7, seed=3, target_modules=TWO_LINEARS),
    ]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("lent")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        let_hold(monkeypatch, directory, REPORT_EACH_STEP)
        yield directory


@pytest.fixture(scope="module")
def world(environment: Path) -> World:
    return World(environment, orders)


def listen(worker: Worker) -> Lending:
    worker.inbox.put(Listen("127.0.0.1"))
    told = worker.until(lambda told: any(isinstance(report, Listening) for report in told))
    found = next(report for report in told if isinstance(report, Listening))
    assert not found.problem and found.key not in repr(found)
    return Lending(found.address, found.fingerprint, found.key, {LENT: 0})


def spanning(world: World, out: Path) -> tuple[Worker, Host]:
    """A worker that has a GPU of its own and one of another host, which its jobs find when they join."""
    worker = Worker(Load(str(world.base), str(out), "cpu", time.time(), deterministic=True), (0,))
    world.workers.append(worker)
    host = Host(world.base, out, listen(worker))
    worker.inbox.put(SetPlan(128))
    worker.inbox.put(SetGpus((0, LENT), lent=(LENT,)))
    worker.until(lambda told: GpusChanged((0, LENT)) in told)
    world.join(worker)
    worker.until(lambda _: worker.steps("two")[-1:] > [5])
    assert worker.group._jobs["two"].span.ranks == (0, 1), "a rank of another host leads no job"
    assert all(job.span.lead_rank == 0 for job in worker.group._jobs.values())
    return worker, host


def test_a_job_spans_hosts_and_comes_back_with_the_bytes_of_one_process(world: World, tmp_path: Path) -> None:
    """It begins on both and goes on on one while it trains. The lender is let go with its GPU."""
    with slow_down(60):
        worker, host = spanning(world, tmp_path)
        lending = listen(worker)
        for wrong in (dataclasses.replace(lending, key="0" * 64), dataclasses.replace(lending, fingerprint="sha256:" + "0" * 64)):
            stranger = Host(world.base, tmp_path, wrong)
            stranger.thread.join(PATIENCE_SECONDS)
            assert isinstance(stranger.ended, ConfigError), "it says nothing to who has another certificate, and lets in no other key"
        assert host.brought == ["two"] and not (tmp_path / "elsewhere" / "two").exists()
        worker.inbox.put(SetGpus((0,)))
        host.thread.join(PATIENCE_SECONDS)
        assert host.ended == "its GPUs are needed by the other host no more, or that one is gone"
        assert "two" in worker.group._jobs, "it goes on here"
    world.finish(worker, tmp_path)


@pytest.mark.slow
def test_a_host_that_is_lost_costs_what_followed_the_checkpoint(world: World, tmp_path: Path) -> None:
    out = tmp_path / "lost"
    with hold(25):
        worker, host = spanning(world, out)
        worker.until(lambda _: any(int(path.name.removeprefix("checkpoint-")) >= 20 for path in out.glob("two/checkpoint-*")))
        os.kill(host.lender._processes[1].pid, signal.SIGKILL)
    worker._thread.join(PATIENCE_SECONDS)
    assert isinstance(worker.error, LostLenderError) and "was killed by signal 9" in str(worker.error)
    host.thread.join(PATIENCE_SECONDS)
    assert host.ended, "nor does a lender stay alone"
    again = world.worker(out, 0)
    told = again.until(lambda told: any(isinstance(report, Joined) and report.job_id == "two" for report in told))
    assert next(report.steps for report in told if isinstance(report, Joined) and report.job_id == "two") >= 20
    world.finish(again, out)


@pytest.mark.slow
def test_a_host_that_stops_while_it_joins_changes_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank has begun, and gets no further."""

    def start_and_suspend(*given: Any, **options: Any) -> SupervisedProcess:
        process = start_process(*given, **options)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(lending, "start_process", start_and_suspend)
    worker = world.worker(tmp_path, 0)
    host = Host(world.base, tmp_path, listen(worker))
    worker.inbox.put(SetGpus((0, LENT), lent=(LENT,)))
    while not host.lender._processes:
        time.sleep(0.01)
    host.commands.put(Stop())
    told = worker.until(lambda told: any(isinstance(report, GpusChanged) for report in told))
    refused = next(report for report in told if isinstance(report, GpusChanged))
    assert refused.gpus == (0,) and "which has lent its GPU, is gone or cut off" in refused.refused
    host.thread.join(PATIENCE_SECONDS)
    assert host.ended == "it was told to stop"
    world.finish(worker, tmp_path)


def test_a_lender_that_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended process keeps its line, and its host's kernel answers for it. Each word gives it the whole time anew."""
    given = queue.SimpleQueue[float | None]()
    read_line = Line.read_line

    def read(line: Line, timeout_seconds: float | None = None, longest: int = LONGEST_LINE) -> bytes | None:
        given.put(timeout_seconds)
        return read_line(line, timeout_seconds, longest)

    monkeypatch.setattr(lent_ranks, "CUT_SECONDS", 600.0)
    lost: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    ranks = LentRanks("127.0.0.1", tmp_path, lambda rank, said: lost.put((rank, said)))
    rank, there = ranks.add(1, LENT), ranks.listening
    line = dial_keyed(there.address, there.fingerprint, there.key)
    monkeypatch.setattr(Line, "read_line", read)
    line.send(LENDING.encode(Lent("b", 7, (LENT,))))
    while given.get() != 600.0:  # its admission, and what goes before
        pass
    for _ in range(8):
        line.send(LENDING.encode(Lent("b", 7, (LENT,))))
        assert given.get() == 600.0
    assert lost.empty() and not rank.why_lost()
    monkeypatch.setattr(lent_ranks, "CUT_SECONDS", 0.1)
    line.send(LENDING.encode(Lent("b", 7, (LENT,))))
    assert given.get() == 0.1
    assert lost.get(timeout=PATIENCE_SECONDS) == (1, None)
    assert rank.why_lost() == "host b, which has lent its GPU, is gone or cut off"
    line.close()
    ranks.close()


def test_a_lender_that_comes_as_the_group_ends_is_let_go(tmp_path: Path) -> None:
    ranks = LentRanks("127.0.0.1", tmp_path, lambda rank, said: None)
    line = dial_keyed(ranks.listening.address, ranks.listening.fingerprint, ranks.listening.key)
    ranks.close()
    line.send(LENDING.encode(Lent("b", 7, (LENT,))))
    assert line.read_line(PATIENCE_SECONDS) is None
    line.close()


def test_a_lender_says_that_it_is_still_there(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "BEAT_SECONDS", 0.05)
    said: queue.SimpleQueue[object] = queue.SimpleQueue()
    listener = KeyedListener("127.0.0.1", tmp_path, lambda line: [said.put(LENDING.decode(each)) for each in line.lines()])
    host = Host(world.base, tmp_path, Lending(listener.address, listener.fingerprint, listener.key, {LENT: 0}))
    first = said.get(timeout=PATIENCE_SECONDS)
    assert isinstance(first, Lent) and said.get(timeout=PATIENCE_SECONDS) == first == said.get(timeout=PATIENCE_SECONDS)
    host.commands.put(Stop())
    host.thread.join(PATIENCE_SECONDS)
    listener.close()


def test_nobody_waits_for_the_end_of_a_lent_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, wait = list[float | None](), LentRank.wait
    monkeypatch.setattr(LentRank, "wait", lambda rank, seconds=None: (waited.append(seconds), wait(rank, 0.0))[1])
    group = RankGroup(0, own=[])
    group.let_lend("127.0.0.1")
    group.going.add(group.add_lent(LENT))  # its lender does not come
    assert group.living == [0] and not group.lives_here
    group.close()
    assert all(seconds == 0.0 for seconds in waited)


def test_a_lenders_messages_are_lines() -> None:
    assert LENDING.decode(LENDING.encode(Lent("b", 7, (1, 2)))) == Lent("b", 7, (1, 2))
