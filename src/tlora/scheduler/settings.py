"""What an operator may set of the residual-capacity policy, with what each value was measured to be good for. No behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tlora.batching.replicas import LEAST_REPLICA_TOKENS
from tlora.shape.moves import MoveCosts

Order = Literal["urgency", "arrival"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Tuned on trace ee9e8c, 128 GPUs, seeds 10-12, with the constants of one H200. `moves`: what is believed that moves cost.

    `sharing`: jobs may share a group. `elastic`: a job may get more GPUs than it asks for, or fewer within its bound, and these may
    change while it runs. `preemption`: a job may have to wait again for one that is far more urgent. Without the three, in the order
    of "arrival" and with an infinite `starvation_factor`, this is backfill.

    Urgency is (patience + age) / (remaining time * GPUs ** width_exponent): a patience far above remaining times makes it shortest first,
    one of 0 the response ratio; an exponent of 1 goes by GPU-seconds, one of 0 by time alone. A GPU costs `delay_price` * jobs / GPUs: so
    many jobs are one second later for each second that it is taken. A preempted job is `preemption_ratio` times less urgent. A move must
    save (1 + `hysteresis`) times what it costs, growth must shorten steps by `growth_gain`, and a group whose members or GPUs have changed
    rests for `min_residence_seconds`, unless what it gives up is more than its share.

    A job starves that has waited for `starvation_factor` times its time alone, at least for `starvation_least_seconds` and at most for
    `starvation_most_seconds`; with an infinite factor none does. Those that starve go first, on `starvation_share` of the GPUs, or on what
    the first of them asks for, as long as those like it had no more than the share of about the last day's GPU time.

    With `reservations` the first job of several GPUs that finds no place gets those on which it soonest will, as one that starves does:
    others use them as long as their predicted ends do not put it off.

    No step is cut into parts of fewer tokens than `least_replica_tokens`: engines do not, and a group has no use for GPUs beyond that.
    """

    sharing: bool = True
    elastic: bool = True
    preemption: bool = True
    order: Order = "urgency"
    patience_seconds: float = 1e7
    width_exponent: float = 0.25
    delay_price: float = 3.0
    preemption_ratio: float = 2.0
    starvation_factor: float = 10.0
    starvation_least_seconds: float = 4 * 3600.0
    starvation_most_seconds: float = 24 * 3600.0
    starvation_share: float = 0.05
    reservations: bool = False
    growth_gain: float = 0.03
    hysteresis: float = 0.5
    min_residence_seconds: float = 600.0
    moves: MoveCosts = field(default_factory=MoveCosts)
    least_replica_tokens: int = LEAST_REPLICA_TOKENS
