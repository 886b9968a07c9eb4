"""Messages between the process of a worker with several GPUs and its ranks, besides a worker's reports on its jobs.

A rank obeys the commands of a worker with one GPU (`engine/commands.py`). The words here are of jobs that several ranks compute: one has
the job's home, and its files; the others follow. Notes of gradients, and of what a job begins with, are those of `ranks/messages.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tlora.batching.replicas import Span
from tlora.job import JobSpec
from tlora.worker_protocol import Join, Load, Phase

# -- to a rank ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enter:
    """The first message: load the base on `device`. `store`: a file by which the ranks find each other. `expected`: the jobs that will
    join first.
    """

    load: Load
    device: str
    store: str
    worker_pid: int
    expected: tuple[JobSpec, ...]


@dataclass(frozen=True)
class Spread:
    """The job shall have its home here, and parts on other ranks. Answered by `Opened`, or as a `Join` that fails."""

    join: Join
    span: Span


@dataclass(frozen=True)
class Follow:
    """The job, whose home is another rank, has a part here. Answered by `Opened` or `Faulty`."""

    join: Join
    span: Span


@dataclass(frozen=True)
class Meet:
    """To all ranks, in one order: make memory for the `numel` elements of a job's adapter that the others can read. Then it begins on the
    ranks of `span`. `number` counts the meetings of a team.
    """

    job_id: str
    span: Span
    numel: int
    number: int


# -- from a rank -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """The job can begin on this rank. Its home rank sends its data sets along, so that the others need not prepare them again."""

    job_id: str
    numel: int
    train_set: str
    eval_set: str | None = None


@dataclass(frozen=True)
class Beat:
    """A sign of life, as `worker_protocol.Alive`."""

    phase: Phase
    count: int
    in_flight: tuple[str, ...] = ()
