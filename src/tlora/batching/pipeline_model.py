"""A pipeline in predicted seconds, one forward one backward, under the rule that a job's batch g + 1 enters when its batch g has left.

`Stream` is the order of all jobs' micro-batches that a group computes. Nothing of memory is known here; a stage's share of a micro-batch is
1/S of its seconds, a third of it forward. A `StageOverhead` comes on top.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Protocol

from tlora.batching.flow import Flow, Item
from tlora.batching.pack import pack

PADDING = 128  # tokens of a micro-batch beyond its budget, at most
_FORWARD = 1 / 3  # of a micro-batch's time


def most_open(stage: int, stages: int) -> int:
    """Micro-batches that a stage has forward and not back at a time: one for itself and one for each stage behind it, as one forward one
    backward needs, and one more before the last. That hides what lies between two stages: links, and micro-batches of unequal size.
    """
    return stages - stage + (stage < stages - 1)


def ring_places(stages: int) -> int:
    """Of hidden states, or gradients, between two stages: of all micro-batches that are announced at a time, so that it is never full, with
    room for what a round leaves empty at its end.
    """
    return most_open(0, stages) + 1


@dataclass(frozen=True)
class Entry:
    """A micro-batch: its tokens, and the batch of each job of which it has samples."""

    tokens: int
    batches: Mapping[str, int]


@dataclass(frozen=True)
class StageOverhead:
    """What stages take besides products, in the unit of a pipeline's seconds.

    `per_token`: that the device at either end of a boundary copies the hidden states of a token, or their gradient, between its products,
    not beside them; `latency`: from the end of the sender's copy until the other device can begin; `launch`: that a stage's host launches a
    micro-batch, there and back, where passes are captured as graphs, else 0. With a `host_ahead` the last stage's host launches a
    micro-batch and announces the next one while its device is busy, before it knows which jobs step meanwhile.
    """

    per_token: float = 0.0
    latency: float = 0.0
    launch: float = 0.0
    host_ahead: bool = False


NO_OVERHEAD = StageOverhead()


def turn_seconds(micro_batches: float, each: float, stages: int, parts: Sequence[tuple[float, float]], latency: float = 0.0) -> float:
    """What `Pipeline` takes in the long run for `micro_batches`, of which the slowest stage computes one in `each`: until that stage is
    through, or the last of them has come back through all stages, whichever is later.

    max(N t, max over jobs of p N t + b ((S - 1) t + (2 S - 1) latency)): `parts` has of each job its part p of the tokens, and how many of
    its global batches b that is. A batch follows the one before when the last stage hears that this has left.

    >>> turn_seconds(4, 1.0, 2, [(1.0, 1.0)]), turn_seconds(4, 1.0, 2, [(0.5, 1.0)] * 2)
    (5.0, 4.0)
    """
    each_batch = (stages - 1) * each + (2 * stages - 1) * latency
    return max(micro_batches * each, *(part * micro_batches * each + batches * each_batch for part, batches in parts))


class OfferedJob:
    """A job's flow, and which of its `batches` that is; the next one comes when `leave` is called."""

    def __init__(self, name: str, batches: Iterator[Sequence[Item]]) -> None:
        self._batches = batches
        self.flow, self.batch = Flow(name), -1
        self.leave()

    def leave(self) -> None:
        """The batch has left: the next one is offered."""
        self.batch += 1
        self.flow.offer(next(self._batches))


class EntryOrder(Protocol):
    """Which micro-batch enters next; None while the rule keeps all out."""

    def next(self) -> Entry | None: ...
    def retire(self, entry: Entry) -> None: ...


class Stream:
    """`pack` over what all jobs offer; with `stages` = 1 fair among jobs sample by sample, however many stages there are."""

    def __init__(self, jobs: Mapping[str, OfferedJob], budget: int, stages: int) -> None:
        self._jobs, self._budget, self._stages = jobs, budget, stages
        self._in_flight = Counter[str]()

    def next(self) -> Entry | None:
        packed = pack([job.flow for job in self._jobs.values()], self._budget, in_order=False, stages=self._stages)
        if packed is None:
            return None
        names = {row.job_id for row in packed.rows}
        self._in_flight.update(names)
        return Entry(packed.tokens, {name: self._jobs[name].batch for name in names})

    def retire(self, entry: Entry) -> None:
        for name in entry.batches:
            self._in_flight[name] -= 1
            if self._jobs[name].flow.complete and not self._in_flight[name]:
                self._jobs[name].leave()


