"""access.log and audit.log of a real server: who asked for what, and nothing that is secret."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.service.served import serving, until
from tlora.cluster.event_log import KEPT, LogFile
from tlora.service import request_log
from tlora.service.request_log import Answered, RequestLog

ASKED = Answered("POST", "/v1/jobs", "127.0.0.1", 201, 0.01, "alice", "key-1")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_every_request_has_a_line_and_each_change_one_in_the_audit(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as served:
        order = served.order("alice")
        made = served.ask("alice", "POST", "/v1/jobs", json=order)
        served.ask("alice", "GET", "/v1/jobs?limit=5", 200)
        served.ask("alice", "POST", f"/v1/jobs/{made['id']}/cancel")
        served.ask("alice", "POST", "/v1/keys", 403, json={"name": "more"})
        secret = served.key("alice")
    access, audit = (lines_of(tmp_path / "server" / "logs" / name) for name in ("access.log", "audit.log"))
    asked = [(line["method"], line["path"], line["code"], line["tenant"]) for line in access]
    tenant = access[0]["tenant"]
    assert tenant == "alice" and ("GET", "/v1/jobs", 200, tenant) in asked and ("POST", "/v1/keys", 403, tenant) in asked
    changed = [(line["method"], line["path"]) for line in audit]
    assert changed[-3:] == [("POST", "/v1/jobs"), ("POST", f"/v1/jobs/{made['id']}/cancel"), ("POST", "/v1/keys")]
    assert all(line["key"].startswith("key-") and line["tenant"] and line["seconds"] >= 0 for line in audit)
    text = "".join(path.read_text() for path in (tmp_path / "server" / "logs").iterdir())
    assert secret not in text and "limit=5" not in text and order["data"]["file"] not in text


def test_files_are_begun_anew_and_the_oldest_removed(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "logs", 1 << 16)
    for number in range(4000):  # about 700 KB
        log.see(Answered("POST", f"/v1/jobs/{number}/\n{'x' * 1000}", "127.0.0.1", 201, 0.01, "alice", "key-1"))
        until(lambda: log._queue.qsize() < 1000)
    log.close()
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == sorted(f"{name}{end}" for name in ("access.log", "audit.log") for end in ("", *(f".{n}" for n in range(1, KEPT + 1))))
    assert all(path.stat().st_size <= 1 << 16 for path in (tmp_path / "logs").iterdir())
    assert lines_of(tmp_path / "logs" / "audit.log")[-1]["path"].startswith("/v1/jobs/3999/\nxxx")


def test_a_disk_that_cannot_be_written_is_said_once_and_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(tmp_path / "logs", 1 << 16)
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").write_text("a file where the directory was")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.see(ASKED)
        log.close()
    assert caplog.text.count("cannot be written") == 1


def test_lines_that_a_slow_disk_has_no_room_for_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_disk, goes_on, write = threading.Event(), threading.Event(), LogFile.write

    def wait_and_write(file: LogFile, lines: Sequence[str]) -> None:
        at_disk.set()
        goes_on.wait()
        write(file, lines)

    monkeypatch.setattr(request_log, "_MOST_WAITING", 2)
    monkeypatch.setattr(LogFile, "write", wait_and_write)
    log = RequestLog(tmp_path / "logs", 1 << 16)
    log.see(ASKED)
    at_disk.wait()  # the disk stands still
    for _ in range(5):
        log.see(ASKED)  # two wait, and three are lost
    goes_on.set()
    until(lambda: log._queue.qsize() == 0)
    log.see(ASKED)
    log.close()
    access = lines_of(tmp_path / "logs" / "access.log")
    assert len(access) == 4 and access[-1]["lost"] == 3 and not any("lost" in line for line in access[:-1])


def test_lines_are_written_again_once_the_disk_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, opened = threading.Event(), Path.open

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "audit.log" and not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", fail)
    log = RequestLog(tmp_path / "logs", 1 << 16)
    log.see(ASKED)
    failed.wait()
    log.see(ASKED._replace(path="/v1/jobs/later"))
    log.close()
    assert [line["path"] for line in lines_of(tmp_path / "logs" / "audit.log")] == ["/v1/jobs/later"]
    assert len(lines_of(tmp_path / "logs" / "access.log")) == 2


def test_each_time_the_disk_begins_to_fail_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_full, tried, write = threading.Event(), list[str](), LogFile.write

    def fail(file: LogFile, lines: Sequence[str]) -> None:
        try:
            if is_full.is_set():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(file, lines)
        finally:
            tried.extend(lines)

    monkeypatch.setattr(LogFile, "write", fail)
    log = RequestLog(tmp_path / "logs", 1 << 16)

    def see() -> None:
        tried.clear()
        log.see(ASKED)
        until(lambda: len(tried) == 2)  # one in each file

    with caplog.at_level(logging.WARNING):
        is_full.set()
        see()
        see()
        is_full.clear()
        see()
        is_full.set()
        see()
        log.close()
    assert caplog.text.count("cannot be written") == 2
