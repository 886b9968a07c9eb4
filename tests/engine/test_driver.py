"""The loop that `tlora train` and the worker share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny_runs import job, sha256, train
from tlora.group.exchange import Decisions


@pytest.mark.slow
def test_a_run_stops_when_the_ranks_have_decided_so(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a signal here: every job is checkpointed, and a resume ends with the bytes of a run that was not stopped."""
    jobs = [job("a", str(data / "a.jsonl"), max_steps=6), job("b", str(data / "b.jsonl"), max_steps=9)]
    whole = {name: sha256(Path(r.path)) for name, r in train(base, tmp_path / "whole", jobs, deterministic=True).items()}
    asked: list[bool] = []

    def stop(_: Decisions, seen: bool) -> bool:
        asked.append(seen)
        return seen or len(asked) == 4

    with monkeypatch.context() as patch:
        patch.setattr(Decisions, "stop", stop)
        results = train(base, tmp_path / "cut", jobs, deterministic=True)
    assert {r.status for r in results.values()} == {"stopped"} and asked == [False] * 4
    resumed = train(base, tmp_path / "cut", jobs, deterministic=True, resume=True)
    assert {name: sha256(Path(r.path)) for name, r in resumed.items()} == whole
