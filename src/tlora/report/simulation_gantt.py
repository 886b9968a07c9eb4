"""The view of the groups: GPUs as rows, time to the right, on a canvas of its own: plotly takes 2.6 s to draw 20,000 bars and 3.4 s for
each zoom (Chromium, software rendering).

Its numbers are packed into the page next to its script (`gantt.js`), which uses `unpack` and `colours` of the page's script.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from tlora.report.looks import job_colours
from tlora.report.page import packed
from tlora.report.rows import JsonObject
from tlora.report.simulation_view import SimulationView, shown_first
from tlora.report.templates import render

_SPANS_PER_POLICY = 20_000  # drawn in about 10 ms; 14 policies of them are some 3 MB of page


def gantt_html(view: SimulationView) -> Markup:
    """Canvas, data and script as HTML; empty if no group ever ran. At most one per page, as its ids are fixed."""
    policies = [policy for policy in view.policies if policy.spans]
    if not policies:
        return Markup()
    first = min(float(span["start_seconds"]) for policy in policies for span in policy.spans)
    end = max(float(span["end_seconds"]) for policy in policies for span in policy.spans) - first
    jobs = _numbered(job_id for policy in policies for span in policy.spans for job_id in span["job_ids"])
    bases = _numbered(span["base_model"] for policy in policies for span in policy.spans)
    listed = [{"name": policy.name, "spans": _columns(policy.spans, first, jobs, bases)} for policy in policies]
    gpus = max(view.num_gpus, 1 + max(max(span["gpus"]) for policy in policies for span in policy.spans if span["gpus"]))
    opened = shown_first(view)
    payload = {
        "first": next((at for at, policy in enumerate(policies) if policy.name == opened), 0),
        "gpus": gpus,
        "end": end or 1.0,
        "jobs": list(jobs),
        "bases": list(bases),
        "colours": job_colours(len(bases)),
        "policies": listed,
    }
    data = packed(json.dumps(payload, allow_nan=False, separators=(",", ":")))
    counts = [(policy.name, len(policy.spans) - _SPANS_PER_POLICY) for policy in policies]
    return render("gantt.html", data=data, left_out=[f"{count:,} of {name}" for name, count in counts if count > 0])


def _numbered(names: Any) -> dict[str, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}


def _columns(spans: Sequence[JsonObject], first: float, jobs: dict[str, int], bases: dict[str, int]) -> dict[str, Any]:
    """The spans as columns; above `_SPANS_PER_POLICY`, only those that cover most. GPUs as ranges: [first, last, first, last, ...]."""
    if len(spans) > _SPANS_PER_POLICY:
        spans = sorted(spans, key=lambda span: (span["end_seconds"] - span["start_seconds"]) * len(span["gpus"]))[-_SPANS_PER_POLICY:]
        spans.sort(key=lambda span: span["start_seconds"])
    groups = _numbered(span["group_id"] for span in spans)
    return {
        "start": [round(span["start_seconds"] - first, 3) for span in spans],
        "end": [round(span["end_seconds"] - first, 3) for span in spans],
        "group": [groups[span["group_id"]] for span in spans],
        "base": [bases[span["base_model"]] for span in spans],
        "rows": [_runs(span["gpus"]) for span in spans],
        "jobs": [[jobs[job_id] for job_id in span["job_ids"]] for span in spans],
        "names": list(groups),
    }


def _runs(gpus: Sequence[int]) -> list[int]:
    """Consecutive numbers as ranges: [first, last, first, last, ...]."""
    runs: list[int] = []
    for gpu in sorted(gpus):
        if runs and gpu == runs[-1] + 1:
            runs[-1] = gpu
        else:
            runs += [gpu, gpu]
    return runs
