"""A job as the scheduler sees it: what was submitted, what became of it so far, and what that says of any moment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tlora.protocol import JobSubmitted
from tlora.shape.sharing import Member, even_sample_tokens

RECENT_SECONDS = 86400.0  # what was `recent_at` counts for 1 / e after so long

Status = Literal["pending", "held", "placed", "ended"]
Lane = tuple[int, float, bool]


class Lack(NamedTuple):
    """Why a job cannot run on the GPUs that there are; `more_would_do`: it could on more of the same."""

    reason: str
    more_would_do: bool


@dataclass(slots=True)
class Job:
    """`need` are the tokens per second that honour its bound: n / (max slowdown * T0); T0 as corrected. `steps_done` is as of `seen_at`."""

    spec: JobSubmitted
    submitted_at: float
    alone_nodes: int = 1  # that T0 is counted on
    alone_step_seconds: float = 0.0
    need: float = 0.0
    status: Status = "pending"
    group_id: str | None = None
    steps_done: float = 0.0
    steps_reported: float = 0.0  # by its group; in another it may go on from a checkpoint with fewer
    steps_before: float = 0.0  # when it was placed there
    steady: bool = False  # it was reported since its group is as it is, so that the next report is of this alone
    seen_at: float = 0.0
    step_seconds: float = 0.0  # in its group, as predicted; 0 while it waits
    service_gpu_seconds: float = 0.0  # its share of GPU time so far, as of `seen_at`
    gpu_share: float = 0.0  # GPUs that are its own part of its group's
    recent_gpu_seconds: float = 0.0  # as `recent_at` has it, as of `seen_at`
    ran_seconds: float = 0.0  # in groups, as of `seen_at`
    waited_seconds: float = 0.0  # before it last began to wait, all stays in the queue together
    times_unqueued: int = 0  # that it stopped waiting, as it was placed or held
    least_room: float = 0.0  # the room of the smallest GPUs on which it can run; 0 where all are alike to it, inf where there are none
    number: int = 0  # of its submission: the job that came first has the lowest
    sample_tokens: int = field(init=False)  # as a group's member

    def __post_init__(self) -> None:
        self.sample_tokens = even_sample_tokens(self.spec.profile)

    @property
    def lane(self) -> Lane:
        """Jobs of one lane find room on the same GPUs."""
        return self.spec.gpus, self.least_room, self.spec.on_one_host

    @property
    def weight(self) -> float:
        """Its share of a group: what it needs; without a bound, which needs nothing, a thousandth of its speed alone."""
        return self.need or self.spec.profile.tokens_per_step / (1000 * self.alone_step_seconds)

    def as_member(self, weight: float) -> Member:
        return Member(self.spec.profile.tokens_per_step, weight, self.sample_tokens)

    def steps_at(self, now: float) -> float:
        """Optimizer steps through by `now`, as predicted since they were last reported."""
        if not self.step_seconds:
            return self.steps_done
        done, steps = self.steps_done + (now - self.seen_at) / self.step_seconds, self.spec.profile.steps
        return done if done < steps else float(steps)

    def remaining_seconds(self, now: float) -> float:
        """What is left of it, alone on its own GPUs."""
        return (self.spec.profile.steps - self.steps_at(now)) * self.alone_step_seconds

    def overran_seconds(self, now: float) -> float:
        """How long it has run beyond its declared steps, as predicted; 0 while there are some left."""
        if not self.step_seconds:
            return 0.0
        return max(0.0, now - self.seen_at - (self.spec.profile.steps - self.steps_done) * self.step_seconds)

    def ran_at(self, now: float) -> float:
        return self.ran_seconds + (now - self.seen_at if self.step_seconds else 0.0)

    def service_at(self, now: float) -> float:
        return self.service_gpu_seconds + (now - self.seen_at) * self.gpu_share

    def recent_at(self, now: float) -> float:
        """GPU-seconds of about the last day: each counts for exp(-age / day). Of no more GPUs than it asked for."""
        kept = math.exp((self.seen_at - now) / RECENT_SECONDS)
        now_on = min(self.gpu_share, self.spec.gpus) if self.step_seconds else 0.0
        return self.recent_gpu_seconds * kept + now_on * RECENT_SECONDS * (1 - kept)

    def begin(self, now: float) -> bool:
        """Its group is ready: it has made no steps while that was loaded, and while it joined. Whether some were predicted."""
        self.settle(now)
        if self.steps_reported or self.steps_done == self.steps_before:
            return False
        self.steps_done = self.steps_before
        return True

    def settle(self, now: float) -> None:
        """Count what was done until `now`."""
        self.recent_gpu_seconds = self.recent_at(now)
        if self.step_seconds:
            self.steps_done, self.service_gpu_seconds, self.ran_seconds = self.steps_at(now), self.service_at(now), self.ran_at(now)
        self.seen_at = now
