"""The order of those that wait, as the policy will start them, for people to see: asked of the scheduler in its own thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tlora.protocol import Action, ChangeGroup, Event, GroupReady, StartGroup, StepsDone
from tlora.scheduler.forecast import Reasons, forecast
from tlora.scheduler.policies import LIVE_POLICIES, reservation, waiting_order
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.settings import Settings

_FRESH_SECONDS = 10.0  # so old, predicted times are worked out anew though nothing but steps has happened
_SHARE = 0.05  # of the scheduler's thread, over time
_BURST_SECONDS = 0.5  # that may be spent at once: then a look is left out until its share has come together again
_FORECAST_SECONDS = 1.0  # for one look: no job starts or ends meanwhile. What is not foreseen by then stays open
_MOST_SECONDS = 1.5  # with the reasons
_MOST_EXPLAINED = 100  # jobs at the head of the queue
_NEWEST = 0.3  # the weight of the last start in the mean of what one takes


class QueuePlace(NamedTuple):
    """`number` counts from 1; `reason` says why it does not run, where more is to be said than its place; `starts` is the Unix time at
    which it is expected to, None where that is too far away to be foreseen.
    """

    number: int
    reason: str
    starts: float | None


class WaitingQueue:
    """`show` gets the queue whenever it may have changed: each job that waits, with its place."""

    def __init__(self, policy: str, show: Callable[[Mapping[str, QueuePlace]], None], names: tuple[str, str]) -> None:
        """`names` of one place where jobs are trained, and of several, as `place_names` has them."""
        self._policy, self._show, self._names = policy, show, names
        self._changed = True
        self._looked_at = -math.inf
        self._left_seconds = _BURST_SECONDS
        self._clock_ahead = 0.0  # of Unix time over the cluster's
        self._asked_at: dict[str, float] = {}  # groups that were started and are not ready
        self._start_seconds = Settings().moves.cold_start_seconds

    def see(self, now: float, item: Event | Action) -> None:
        """What has happened, `now` on the cluster's clock."""
        self._clock_ahead = time.time() - now
        self._changed |= not isinstance(item, StepsDone)
        match item:
            case StartGroup(group):
                self._asked_at[group.group_id] = now
            case ChangeGroup(group):
                self._asked_at.pop(group.group_id, None)
            case GroupReady(group_id) if group_id in self._asked_at:
                self._start_seconds += _NEWEST * (now - self._asked_at.pop(group_id) - self._start_seconds)
            case _:
                pass

    def look(self, scheduler: Scheduler) -> None:
        """Once all that has happened has been decided on. A long queue is looked at less often: it costs a decision for each start."""
        began = time.monotonic()
        since = began - self._looked_at
        if not (self._changed or since >= _FRESH_SECONDS) or self._left_seconds + _SHARE * since <= 0:
            return
        self._changed, self._left_seconds = False, min(_BURST_SECONDS, self._left_seconds + _SHARE * since)
        try:
            self._show(self._places(scheduler, began))
        except Exception:  # a queue that cannot be shown must not end the training of all jobs
            logging.getLogger(__name__).exception("the queue's order is not known")
            self._show({})
        self._looked_at = time.monotonic()
        self._left_seconds -= self._looked_at - began

    def _places(self, scheduler: Scheduler, began: float) -> dict[str, QueuePlace]:
        state = scheduler.state
        shares = self._policy.startswith("residual_capacity")  # and no other policy knows tenants
        reasons = Reasons(state, shares, self._names, reservation(self._policy, state))
        order = waiting_order(self._policy, state)
        starts = forecast(
            state, LIVE_POLICIES[self._policy](), self._start_seconds, order, lambda: time.monotonic() - began > _FORECAST_SECONDS
        )
        levels = state.tenants.levels(state.now)
        least = min((levels.get(state.jobs[name].spec.tenant, 0) for name in state.pending), default=0)
        found: dict[str, QueuePlace] = {}
        for number, (name, at) in enumerate(starts, 1):
            job = state.jobs[name]
            why = [reasons.of(job)] if number <= _MOST_EXPLAINED and time.monotonic() - began <= _MOST_SECONDS else []
            if levels.get(job.spec.tenant, 0) > least and shares:
                why.append(f"tenants that have used less {self._names[0].split()[0]} time come first")
            found[name] = QueuePlace(number, "; ".join(filter(None, why)), at + self._clock_ahead if at < math.inf else None)
        for name, lack in state.parked.items():
            found[name] = QueuePlace(len(found) + 1, lack.reason, None)
        return found
