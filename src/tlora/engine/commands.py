"""Commands from a worker's settler to the group's trainer, one step at a time (`settler.py`, `trainer.py`), within the process."""

from __future__ import annotations

from dataclasses import dataclass, field

from tlora.worker_protocol import Join


@dataclass(frozen=True, slots=True)
class Leave:
    """Checkpoint a job at its last optimizer step and release it. Answered by `Left`, unless the job has ended before."""

    job_id: str


@dataclass(frozen=True, slots=True)
class Share:
    """From the next micro-batch on: its tokens, and the jobs' weights. How many layers it recomputes follows from the memory that is here.

    The budget is raised to the longest sample of a resident. `weights` also hold for jobs that join later.
    """

    token_budget: int
    weights: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Stop:
    """Checkpoint all jobs and end."""


Command = Join | Leave | Share | Stop
