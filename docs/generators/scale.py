"""The table of how many hosts one controller serves, out of bench/results."""

from __future__ import annotations

from bench.scale_table import format_table


def scale_table() -> str:
    return format_table("../../bench/results")
