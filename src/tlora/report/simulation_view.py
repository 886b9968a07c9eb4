"""What the page of a simulation shows: plain numbers and rows by name. The metrics in words: `wording/metrics.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tlora.report.looks import Look, job_colours
from tlora.report.rows import JsonObject


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

    `sweep` has rows of name, load, seed, mean_jct_seconds, and of the name that they are held against where that is not `reference`.
    `constants` has rows of kernels, base, field, value, source. `warnings` say what of the trace does not count as it reads.
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


def looks(view: SimulationView) -> dict[str, Look]:
    """A look for each policy's name: its policy's colour, dashed unless its kernels are the usual ones; also for the sweep's names."""
    policies = list(dict.fromkeys(policy.policy for policy in view.policies))
    swept = [
        name for name in dict.fromkeys(str(row["name"]) for row in view.sweep) if name not in {policy.name for policy in view.policies}
    ]
    colours = dict(zip([*policies, *swept], job_colours(len(policies) + len(swept)), strict=True))
    solid = usual_kernels(view)
    found = {policy.name: Look(colours[policy.policy], "solid" if policy.kernels == solid else "dash") for policy in view.policies}
    return found | {name: Look(colours[name], "solid") for name in swept}
