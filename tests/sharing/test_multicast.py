"""NVLink multicast is off in whatever process is started, though the environment turns it on."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

import tlora.cli
from tlora.engine.ranks.rank_group import RankGroup
from tlora.sharing.multicast import NO_MULTICAST, turn_multicast_off


@pytest.fixture(autouse=True)
def turned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NO_MULTICAST.items():
        monkeypatch.setenv(name, "1" if value == "0" else "0")


def is_off() -> bool:
    return all(os.environ[name] == value for name, value in NO_MULTICAST.items())


def test_both_libraries_are_told() -> None:
    assert NO_MULTICAST == {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    assert not is_off()
    turn_multicast_off()
    assert is_off()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_in_a_rank() -> None:
    crew = RankGroup(1)
    crew.start()
    try:
        (rank,) = crew._processes.values()
        while not (environment := Path(f"/proc/{rank.pid}/environ").read_bytes()):  # the kernel is about to fill it
            assert not rank.has_ended
    finally:
        crew.close()
    assert {f"{name}={value}".encode() for name, value in NO_MULTICAST.items()} <= set(environment.split(b"\0"))


def test_in_each_command_and_what_it_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a rank of a launcher, and the workers of `tlora cluster`."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "3000")
    monkeypatch.setattr(sys, "argv", ["tlora", "--version"])
    with pytest.raises(SystemExit) as ended:
        tlora.cli.main()
    assert ended.value.code == 0
    assert is_off()


@pytest.mark.slow
def test_in_the_ranks_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import shared_base

    started: list[dict[str, str]] = []

    class StartedError(Exception):
        pass

    def start(_: Any, env: dict[str, str]) -> None:
        started.append(env)
        raise StartedError

    monkeypatch.setattr(shared_base.subprocess, "Popen", start)
    monkeypatch.setattr(sys, "argv", ["shared_base"])
    with pytest.raises(StartedError):
        shared_base.run_part("bits", shared_base.read_options(["--gpus", "2"]), 1.0)
    assert started and started[0].items() >= NO_MULTICAST.items()
