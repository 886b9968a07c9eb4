"""`tlora worker-token`, and `tlora worker` where it cannot begin."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tlora.cli.commands import app
from tlora.cluster.credentials import WorkerTokens, open_certificate
from tlora.cluster.listeners import TlsListener


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "workers").mkdir()
    return tmp_path


def test_a_token_is_printed_alone_and_the_rest_to_stderr(store: Path) -> None:
    with TlsListener(store / "workers", ("127.0.0.1", 0)) as listener:
        made = CliRunner().invoke(app, ["worker-token", str(store)])
    assert made.exit_code == 0, made.output
    secret = made.stdout.strip()
    (token,) = WorkerTokens(store / "workers").all()
    assert WorkerTokens(store / "workers").find(secret) == token and round(token.expires - token.created) == 86_400
    assert token.id in made.stderr and secret not in made.stderr
    assert f"tlora worker --connect {listener.address} --fingerprint {listener.fingerprint} --gpus all" in made.stderr
    assert "TLORA_WORKER_TOKEN" in made.stderr and "--token-file" in made.stderr


def test_a_token_before_the_controller_listens(store: Path) -> None:
    made = CliRunner().invoke(app, ["worker-token", str(store), "--valid-hours", "2"])
    assert "tcp://HOST:PORT" in made.stderr and "--worker-listen" in made.stderr
    assert open_certificate(store / "workers")[1] in made.stderr


def test_json_has_all_that_a_launcher_needs(store: Path) -> None:
    made = json.loads(CliRunner().invoke(app, ["worker-token", str(store), "--json"]).stdout)
    assert made["fingerprint"] == open_certificate(store / "workers")[1] and made["address"] is None
    token = WorkerTokens(store / "workers").find(made["token"])
    assert token is not None and (token.id, token.expires) == (made["id"], made["expires"])
    (listed,) = json.loads(CliRunner().invoke(app, ["worker-token", str(store), "--list", "--json"]).stdout)
    assert listed == {"id": token.id, "created": token.created, "expires": token.expires, "revoked": None}


def test_a_token_is_listed_and_revoked(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a directory, in the server's."""
    monkeypatch.setenv("TLORA_HOME", str(store))
    secret = CliRunner().invoke(app, ["worker-token"]).stdout.strip()
    (token,) = WorkerTokens(store / "workers").all()
    listed = CliRunner().invoke(app, ["worker-token", "--list"]).stdout
    assert token.id in listed and secret not in listed and token.hash not in listed
    assert CliRunner().invoke(app, ["worker-token", "--revoke", token.id]).stdout == f"{token.id}: revoked\n"
    again = CliRunner().invoke(app, ["worker-token", "--revoke", token.id])
    assert again.exit_code == 2 and "there is none of this id that is valid" in again.stderr
    both = CliRunner().invoke(app, ["worker-token", "--revoke", token.id, "--list"])
    assert both.exit_code == 2 and "give one of them" in both.stderr


def test_a_directory_without_a_controller_gets_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = CliRunner().invoke(app, ["worker-token", str(tmp_path)])
    assert none.exit_code == 2 and "no cluster and no server has its store there" in none.stderr and not list(tmp_path.iterdir())
    (tmp_path / "workers").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    others = CliRunner().invoke(app, ["worker-token", str(tmp_path)])
    assert others.exit_code == 2 and "belongs to another user" in others.stderr


def test_no_option_takes_a_token() -> None:
    """It would be seen in the list of processes."""
    shown = CliRunner().invoke(app, ["worker", "--help"], env={"COLUMNS": "200"}).output
    assert "--token-file" in shown and "--token " not in shown


@pytest.mark.parametrize(
    ("left", "options", "chosen"), [("3,5", [], (3,)), (None, [], (0,)), ("", [], (0,)), ("3,5", ["--gpus", "5,3"], (3, 5))]
)
def test_a_workers_gpus(left: str | None, options: list[str], chosen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --gpus the first that CUDA_VISIBLE_DEVICES leaves. The controller hears the numbers that the worker computes on."""
    ran: list[tuple[int, ...]] = []
    monkeypatch.setattr("tlora.engine.worker.run", lambda address, gpus, fingerprint, token_file, see, label: (see(gpus), ran.append(gpus)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", left or "")
    if left is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    done = CliRunner().invoke(app, ["worker", "--connect", "out", *options])
    assert ran == ([chosen] if left != "" else []), done.output
    assert left == "" or os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, chosen))
