"""The process of the next rank that is added is there ahead: it waits for its number, and ends with whoever started it."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tlora.engine.messages import Hello
from tlora.engine.ranks.gpu_change import GpuChange, visible_gpus
from tlora.engine.ranks.rank_group import RANK_OF_WORKER, RankGroup
from tlora.link.supervisor import SupervisedProcess

OWNER = """
import time
from tlora.engine.ranks.rank_group import RANK_OF_WORKER, RankGroup
ranks = RankGroup(0, program=RANK_OF_WORKER)
ranks.prepare()
print(ranks._ahead.pid, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def ranks() -> Iterator[RankGroup]:
    made = RankGroup(0, program=RANK_OF_WORKER)
    yield made
    made.close()


def ahead_of(ranks: RankGroup) -> SupervisedProcess:
    ranks.prepare()
    ranks.prepare()
    assert ranks._ahead is not None
    return ranks._ahead


def hello_of(ranks: RankGroup, rank: int) -> Hello:
    while rank not in ranks.hellos:
        ranks.listen(1.0)
        assert not ranks.lost, ranks.lost
    return ranks.hellos[rank]


def test_a_rank_that_is_added_is_the_process_that_was_there_ahead(ranks: RankGroup) -> None:
    """Once for each call; numbers are those of the ranks, also after others have come in between. A group that ends takes it along."""
    first = ahead_of(ranks)
    assert ranks.living == [], "it is no rank yet"
    assert (ranks.add(), hello_of(ranks, 0).pid) == (0, first.pid)
    ranks.prepare()
    ranks._began[ranks.count] = math.inf  # another host's has come, and is not silent
    ranks.count += 1
    second = ranks._ahead
    assert second is not None and second.pid != first.pid
    assert (ranks.add(), hello_of(ranks, 2).pid) == (2, second.pid)
    assert (ranks.add(), hello_of(ranks, 3).pid in (first.pid, second.pid)) == (3, False), "without one ahead it starts as ever"
    last = ahead_of(ranks)
    ranks.close()
    assert last.has_ended and all(process.has_ended for process in ranks._processes.values())


def test_one_that_has_died_while_it_waited_is_not_taken(ranks: RankGroup) -> None:
    dead = ahead_of(ranks)
    dead.kill()
    ranks.prepare()
    assert ranks._ahead is dead, "whatever kills it would kill the next"
    assert hello_of(ranks, ranks.add()).pid != dead.pid


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process with its parent")
def test_it_ends_with_a_group_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        waiting = psutil.Process(int(owner.stdout.readline()))
        os.kill(owner.pid, signal.SIGKILL)
    waiting.wait(120)
    assert not waiting.is_running()


def test_there_is_one_where_a_worker_sees_more_gpus_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert visible_gpus("cuda", (2,)) == [2, 0] and visible_gpus("cpu", (2,)) == []
    change = GpuChange((2,))
    assert change.may_grow([2, 0]) and not change.may_grow([2]) and not change.may_grow([])
    change.want((0, 2))
    assert not change.may_grow([2, 0]), "one is on its way"
    change.begin(1, 0, 0.0)
    change.loaded(1)
    change.give_up()
    assert not change.may_grow([2, 0]), "it has all"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5a")
    assert visible_gpus("cuda", (3,)) == [3], "it cannot be known which others there are"
