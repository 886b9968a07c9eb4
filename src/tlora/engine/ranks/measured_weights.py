"""Measured seconds of the ranks that compute a job, and the weights of its replicas that its lead rank chooses by them.

Each rank measures its own part of a global batch, from when it is on offer until its device is through, other jobs' work between included,
and reports it with its gradients (`Sent`). The lead rank decides, and reports the weights for the next batch with its own: no rank can take
the step before it has these, so all cut the next batch alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tlora.batching.replica_weights import ReplicaWeights
from tlora.batching.replicas import ReplicaPlacement


class MeasuredWeights:
    """Of a job on one of its ranks; what other ranks measured comes to the lead rank alone. Without a `clock` weights stay as they are."""

    def __init__(self, span: ReplicaPlacement, rank: int, clock: Callable[[], float] | None) -> None:
        self._chosen, self._rank, self._clock = ReplicaWeights(span), rank, clock
        self._since: float | None = None  # the part on offer is on offer
        self._tokens: dict[int, dict[int, int]] = {}  # by step and rank, until all are there
        self._seconds: dict[int, dict[int, float]] = {}
        self._decided = (-1, span.weights)  # after which step, and what

    def offered(self) -> None:
        """This rank's part of the next global batch is on offer."""
        self._since = self._clock() if self._clock is not None else None

    def timer(self, step: int, tokens: int) -> Callable[[], float]:
        """To be called, by any thread, when the device is through with the part on offer, of so many tokens: returns the seconds since; 0
        where none are measured.
        """
        clock, since, self._since = self._clock, self._since, None
        own = dict[int, float]()
        if self._rank == self._chosen.span.lead_rank:
            self._tokens[step], self._seconds[step] = {self._rank: tokens}, own

        def stop() -> float:
            own[self._rank] = clock() - since if clock is not None and since is not None else 0.0
            return own[self._rank]

        return stop

    def see(self, step: int, tokens: Mapping[int, int], seconds: Mapping[int, float]) -> None:
        """On the lead rank, what the others report of the step."""
        self._tokens[step].update(tokens)
        self._seconds[step].update(seconds)

    def decide(self, step: int) -> tuple[float, ...]:
        """On the lead rank: weights of the batches after that which follows `step` steps, by all steps that all ranks have measured. It is
        the same however often it is asked.
        """
        if step != self._decided[0]:
            ranks = len(self._chosen.span.ranks)
            for earlier in [at for at in sorted(self._tokens) if len(self._seconds[at]) == ranks]:
                self._chosen.see(self._tokens.pop(earlier), self._seconds.pop(earlier))
            self._decided = step, self._chosen.span.weights
        return self._decided[1]
