"""Ranks of one group on CPUs of two kinds: with `dtype: auto` all compute in the dtype that the first of them can, or with stages all."""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_cpu_dtype import in_16_bits, on_a_cpu
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.messages import TO_RANK, Enter, Hello
from tlora.engine.ranks.rank import hello
from tlora.engine.ranks.spanning_jobs import RankContext
from tlora.engine.ranks.worker_group import WorkerGroup
from tlora.engine.trainer import Trainer
from tlora.supermodel.cpu_dtype import settle_dtype, slow_dtypes
from tlora.worker_protocol import Load

LENT = 1000
WEAK, STRONG = ("bfloat16", "float16"), ()


class Group:
    """A worker's group whose ranks are only said to be there."""

    def __init__(self, stages: int = 0) -> None:
        load = Load("base", "out", "cpu", time.time(), stages=stages)
        self.group = WorkerGroup(load, (0,), queue.SimpleQueue(), lambda _: None, Heartbeat(), lambda: ())
        self.ranks, self.entered = self.group._rank_group, dict[int, Enter]()
        self.ranks.send = self._send  # type: ignore[method-assign]
        self.ranks.is_lent = lambda rank: rank > 0  # type: ignore[method-assign]

    def _send(self, rank: int, command: Any, *_: Any) -> None:
        if isinstance(command, Enter):
            self.entered[rank] = TO_RANK.decode(TO_RANK.encode(command))  # type: ignore[assignment]

    def come(self, rank: int, slow: tuple[str, ...]) -> None:
        said = Hello(rank, 1, "host", {}, slow_dtypes=slow)
        self.ranks.hellos[rank] = said
        if rank:
            self.group._change.gpu_of[rank] = LENT
            self.group._change.joining.setdefault(rank, time.monotonic())
        self.group._hear(rank, said)

    def said(self) -> list[set[str]]:
        return [set(entered.slow_dtypes) for _, entered in sorted(self.entered.items())]


@pytest.mark.parametrize(("leader", "lender"), [(WEAK, STRONG), (STRONG, WEAK)])
def test_a_rank_that_another_host_lends_computes_as_the_leader_does(leader: tuple[str, ...], lender: tuple[str, ...]) -> None:
    group = Group()
    group.come(0, leader)
    group.come(1, lender)
    assert group.said() == [set(leader), set(leader)]


def test_stages_compute_as_the_weakest_of_their_cpus(tmp_path: Path) -> None:
    for first, second in ((WEAK, STRONG), (STRONG, WEAK)):
        group = Group(stages=2)
        group.come(0, first)
        assert not group.entered, "none begins before all are there"
        group.come(1, second)
        assert group.said() == [set(WEAK), set(WEAK)]


def test_a_rank_says_what_its_cpu_has_not_and_computes_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = in_16_bits(tmp_path / "base")
    for slow, told, means in ((True, STRONG, torch.bfloat16), (False, WEAK, torch.float32)):
        on_a_cpu(monkeypatch, slow)
        assert hello(0).slow_dtypes == slow_dtypes() == (WEAK if slow else STRONG)
        assert settle_dtype(str(base), "auto", "cpu")[0] == ("float32" if slow else "auto"), "by itself"
        load = Load(str(base), str(tmp_path / str(slow)), "cpu", time.time())
        trainer = Trainer(load, queue.SimpleQueue(), lambda _: None, rank_context=RankContext(slow_dtypes=told))
        assert trainer._group.model.bank.dtype == means
        assert settle_dtype(str(base), "bfloat16", "cpu", told) == ("bfloat16", ""), "what is ordered stays"
