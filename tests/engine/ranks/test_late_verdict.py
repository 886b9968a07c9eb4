"""The owner's verdict on the base reaches a rank whose main thread waits for a save that waits for this verdict."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import tlora
from tests import forked
from tests.engine.conftest import save_base
from tests.engine.tiny_runs import job, run_spec, steps_taken, train, write_rows
from tlora.engine.messages import BaseFacts
from tlora.engine.ranks.rank import RemoteGuard
from tlora.errors import ModelError
from tlora.store.fingerprint import BaseGuard


@pytest.mark.slow
def test_a_resume_ends_though_all_steps_are_taken_before_the_base_is_hashed(
    tmp_path: Path, fork_servers: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base", hidden_size=64)
    write_rows(tmp_path / "a.jsonl", 9, 0, high=8)
    orders = [job(name, str(tmp_path / "a.jsonl"), max_steps=steps) for name, steps in (("one", 4), ("two", 6))]
    start, hash_all = BaseGuard.start, BaseGuard._hash_all  # pyright: ignore[reportPrivateUsage]

    def start_and_hash(guard: Any) -> None:
        start(guard)
        guard._thread.join()

    def last_step_taken() -> bool:
        metrics = tmp_path / "out" / "two" / "metrics.jsonl"
        return metrics.exists() and steps_taken(metrics.parent)[-1:] == [6]

    def hash_late(guard: Any) -> None:
        while not last_step_taken():
            time.sleep(0.02)
        hash_all(guard)

    with monkeypatch.context() as patch:
        patch.setattr(BaseGuard, "start", start_and_hash)
        train(base, tmp_path / "out", orders[:1])
    monkeypatch.setattr(BaseGuard, "_hash_all", hash_late)
    monkeypatch.setattr(subprocess, "Popen", forked.ForkingPopen)
    results = tlora.train(run_spec(base, tmp_path / "out", orders), device="cpu", gpus=2, resume=True)
    assert results.status == "done"


def test_what_a_rank_hears_of_its_base() -> None:
    guard = RemoteGuard()
    guard.hear(BaseFacts({"quick": "q"}, is_known=False))
    assert not guard.check(), "the first tells nothing that base.json does not have"
    guard.hear(BaseFacts({"quick": "q", "sha256": {"f": "s"}}))
    guard.wait_for_verdict()
    assert (guard.check(), guard.check()) == (True, False)
    assert guard.facts()["sha256"] == {"f": "s"}
    guard.hear(None)
    guard.wait_for_verdict()


@pytest.mark.parametrize(("last", "said"), [(BaseFacts({}, problem="another base"), "another base"), (None, "has ended")])
def test_without_a_good_verdict_nothing_is_saved(last: BaseFacts | None, said: str) -> None:
    guard = RemoteGuard()
    guard.hear(BaseFacts({}, is_known=False))
    guard.hear(last)
    with pytest.raises(ModelError, match=said):
        guard.wait_for_verdict()