@dataclass
class Through:
    """What went through: micro-batches and tokens that left, seconds, how long the last stage waited, and how many of these waits began
    while the rule kept all other work out.
    """

    micro_batches: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    stalls: int = 0

    def since(self, before: Through) -> Through:
        return Through(*(end - begin for end, begin in zip(astuple(self), astuple(before), strict=True)))


@dataclass
class _Stage:
    number: int
    most_open: int
    busy: bool = False
    open: int = 0
    forwards: deque[Entry] = field(default_factory=deque[Entry])
    backwards: deque[Entry] = field(default_factory=deque[Entry])


class Pipeline:
    """Of `stages`; `seconds_of` a micro-batch are those of all stages together, without the `overhead`."""

    def __init__(self, order: EntryOrder, seconds_of: Callable[[Entry], float], stages: int, overhead: StageOverhead = NO_OVERHEAD) -> None:
        self._order, self._seconds_of, self._stages, self._overhead = order, seconds_of, stages, overhead
        self._line = [_Stage(number, most_open(number, stages)) for number in range(stages)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ahead, self._kept_out = 0, False
        self._waits_since: float | None = None
        self.through = Through()

    def run(self, micro_batches: int, warm_up: int) -> Through:
        """Until so many have left, of which the first `warm_up` are not counted."""
        self._begin_all()
        while self.through.micro_batches < warm_up:
            self._turn()
        before = replace(self.through)
        while self.through.micro_batches < micro_batches:
            self._turn()
        return self.through.since(before)

    def _turn(self) -> None:
        assert self._events, "nothing is in flight, and the rule keeps all out"
        self.through.seconds, _, end = heapq.heappop(self._events)
        end()
        while self._events and self._events[0][0] == self.through.seconds:
            heapq.heappop(self._events)[2]()
        self._begin_all()

    def _begin_all(self) -> None:
        last = self._line[-1]
        if not last.busy and not last.backwards:
            self._announce()
        for stage in reversed(self._line):
            self._begin(stage)
            if stage is last and last.busy and self._overhead.host_ahead:
                self._announce()
        if not last.busy and self._waits_since is None:
            self._waits_since = self.through.seconds
            self.through.stalls += self._kept_out

    def _announce(self) -> None:
        """Before the last stage begins with the oldest, as many as there are stages."""
        self._kept_out = False
        while self._ahead < self._stages and not self._kept_out:
            if (entry := self._order.next()) is None:
                self._kept_out = True
            else:
                self._line[0].forwards.append(entry)
                self._ahead += 1

    def _begin(self, stage: _Stage) -> None:
        """One forward, one backward: a gradient that has come goes first."""
        if stage.busy:
            return
        if stage.backwards:
            entry, end = stage.backwards.popleft(), self._went_back
        elif stage.forwards and stage.open < stage.most_open:
            entry, end = stage.forwards.popleft(), self._went_forward
            stage.open += 1
            if stage is self._line[-1]:
                self._ahead -= 1
        else:
            return
        if stage is self._line[-1] and self._waits_since is not None:
            self.through.waited_seconds += self.through.seconds - self._waits_since
            self._waits_since = None
        stage.busy = True
        share = _FORWARD if end == self._went_forward else 1 - _FORWARD
        neighbours = (stage.number > 0) + (stage is not self._line[-1])
        self._after(
            self._seconds_of(entry) / self._stages * share + self._overhead.per_token * entry.tokens * neighbours,
            partial(end, stage, entry),
        )

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.through.seconds + seconds, next(self._numbers), do))

    def _went_forward(self, stage: _Stage, entry: Entry) -> None:
        stage.busy = False
        if stage is self._line[-1]:
            stage.backwards.append(entry)
        else:
            self._after(self._overhead.latency, partial(self._line[stage.number + 1].forwards.append, entry))

    def _went_back(self, stage: _Stage, entry: Entry) -> None:
        stage.busy, stage.open = False, stage.open - 1
        if stage.number:
            self._after(self._overhead.latency, partial(self._line[stage.number - 1].backwards.append, entry))
            return
        self.through.micro_batches += 1
        self.through.tokens += entry.tokens
        self._after(self._overhead.latency, partial(self._order.retire, entry))  # the last stage, which announces, is told
