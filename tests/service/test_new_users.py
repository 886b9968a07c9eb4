"""As new users would: an empty directory, `tlora serve`, data sets submitted with a key each, and all that they get in PEFT."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.tiny_runs import write_rows
from tests.process_hooks import let_hold, slow_down
from tests.service.test_real_server import BASE, Server, running, until

_ORDER = {"batch_size": 4, "learning_rate": 1e-3}
_STEPS = {0: 150, 1: 100_000}  # of who pauses and who cancels: theirs must not be done before they do


class User:
    """A person with a key of their own, a directory of their own, and the command line."""

    def __init__(self, number: int, home: Path, key: str) -> None:
        self.name, self.home, self._key = f"user{number}", home, key
        home.mkdir()
        write_rows(home / "data.jsonl", 24 + 2 * number, seed=number)
        job = {
            "name": f"job{number}",
            "data": "data.jsonl",
            "r": 2 + number,
            "max_steps": _STEPS.get(number, 24),
            **_ORDER,
            "save_steps": 50 if number in _STEPS else 4,
        }
        (home / "jobs.yaml").write_text(json.dumps({"base_model": "base", "jobs": [job]}))

    def run(self, server: Server, *words: str) -> str:
        """What a command prints; it must succeed."""
        environment = os.environ | {
            "TLORA_URL": str(server.client.base_url).rstrip("/"),
            "TLORA_API_KEY": self._key,
            "XDG_CONFIG_HOME": str(self.home / ".config"),
        }
        command = [sys.executable, "-m", "tlora", *words]
        done = subprocess.run(command, cwd=self.home, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, server: Server, name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self.run(server, "jobs", "--json", "--name", name))
        (job,) = found
        return job


@pytest.mark.parametrize("count", [3, pytest.param(6, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_users_with_a_key_each(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "server"
    directory.mkdir()
    let_hold(monkeypatch, tmp_path, "")
    with running(directory) as servers, slow_down(_STEPS[0]) as go_on:
        servers.append(Server(directory))
        users: list[User] = []
        for number in range(count):
            made = servers[0].ask("POST", "/v1/keys", json={"tenant": f"team{number}", "name": "laptop", "scopes": ["read", "submit"]})
            users.append(User(number, tmp_path / f"user{number}", made["key"]))
        pauses, cancels, clones, *_ = users
        for number, user in enumerate(users):
            assert f"job{number}: accepted as job-" in user.run(servers[0], "submit", "jobs.yaml")
            if user is pauses:
                assert "paused" in user.run(servers[0], "pause", "job0")
            elif user is cancels:
                assert "cancelled" in user.run(servers[0], "cancel", "job1")
        assert "job2-lr5e-4: accepted" in clones.run(servers[0], "clone", "job2", "--set", "learning_rate=5e-4")
        ids = {user.name: user.job(servers[0], f"job{number}")["id"] for number, user in enumerate(users)}
        until(lambda: any((directory / "jobs" / job).is_dir() for job in ids.values()))
        assert servers[0].end(signal.SIGKILL) == -signal.SIGKILL
        servers.append(Server(directory))
        server = servers[1]
        assert pauses.job(server, "job0")["status"] == "paused", "who has paused has paused"
        assert "queued" in pauses.run(server, "resume", "job0")
        go_on()
        wanted = [(user, f"job{number}") for number, user in enumerate(users) if user is not cancels] + [(clones, "job2-lr5e-4")]
        for user, name in wanted:
            user.run(server, "show", name, "--follow")
            user.run(server, "download", name, "--out", "adapters")
        assert cancels.job(server, "job1")["status"] == "cancelled"
        for number, user in enumerate(users):
            names = {job["name"] for job in json.loads(user.run(server, "jobs", "--json", "--all"))}
            assert names == {f"job{number}"} | ({"job2-lr5e-4"} if user is clones else set()), "each sees their own"
    weights: set[bytes] = set()
    for user, name in wanted:
        weights.add(_use(user.home / "adapters" / name))
    assert len(weights) == len(wanted), "each has its own adapter"


def _use(adapter: Path) -> bytes:
    """Load it in PEFT as a user's own script would: it changes what the base says. Its weights."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base", "what the user has ordered, not where it lies on the server"
    for path in adapter.iterdir():
        text = path.read_bytes()
        assert str(BASE).encode() not in text and b"/server/" not in text, f"{path.name} names a path of the server"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    base = AutoModelForCausalLM.from_pretrained(BASE)
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    with torch.no_grad():
        before = base(ids).logits.clone()
        after = PeftModel.from_pretrained(base, str(adapter))(ids).logits
    assert torch.isfinite(after).all() and not torch.equal(before, after)
    return (adapter / "adapter_model.safetensors").read_bytes()
