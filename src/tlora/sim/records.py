"""What a simulation leaves behind: a record per job, stretches of groups for the Gantt view, samples over time, and its settings.

Plain values without behaviour. They are never changed, but not frozen: making frozen ones took 8 % of a simulation under FIFO.
Times are seconds on the simulation's own clock. What is computed from them: `metrics.py`, `bounds.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

FinalState = Literal["done", "cancelled", "failed", "unknown", "rejected", "unfinished"]


@dataclass(slots=True)
class JobRecord:
    """One job of a trace under one policy.

    `started_seconds` is its first run, nan if it never ran; `finished_seconds` is when it ended, in any state; nan if it did not.
    `alone_seconds` = steps x (measured time between its optimizer steps alone on its `gpus`, with the same kernels). Slowdowns are over
    windows of 10 optimizer steps; nan without a window. `gpu_seconds` is its share of the GPU time of the groups that it was in.
    `most_gpus` are the most that have a sample of each of its steps to work on. `group_seconds` is the time in a group from its first run
    on, `paused_seconds` the part of it in which it was paused. A window has a move in it if the job was paused in it.
    """

    job_id: str
    tenant: str
    base_model: str
    gpus: int
    submitted_seconds: float
    started_seconds: float
    finished_seconds: float
    state: FinalState
    tokens_per_step: float
    steps: float
    alone_seconds: float
    max_slowdown: float
    windows: int
    windows_beyond: int
    regroupings: int
    gpu_seconds: float
    worst_slowdown: float
    mean_slowdown: float
    most_gpus: int = 1
    windows_with_moves: int = 0
    windows_with_moves_beyond: int = 0
    group_seconds: float = math.nan
    paused_seconds: float = 0.0


@dataclass(slots=True)
class GroupSpan:
    """A longest stretch of time in which a group had the same members and the same GPUs."""

    group_id: str
    base_model: str
    gpus: tuple[int, ...]
    start_seconds: float
    end_seconds: float
    job_ids: tuple[str, ...]


@dataclass(slots=True)
class Sample:
    """How the cluster stood from `seconds` until the next sample.

    `useful_share` (0 to 1) is useful tokens/s over what all `max_gpus` GPUs could do saturated; `max_gpus` are those not lost.
    """

    seconds: float
    waiting_jobs: int
    running_jobs: int
    allocated_gpus: int
    useful_share: float
    tokens_per_second: float
    max_gpus: int


@dataclass(slots=True)
class SimulationResult:
    """One trace under one policy and one set of kernels. `warnings` say what of the trace does not count as it reads.

    `decision_seconds` (all decisions together) and `wall_seconds` are wall time, the only values here that differ between equal runs.
    """

    policy: str
    kernels: str
    trace: str
    seed: int
    num_gpus: int
    load: float
    jobs: list[JobRecord] = field(default_factory=list["JobRecord"])
    spans: list[GroupSpan] = field(default_factory=list["GroupSpan"])
    samples: list[Sample] = field(default_factory=list["Sample"])
    decisions: int = 0
    decision_seconds: float = 0.0
    wall_seconds: float = 0.0
    settings: dict[str, object] = field(default_factory=dict[str, object])
    warnings: list[str] = field(default_factory=list[str])
