"""What `tlora worker` needs to be let in, before anything is dialled; and what it proves of the store."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

import pytest

from tlora.errors import ConfigError
from tlora.link import authentication
from tlora.link.address import tcp_place
from tlora.link.authentication import AuthResponse, answer_path, prove, read_number, write_number
from tlora.link.endpoint import Endpoint, find_entrance, read_private

TCP, FINGERPRINT, TOKEN = "tcp://127.0.0.1:8322", "sha256:" + "ab" * 32, "tlw-" + "x" * 43


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_WORKER_TOKEN", TOKEN)
    found = find_entrance(TCP, FINGERPRINT, None)
    assert found == Endpoint(TCP, FINGERPRINT, TOKEN)
    assert "TLORA_WORKER_TOKEN" not in os.environ, "what the worker starts would have it"
    assert TOKEN not in repr(found)
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(TOKEN + "\n")
    assert find_entrance(TCP, FINGERPRINT, file) == found
    assert find_entrance("unix:/tmp/x/controller.sock", None, None) == Endpoint("unix:/tmp/x/controller.sock")


@pytest.mark.parametrize(
    ("address", "fingerprint", "token", "fact"),
    [
        (TCP, None, TOKEN, "needs --fingerprint"),
        (TCP, "sha256:1", TOKEN, "64 hexadecimal digits"),
        (TCP, FINGERPRINT, None, "needs a token. Set TLORA_WORKER_TOKEN"),
        (TCP, FINGERPRINT, "tml-" + "secret" * 8, r"\$TLORA_WORKER_TOKEN: is no worker's token"),
        ("unix:/tmp/x/controller.sock", FINGERPRINT, None, "needs no --fingerprint"),
        ("tcp://127.0.0.1", FINGERPRINT, TOKEN, "with a port from 1 to 65535"),
    ],
)
def test_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, address: str, fingerprint: str | None, token: str | None, fact: str
) -> None:
    monkeypatch.delenv("TLORA_WORKER_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("TLORA_WORKER_TOKEN", token)
    with pytest.raises(ConfigError, match=fact) as told:
        find_entrance(address, fingerprint, None)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("address", ["tcp://h:0", "tcp://h:65536", "tcp://h:x", "tcp://:1", "tcp://u@h:1", "tcp://h:1/path", "udp://h:1"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="must be tcp://host:port"):
        tcp_place(address)


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600") as told:
        read_private(file)
    assert "0640" in str(told.value) and TOKEN not in str(told.value)
    file.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConfigError, match="belongs to another user"):
            read_private(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_private(tmp_path / "none")


def test_a_challenge_is_answered_beside_it(tmp_path: Path) -> None:
    path, number = tmp_path / f".proof-{secrets.token_hex(16)}", secrets.token_hex(32)
    write_number(path, number)
    proof = prove(path)
    assert proof == AuthResponse(number, read_number(answer_path(path))) and proof.answer != number
    assert prove(path).problem == "File exists", "an answer is written once"


def test_what_is_no_challenge_is_neither_read_nor_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller cannot have files read that are none of its own challenges."""
    good = tmp_path / f".proof-{'a' * 32}"
    secret = tmp_path / "secret"
    secret.write_text("b" * 64)
    secret.chmod(0o600)
    assert "none of a challenge" in prove(secret).problem
    assert "none of a challenge" in prove(Path(good.name)).problem
    assert prove(good) == AuthResponse(problem="No such file or directory")
    good.symlink_to(secret)
    assert prove(good) == AuthResponse(problem="Too many levels of symbolic links")
    good.unlink()
    good.mkdir()
    assert prove(good) == AuthResponse(problem="its file is not this user's alone")
    good.rmdir()
    write_number(good, "the password of something else")
    assert prove(good) == AuthResponse(problem="its file holds no number")
    good.unlink()
    write_number(good, "c" * 64)
    good.chmod(0o604)
    assert prove(good) == AuthResponse(problem="its file is not this user's alone")
    good.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert prove(good) == AuthResponse(problem="its file is not this user's alone")
    assert not answer_path(good).exists()


def test_a_full_disk_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker dials again; to be refused would end it."""

    def full(path: Path, number: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / f".proof-{'a' * 32}"
    write_number(path, "c" * 64)
    monkeypatch.setattr(authentication, "write_number", full)
    with pytest.raises(OSError, match="No space left"):
        prove(path)
