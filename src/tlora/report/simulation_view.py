"""The content of a simulation's page: plain numbers and rows by name. The metrics in words: `wording/metrics.py`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tlora.report.line_styles import LineStyle, job_colours
from tlora.report.rows import JsonObject, number

_OURS = "residual_capacity"


@dataclass(frozen=True)
class PolicyView:
    """One policy with one set of kernels; `name` names both.

    `samples` has equally long columns: seconds, waiting_jobs, allocated_share, useful_share, allocated_gpus, shared_gpus. Each value
    holds until the next second, the last until `end_seconds`. `spans` has rows of group_id, base_model, gpus, start_seconds, end_seconds,
    job_ids.
    """

    name: str
    policy: str
    kernels: str
    metrics: Mapping[str, float]
    jct_seconds: Sequence[float]
    samples: Mapping[str, Sequence[float]]
    end_seconds: float
    spans: Sequence[JsonObject]


@dataclass(frozen=True)
class SimulationView:
    """Policies over one trace. `ratios` has a row for each pair, `name` against `against`; those against `reference` come first.

    `sweep` has rows of name, load, seed, mean_jct_seconds, and of the policy that they are compared with if it is not `reference`.
    `constants` has rows of kernels, base, field, value, source. `warnings` say what in the trace was not taken literally.
    """

    title: str
    num_gpus: int
    settings: Mapping[str, object]
    policies: Sequence[PolicyView]
    ratios: Sequence[JsonObject] = ()
    reference: str = ""
    sweep: Sequence[JsonObject] = ()
    constants: Sequence[JsonObject] = field(default_factory=list[JsonObject])
    warnings: Sequence[str] = ()


def usual_kernels(view: SimulationView) -> str:
    """The kernels of most policies, or of the first among equals; empty without policies."""
    counts = Counter(policy.kernels for policy in view.policies)
    return max(counts, key=counts.__getitem__, default="")


def gains_of(view: SimulationView) -> dict[str, float]:
    """By policy, the reference's mean JCT divided by its own."""
    return {str(row["name"]): number(row["mean_jct_seconds"]) for row in view.ratios if row["against"] == view.reference}


def leader_of(view: SimulationView) -> str:
    """The policy with the lowest mean JCT; empty if no job was done."""
    means = {policy.name: number(policy.metrics.get("mean_jct_seconds")) for policy in view.policies}
    return min((name for name, mean in means.items() if math.isfinite(mean)), key=means.__getitem__, default="")


def shown_first(view: SimulationView) -> str:
    """The policy to show first: ours if it was simulated, else the leader, else the first."""
    ours = [policy.name for policy in view.policies if policy.policy == _OURS]
    return ours[0] if ours else leader_of(view) or view.policies[0].name


def looks(view: SimulationView) -> dict[str, LineStyle]:
    """The `LineStyle` of each policy, also of those of the sweep: one colour each, dashed unless its kernels are the usual ones."""
    kernels = {policy.name: policy.kernels for policy in view.policies}
    names = list(dict.fromkeys([*kernels, *(str(row["name"]) for row in view.sweep)]))
    solid = usual_kernels(view)
    return {
        name: LineStyle(colour, "solid" if kernels.get(name, solid) == solid else "dash")
        for name, colour in zip(names, job_colours(len(names)), strict=True)
    }
