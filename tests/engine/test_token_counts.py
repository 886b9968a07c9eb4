"""Which micro-batches are of the tail, and what a run says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.tiny_runs import job, rows, train
from tlora.batching.pack import MicroBatch, Row
from tlora.engine.run_monitor import Packing, TokenCounts
from tlora.engine.watcher import Watcher


def packed(tokens: int, budget: int = 100) -> MicroBatch:
    return MicroBatch("train", (Row("a", 0, tokens // 2), Row("b", 1, tokens - tokens // 2)), tokens, budget)


def test_a_tail_is_less_than_a_budget_on_offer() -> None:
    """Exactly one budget could have been filled; a gap beside more than that is the packing's own and no tail."""
    traffic = TokenCounts()
    before = traffic.copy()
    traffic.count(packed(90), 96, left_tokens=10)
    traffic.count(packed(90), 96, left_tokens=9)
    traffic.count(packed(40), 50, left_tokens=0)
    assert traffic.full == Packing(90, 96, 100, 1) and traffic.tail == Packing(130, 146, 200, 2)
    assert (traffic.full.padding, traffic.full.fill) == (1 - 90 / 96, 0.9)
    assert (traffic.tail.padding, traffic.tail.fill) == (1 - 130 / 146, 0.65)
    assert traffic.tokens == {"a": 110, "b": 110} and traffic.computed == 242
    assert (before.tokens, before.full, before.tail) == ({}, Packing(), Packing()) and before.full.fill is None
    assert traffic.tail - Packing(90, 96, 100, 1) == Packing(40, 50, 100, 1)


def test_a_run_tells_its_tail_apart(base: Path, data: Path, tmp_path: Path) -> None:
    """One job outlasts the other: alone it offers one short sample where the budget holds many. On a CPU nothing is padded."""
    notes: list[str] = []
    long, large = (
        job(name, str(data / f"{name}.jsonl"), max_steps=steps, batch_size=size) for name, steps, size in (("b", 60, 1), ("c", 2, 40))
    )
    train(base, tmp_path / "out", [long, large], token_budget=300, watcher=Watcher(note=notes.append))
    written = rows(tmp_path / "out" / "run.jsonl")
    total = {
        key: sum(row[key] for row in written) for key in written[0] if key.removeprefix("tail_") in ("tokens", "offered", "micro_batches")
    }
    assert total["tokens"] + total["tail_tokens"] == sum(
        json.loads((tmp_path / "out" / name / "result.json").read_text())["num_tokens"] for name in ("b", "c")
    )
    assert total["offered"] == 300 * total["micro_batches"] and total["tail_offered"] == 300 * total["tail_micro_batches"]
    assert total["tail_micro_batches"] >= 7 and total["micro_batches"] >= 2  # the last steps of the small job, alone
    full, tail = total["tokens"] / total["offered"], total["tail_tokens"] / total["tail_offered"]
    assert full > 0.9 > 0.6 > tail
    assert str(Packing(computed=9, tokens=9, offered=10, micro_batches=1)).endswith(" over 1 micro-batch")
    (note,) = [note for note in notes if note.startswith("packing: ")]
    assert f"fill {full:.1%} over {total['micro_batches']} micro-batches; tail" in note
    assert note.endswith(f"padding 0.0%, fill {tail:.1%} over {total['tail_micro_batches']} micro-batches")
    page = (tmp_path / "out" / "report.html").read_text()
    for share, key in ((full, "micro_batches"), (tail, "tail_micro_batches")):
        assert f"{100 * share:.1f} % full" in page and f"padding 0.0 %; {total[key]} micro-batches" in page


def test_nothing_packed_has_no_shares() -> None:
    assert str(Packing()) == "no micro-batch" and Packing().padding is None
    assert Packing(90, 96, 100, 1).padding == pytest.approx(0.0625)
