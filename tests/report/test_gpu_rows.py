"""Rows of several GPUs become rows of all of them together."""

from __future__ import annotations

from tlora.report.rows import merge_gpus


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
