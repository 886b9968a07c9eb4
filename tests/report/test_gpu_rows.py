"""Rows of several GPUs become rows of all of them together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tlora.report.rows import merge_gpus
from tlora.report.run_view import read_run
from tlora.report.tables import gpus_table
from tlora.wording.numbers import duration_text


def row(gpu: int, seconds: float, rate: float, **jobs: int) -> dict[str, object]:
    tokens = sum(jobs.values())
    return {
        "gpu": gpu,
        "seconds": seconds,
        "tokens_per_second": rate,
        "jobs": jobs,
        "tokens": tokens,
        "computed": 2 * tokens,
        "offered": 4 * tokens,
        "micro_batches": 1,
    }


def test_rates_are_added_over_gpus_and_averaged_over_time() -> None:
    merged = merge_gpus([row(0, 0.5, 100, a=50), row(0, 1.5, 300, a=300), row(1, 1.0, 1000, b=1000), row(1, 3.0, 500, b=7)])
    assert [found["seconds"] for found in merged] == [2.0, 4.0]
    assert [found["tokens_per_second"] for found in merged] == [1200, 500]
    assert merged[0]["jobs"] == {"a": 350, "b": 1000}
    assert (merged[0]["tokens"], merged[0]["padding"], merged[0]["fill"]) == (1350, 0.5, 0.25)
    assert merged[0]["tail_padding"] is None


def test_rows_of_one_gpu_stay_as_they_are() -> None:
    rows = [{"seconds": 1.0, "tokens_per_second": 5.0, "jobs": {"a": 5}}]
    assert merge_gpus(rows) == rows
    assert merge_gpus([]) == []


def test_the_page_says_what_each_gpu_computed_and_waited_for(tmp_path: Path) -> None:
    facts = {
        "jobs": [{"name": "wide"}, {"name": "brief"}],
        "status": "done",
        "homes": {"wide": 1, "brief": 0},
        "spans": {"wide": {"replicas": 2, "gpus": [1, 0]}},
        "gpus": {
            "0": {"token_budget": 4096, "exchange_wait_seconds": 1.5, "fetch_wait_seconds": 61.0},
            "1": {"token_budget": 2048, "exchange_wait_seconds": 0.0},
        },
    }
    (tmp_path / "run.json").write_text(json.dumps(facts))
    view = read_run(tmp_path)
    assert [(job.name, job.gpu, job.parts_on) for job in view.jobs] == [("wide", 1, (0,)), ("brief", 0, ())]
    table = gpus_table(view)
    waits = ("waited for other GPUs", "waited for the base&#39;s layers", duration_text(1.5), duration_text(61.0))
    for words in ("brief, a part of wide", "4,096", *waits):
        assert words in table, words
    assert not gpus_table(replace(view, spec={**facts, "gpus": {"0": {}}})), "nothing to say of one GPU"
