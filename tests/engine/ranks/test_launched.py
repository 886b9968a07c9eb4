"""Ranks that a launcher starts: the environment decides, one command on each, one of them shows the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forked
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import TWO_LINEARS, job, run_spec, sha256, train, write_rows
from tests.process_hooks import hold, let_hold
from tests.service.served import until
from tlora.engine.ranks.devices import rank_devices
from tlora.engine.ranks.external import Launched, launched
from tlora.engine.ranks.link import Meeting, connect
from tlora.errors import ConfigError

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")


@pytest.fixture(scope="module")
def jobs_file(tmp_path_factory: pytest.TempPathFactory, fork_servers: object) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("launched")
    base = save_base(directory / "base")
    data = str(write_rows(directory / "a.jsonl", 24, high=20))
    orders = [
        job(name, data, seed=seed, max_steps=3, batch_size=2, target_modules=TWO_LINEARS)
        for seed, name in enumerate(("one", "two", "three"))
    ]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
        train(base, directory / "whole", orders, deterministic=True)
        file = directory / "jobs.json"
        spec = run_spec(base, directory / "out", orders, deterministic=True)
        file.write_text(spec.model_dump_json(exclude_unset=True))
        yield file


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(jobs_file: Path, out: Path, count: int, *more: str, differ: str = "") -> list[subprocess.Popen[str]]:
    """What a launcher does: the same command `count` times; `differ` is an option of the last alone."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(count)}
    command = [sys.executable, "-m", "tlora", "train", str(jobs_file), "--device", "cpu", "--output-dir", str(out), *more]
    return [
        forked.ForkingPopen(
            [*command, *([differ] if differ and rank == count - 1 else [])],
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def test_launched_ranks_make_the_bytes_of_one_process_and_one_of_them_shows_it(jobs_file: Path, tmp_path: Path) -> None:
    processes = launch(jobs_file, tmp_path / "out", 2)
    said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert "three" in said[0]
    assert said[1] == ""
    for name in ("one", "two", "three"):
        assert sha256(tmp_path / "out" / name) == sha256(jobs_file.parent / "whole" / name)


def test_ranks_with_another_jobs_file_are_refused(jobs_file: Path, tmp_path: Path) -> None:
    processes = launch(jobs_file, tmp_path / "out", 2, differ="--set=jobs.one.r=5")
    errors = [process.communicate()[1] for process in processes]
    assert processes[0].returncode == 2
    assert "another jobs file" in errors[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_lost_rank_of_a_launcher_ends_the_run_and_a_resume_goes_on(
    jobs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    longer = [f"--set=jobs.{name}.{key}" for name in ("one", "two", "three") for key in ("max_steps=400", "save_steps=1")]
    let_hold(monkeypatch, tmp_path, "")
    with hold(3):
        processes = launch(jobs_file, out, 2, *longer)
        until(lambda: any(out.glob("*/checkpoint-*/MANIFEST.json")))
        os.kill(processes[1].pid, signal.SIGKILL)
    rest, _ = [process.communicate()[0] for process in processes]
    assert processes[0].returncode == 1
    assert "a rank is lost" in rest
    assert any(out.glob("*/checkpoint-*"))


@pytest.mark.parametrize(
    ("given", "said"),
    [({"RANK": "x"}, "whole numbers"), ({"RANK": "2"}, "from 0 to"), ({"LOCAL_WORLD_SIZE": "1"}, "on one host")],
)
def test_a_broken_environment_is_refused(monkeypatch: pytest.MonkeyPatch, given: dict[str, str], said: str) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", **given}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        launched()


def test_without_a_launcher_or_with_one_process_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert launched() is None
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert launched() == Launched(0, 3)


def test_a_stale_rendezvous_is_said() -> None:
    meeting = Meeting()
    address = meeting.address
    meeting.close(keep_logs=False)
    with pytest.raises(ConfigError, match="stale"):
        connect(address, lambda _: None)


@pytest.mark.parametrize(
    ("gpus", "found"),
    [
        ("all", ("cuda:0", "cuda:1", "cuda:2")),
        ("2", ("cuda:0", "cuda:1")),
        (3, ("cuda:0", "cuda:1", "cuda:2")),
        ("0,2", ("cuda:0", "cuda:2")),
        ("1,", ("cuda:1",)),
    ],
)
def test_gpus_are_chosen(monkeypatch: pytest.MonkeyPatch, gpus: str | int, found: tuple[str, ...]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert rank_devices(gpus, "cuda") == found
    assert rank_devices(None, "cuda") == ()


@pytest.mark.parametrize(
    ("gpus", "said"), [("4", "3 GPUs"), ("0,3", "3 GPUs"), ("0,0", "different"), ("0", "choice"), ("a,b", "different"), ("-1", "choice")]
)
def test_gpus_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch, gpus: str, said: str) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with pytest.raises(ConfigError, match=said) as refused:
        rank_devices(gpus, "cuda")
    if said == "3 GPUs":
        assert "CUDA_VISIBLE_DEVICES=4,5,6" in str(refused.value)
