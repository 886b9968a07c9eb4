"""A store's certificate and its workers' tokens, as files."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from tlora.cluster.credentials import CERTIFICATE, TOKENS, WorkerTokens, open_certificate
from tlora.errors import ConfigError


def test_a_certificate_is_made_once_and_is_private(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        _, fingerprint = open_certificate(tmp_path)
    finally:
        os.umask(previous)
    path = tmp_path / CERTIFICATE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    assert fingerprint == f"sha256:{certificate.fingerprint(hashes.SHA256()).hex()}"
    assert certificate.not_valid_after_utc.year == 9999
    assert open_certificate(tmp_path)[1] == fingerprint


def test_one_certificate_is_made_by_many_at_once(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(open_certificate(tmp_path)[1])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


@pytest.mark.parametrize("part", ["nothing", "no key", "torn"])
def test_a_damaged_certificate_is_one_error(tmp_path: Path, part: str) -> None:
    open_certificate(tmp_path)
    path = tmp_path / CERTIFICATE
    text = path.read_text()
    path.write_text({"nothing": "", "no key": text[: text.index("-----BEGIN PRIVATE")], "torn": text[:200] + text[260:]}[part])
    with pytest.raises(ConfigError, match="is damaged.*Remove it: a new one is made"):
        open_certificate(tmp_path)


def test_files_that_others_may_read_are_refused(tmp_path: Path) -> None:
    open_certificate(tmp_path)
    (tmp_path / CERTIFICATE).chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_certificate(tmp_path)
    tokens = WorkerTokens(tmp_path)
    tokens.create(60)
    assert stat.S_IMODE((tmp_path / TOKENS).stat().st_mode) == 0o600
    (tmp_path / TOKENS).chmod(0o660)
    with pytest.raises(ConfigError, match="chmod 600"):
        tokens.find("tlw-x")


def test_a_token_is_kept_as_its_hash_and_found_until_it_is_revoked(tmp_path: Path) -> None:
    tokens = WorkerTokens(tmp_path)
    assert tokens.all() == [] and tokens.find("tlw-x") is None
    first, secret = tokens.create(60)
    second, other = tokens.create(-1)
    assert secret.startswith("tlw-") and len(secret) == 47 and secret != other
    text = (tmp_path / TOKENS).read_text()
    assert secret not in text and secret[4:] not in text
    assert tokens.find(secret) == first and not first.has_expired and first.expires > time.time()
    assert tokens.find(other) == second and second.has_expired
    assert tokens.find(secret[:-1]) is None and tokens.find("") is None
    assert not tokens.revoked([first.id]) and tokens.revoke(first.id) and not tokens.revoke(first.id) and not tokens.revoke("token-none")
    assert tokens.revoked([first.id, second.id, "token-none"]) == {first.id, "token-none"}
    found = WorkerTokens(tmp_path).find(secret)
    assert found is not None and found.revoked is not None and replace(found, revoked=None) == first


def test_tokens_made_at_once_are_all_kept(tmp_path: Path) -> None:
    threads = [threading.Thread(target=WorkerTokens(tmp_path).create, args=(60,)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({token.id for token in WorkerTokens(tmp_path).all()}) == 12


def test_a_token_of_another_purpose_is_none(tmp_path: Path) -> None:
    tokens = WorkerTokens(tmp_path)
    _, secret = tokens.create(60)
    content = json.loads((tmp_path / TOKENS).read_text())
    content["tokens"][0]["purpose"] = "api"
    (tmp_path / TOKENS).write_text(json.dumps(content))
    assert tokens.find(secret) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"tokens": 1}', '{"tokens": [{}]}', '{"tokens": [{"id": "x", "more": 1}]}'])
def test_a_damaged_file_of_tokens_is_one_error_and_revokes_nothing(tmp_path: Path, content: str) -> None:
    tokens = WorkerTokens(tmp_path)
    made, secret = tokens.create(60)
    (tmp_path / TOKENS).write_text(content)
    with pytest.raises(ConfigError, match="is damaged"):
        tokens.find(secret)
    assert not tokens.revoked([made.id])
