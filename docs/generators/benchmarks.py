"""The table of today's speed, out of bench/results."""

from __future__ import annotations

from bench.results_table import format_table


def benchmark_tables() -> str:
    return format_table("../bench/results")
