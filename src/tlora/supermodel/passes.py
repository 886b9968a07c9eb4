"""One micro-batch through the super-model as an object: forward and backward apart, with other passes between them or not."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from tlora.supermodel.losses import JobLoss, sum_losses

Forward = Callable[[], tuple[dict[str, JobLoss], Callable[[], object] | None]]
"""Runs a part of a micro-batch: each job's loss, and what adds its gradients to the jobs' sums (None where there are none)."""


class Pass:
    """A micro-batch's forward and its backward, each once. Several may be between the two at a time, and go back in any order.

    Its parts run in the order of `forwards`, in backward too. `adapters` tells whether those that the pass reads are what they were.
    """

    def __init__(self, forwards: Sequence[Forward], adapters: Callable[[], Hashable]) -> None:
        self._forwards: Sequence[Forward] | None = forwards
        self._adapters = adapters
        self._before: Hashable = None
        self._backwards: list[Callable[[], object]] = []

    def forward(self) -> dict[str, JobLoss]:
        """Each job's loss. RuntimeError the second time; a forward that raised may be called again."""
        if self._forwards is None:
            raise RuntimeError("this pass has run its forward already. Begin another one")
        before = self._adapters()
        results = [forward() for forward in self._forwards]
        self._forwards, self._before = None, before
        self._backwards = [backward for _, backward in results if backward is not None]
        return sum_losses(losses for losses, _ in results)

    def backward(self) -> None:
        """Add each job's gradients to its sums. Does nothing the second time, in evaluation, and where no token is trained.

        RuntimeError before `forward`, and where adapters of the pass have stepped, joined or moved since: nothing is added then.
        """
        if self._forwards is not None:
            raise RuntimeError("this pass has not run its forward yet. Call forward first")
        backwards, self._backwards = self._backwards, []
        if backwards and self._before != self._adapters():
            raise RuntimeError("adapters have stepped, joined or moved since this pass's forward. Go back before they do")
        while backwards:
            backwards.pop(0)()
