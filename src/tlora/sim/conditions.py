"""What really happens in a simulated cluster, apart from what its scheduler believes: speeds, lengths, drift, delays, failures.

Everything is drawn from a hash of the seed and a name, so that no draw depends on the order of events or on the policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import blake2b

from tlora.errors import ConfigError
from tlora.scheduler.tenants import DAY_SECONDS
from tlora.shape.cost import CostModel
from tlora.shape.moves import MoveCosts

_DAY_SECONDS = 86400.0
_MOST_DELAY = 10.0
MOST_HALF_LIFE_SECONDS = 1e9  # as of a server
_HOURS = (0.1, 1e9)  # between failures and until the repair: with less between them nothing would ever be done


@dataclass(frozen=True, slots=True)
class Conditions:
    """By default exactly what the scheduler believes, except `moves`, which it does not know.

    `speed_error` e: a job's micro-batches take u times as long as predicted, u uniform in 1 +- e, alone and in a group (there the mean
    of its members' by tokens). `length_error`: its steps have u times the tokens of its profile. `drift` d: everything takes
    1 + d sin(2 pi (t / day + phase of the base)) times as long. `delay` d: starts and joins take 1 + d x times as long, x exponential
    with mean 1. `mtbf_hours` is of one node (None: it never fails): half of the failures take one GPU, half the node, back after
    `repair_hours`. `usage_half_life_seconds` is the scheduler's, as a server has it (fair shares of tenants). `cost` is what the cluster
    follows (None: the scheduler's, as it is at the start), `saturated` the tokens/s of one GPU by base in which useful work is counted
    (None: those of `cost`). Raises ConfigError.
    """

    seed: int = 0
    speed_error: float = 0.0
    length_error: float = 0.0
    drift: float = 0.0
    delay: float = 0.0
    mtbf_hours: float | None = None
    repair_hours: float = 2.0
    usage_half_life_seconds: float = DAY_SECONDS
    moves: MoveCosts = field(default_factory=MoveCosts)
    cost: CostModel | None = None
    saturated: dict[str, float] | None = None

    def __post_init__(self) -> None:
        for name, share in (
            ("truth_error", self.speed_error),
            ("length_error", self.length_error),
            ("drift", self.drift),
        ):  # as options say
            if not 0 <= share < 1:
                raise ConfigError(f"{name} is {share:g}: it is a share of what was predicted, from 0 to less than 1. Give 0.15 for +-15 %")
        if not 0 <= self.delay <= _MOST_DELAY:
            raise ConfigError(
                f"delay is {self.delay:g}: it is a share of the time of a start, from 0 to {_MOST_DELAY:g}. Give 0.5 for half as long again"
            )
        least, most = _HOURS
        for name, hours in (("mtbf_hours", self.mtbf_hours), ("repair_hours", self.repair_hours)):
            if hours is not None and not least <= hours <= most:
                raise ConfigError(
                    f"{name} is {hours:g}: it must be a number of hours from {least:g} to {most:,.0f}. Give 300 for 300 hours"
                )
        if not 0 < self.usage_half_life_seconds <= MOST_HALF_LIFE_SECONDS:
            raise ConfigError(
                f"usage_half_life_seconds is {self.usage_half_life_seconds:g}: it must be above 0 and at most "
                f"{MOST_HALF_LIFE_SECONDS:,.0f}. Give 86400 for a day"
            )

    @property
    def exact(self) -> bool:
        """Whether speeds are as the scheduler believes: then reports would tell it nothing, and there are none."""
        return self.cost is None and not (self.speed_error or self.length_error or self.drift)

    def speed_of(self, job_id: str) -> float:
        """How many times as long as predicted the job's micro-batches take."""
        return self._around_one(self.speed_error, f"speed|{job_id}")

    def length_of(self, job_id: str) -> float:
        """How many times as many tokens as its profile says its steps have."""
        return self._around_one(self.length_error, f"length|{job_id}")

    def drift_at(self, seconds: float, base: str) -> float:
        """How many times as long as predicted everything of this base takes at that time."""
        if not self.drift:
            return 1.0
        return 1 + self.drift * math.sin(2 * math.pi * (seconds / _DAY_SECONDS + self._uniform(f"drift|{base}")))

    def delay_of(self, what: str) -> float:
        """How many times as long as usual a start or join takes."""
        return 1 + self.delay * self._exponential(f"delay|{what}") if self.delay else 1.0

    def failure(self, node: str, count: int) -> tuple[float, float]:
        """Seconds from a node's coming (back) to its failure number `count`, and a number in (0, 1) that tells what fails."""
        assert self.mtbf_hours is not None, "nodes do not fail"
        key = f"failure|{node}|{count}"
        return 3600 * self.mtbf_hours * self._exponential(key), self._uniform(f"{key}|what")

    def _around_one(self, error: float, name: str) -> float:
        return 1 + error * (2 * self._uniform(name) - 1) if error else 1.0

    def _exponential(self, name: str) -> float:
        return -math.log(self._uniform(name))

    def _uniform(self, name: str) -> float:
        """In (0, 1), without the ends."""
        bits = int.from_bytes(blake2b(f"{self.seed}|{name}".encode(), digest_size=8).digest(), "big") >> 12
        return (bits + 0.5) / 2**52
