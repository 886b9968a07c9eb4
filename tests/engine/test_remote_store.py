"""What a worker of another host says while its controller's disk has no room for a job's last files."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tlora.engine import remote_store
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.remote_store import RemoteStore
from tlora.link.transfer import AgainError
from tlora.store.full_disk import ROOM_ON_DISK
from tlora.worker_protocol import Delayed, Finished, Load, Report


class FullOnce:
    """A job's copy, for which there is room at the second try."""

    tries = 0

    def send(self, *, last: bool) -> None:
        self.tries += 1
        if self.tries == 1:
            raise AgainError("No space left on device")

    def remove(self) -> None:
        pass

    def named_there(self, ended: Finished) -> Finished:
        return ended


def test_its_job_waits_for_room_and_then_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(remote_store, "_AGAIN_SECONDS", 0.0)
    told, client = list[Report](), SimpleNamespace(closed=threading.Event(), close=lambda: None)
    load, copy, end = Load("base", str(tmp_path), "cpu", 0.0), FullOnce(), Finished("a", {})
    store = RemoteStore(client, "me", load, queue.SimpleQueue(), told.append, Heartbeat())  # type: ignore[arg-type]
    jobs: dict[str, Any] = store._jobs
    jobs["a"] = copy
    store.report(end)
    store._sender.start()
    store.close(60)
    assert told == [Delayed("a", ROOM_ON_DISK), end] and copy.tries == 2
