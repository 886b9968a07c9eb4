"""The table of docs/reference/scale.md, out of the results of `bench.scale` that are named here."""

from __future__ import annotations

from typing import Any

from bench.result_keys import document_of

RESULTS = ("cpu_06f531c_scale.json",)  # of clusters that both have, the last counts


def format_table(results: str) -> str:
    """Markdown, whose links lead to `results`, where the files lie as seen from the page."""
    found: dict[int, tuple[dict[str, Any], str]] = {}
    for name in RESULTS:
        found |= {row["hosts"]: (row, name) for row in document_of(name)["rows"]}
    columns = [found[hosts] for hosts in sorted(found)]
    rows = [row for row, _ in columns]
    lines = ["| |" + "".join(f" {row['hosts']:,} hosts |" for row in rows), "| --- |" + " ---: |" * len(rows)]
    for name, cell in _CELLS.items():
        lines.append(f"| {name} |" + "".join(f" {cell(row)} |" for row in rows))
    lines.append("| measured |" + "".join(f" [{document_of(name)['commit']}]({results}/{name}) |" for _, name in columns))
    first = document_of(RESULTS[0])
    return "\n".join([*lines, "", f"On {first['cores']} cores of {first['device']} that other work used too, with `nice`."])


def _milliseconds(spans: dict[str, float]) -> str:
    return f"{spans['median_milliseconds']:.1f}, {spans['p99_milliseconds']:.1f}"


_CELLS = {
    "GPUs, with a worker and a connection each": lambda row: f"{row['gpus']:,}",
    "jobs": lambda row: f"{row['jobs']:,}",
    "a decision, processor time: median, p99 (ms)": lambda row: _milliseconds(row["decided"]["processor"]),
    "until it is carried out, processor time: median, p99 (ms)": lambda row: _milliseconds(row["answered"]["processor"]),
    "until it is carried out, by the clock: median, p99 (ms)": lambda row: _milliseconds(row["answered"]["clock"]),
    "messages of workers a second, while all train": lambda row: f"{row['messages_per_second']:,.0f}",
    "of one core, meanwhile": lambda row: f"{100 * row['processor_share']:.0f} %",
    "memory, at most (GB)": lambda row: f"{row['peak_gigabytes']:.2f}",
    "from nothing until all train: by the clock, processor time (s)": lambda row: (
        f"{row['first_start_seconds']:.0f}, {row['first_start_processor_seconds']:.0f}"
    ),
    "hosts of the rack that is lost": lambda row: f"{row['hosts_of_the_lost_rack']}",
    "settled after it: by the clock, processor time (s)": lambda row: (
        f"{row['rack_lost_seconds']:.1f}, {row['rack_lost_processor_seconds']:.1f}"
    ),
    "settled after the controller was killed: by the clock, processor time (s)": lambda row: (
        f"{row['restart_seconds']:.0f}, {row['restart_processor_seconds']:.0f}"
    ),
    "load average of the machine, before and after": lambda row: f"{row['load_average_before']:.0f}, {row['load_average_after']:.0f}",
}
