"""`tlora cluster --worker-listen`: as a user types it, with a worker that comes by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, write_rows
from tlora.cluster.gpus import Gpu
from tlora.engine.ranks.devices import rank_devices
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.live import cluster_run
from tlora.live.cluster_run import _Run, train_on_cluster
from tlora.shape.memory import BaseMemory


def test_a_worker_comes_to_a_cluster_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the GPU that the cluster does not need itself. Ctrl-C ends all, and the command to go on listens again."""
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    base, data, out = save_base(tmp_path / "base"), write_rows(tmp_path / "rows.jsonl", 20), tmp_path / "out"
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump({"base_model": str(base), "output_dir": str(out), "jobs": [job("a", str(data), max_steps=10**6)]}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    tlora = [sys.executable, "-m", "tlora"]
    options = [str(file), "--device", "cpu", "--gpus", "2", "--policy", "fifo", "--worker-listen", address]
    with subprocess.Popen([*tlora, "cluster", *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as cluster:
        while not (out / "workers" / "tcp-address").exists() or not (out / "workers" / "gpu0.json").exists():
            assert cluster.poll() is None
            time.sleep(0.01)
        made = subprocess.Popen([*tlora, "worker-token", str(out), "--json"], stdout=subprocess.PIPE)
        facts = json.loads(made.communicate()[0])
        assert facts["address"] == address
        with subprocess.Popen(
            [*tlora, "worker", "--connect", address, "--fingerprint", facts["fingerprint"], "--gpu", "1"],
            env=os.environ | {"TLORA_WORKER_TOKEN": facts["token"]},
            stderr=subprocess.PIPE,
        ) as worker:
            while not (out / "workers" / "gpu1.json").exists():
                assert worker.poll() is None and cluster.poll() is None
                time.sleep(0.01)
            assert read_object(out / "workers" / "gpu1.json")["pid"] == worker.pid
            cluster.send_signal(signal.SIGINT)
            assert worker.stderr is not None
            ended = " ".join(worker.stderr.read().decode().split())
            assert (
                worker.wait() == 0
                and "this worker has saved its jobs and ends: its controller, whose log says why, has stopped it" in ended
            )
        assert cluster.stdout is not None
        said = re.sub(r"\s+", " ", cluster.stdout.read().decode())
    assert f"workers may come to {address} over TLS; `tlora worker-token {out}` makes a token" in said
    assert f"--worker-listen {address}" in said and facts["token"] not in said


def test_an_address_that_is_none_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    run = run_spec(tmp_path / "base", tmp_path / "out", [job("a", "none.jsonl")])
    with pytest.raises(ConfigError, match="must be tcp://host:port"):
        train_on_cluster(run, device="cpu", worker_listen="127.0.0.1:8322")
    assert not (tmp_path / "out").exists()


def test_the_memory_of_this_machine_orders_no_gpus_where_larger_ones_may_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job ordered as many as hold the base here, also on those of other hosts that hold it alone."""
    base = save_base(tmp_path / "base", num_hidden_layers=(layers := 3))
    file = run_spec(base, tmp_path / "out", [job("a", "none.jsonl")])
    alone, listens = (
        _Run(file, tmp_path / "out", rank_devices(2, "cpu"), "fifo", Watcher(), 0.0, hosts_may_come=come) for come in (False, True)
    )
    counts = [0 if each._memory.stages is None else len(each._memory.stages.fullest_bytes) for each in (alone, listens)]
    assert counts == [0, layers - 1], "over hosts it goes by two stages or more"
    alone._memory = listens._memory = replace(listens._memory, bytes_by_gpus=(1 << 30, 1 << 20, 1 << 20))
    monkeypatch.setattr(cluster_run, "memory_limit", lambda *_: 1 << 29)
    assert (alone._least_gpus(), listens._least_gpus()) == (2, 1)
    listens._run = file.model_copy(update={"memory_limit": 1 << 29})
    assert listens._least_gpus() == 2, "what is ordered holds on all hosts"


def test_the_smaller_of_two_gpus_orders_no_gpus_for_jobs_that_the_larger_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job ordered both, which hold the base in parts, and one with more than these leave was rejected."""
    file = run_spec(save_base(tmp_path / "base"), tmp_path / "out", [job("a", "none.jsonl")])
    run = _Run(file, tmp_path / "out", ("cuda:0", "cuda:1"), "fifo", Watcher(), 0.0)
    monkeypatch.setattr(cluster_run, "memory_limit", lambda *_: 20 << 30)
    monkeypatch.setattr(cluster_run, "numbers_of", tuple)
    run._memory = BaseMemory((40 << 30, 12 << 30), 0.0, 0.0, 0.0)
    for others, least in ((24 << 30) + (200 << 20), 2), (80 << 30, 1):
        run._known = {0: Gpu(24 << 30, "a", "small"), 1: Gpu(others, "b", "large")}
        assert run._least_gpus() == least
