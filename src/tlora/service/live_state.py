"""What runs where just now, as the controller sees it: read by requests, never stored. A restart makes it anew."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tlora.progress.cluster import Host
from tlora.protocol import JobGroup
from tlora.wording.numbers import duration_text, place_names

PAUSED = "paused"
_MOST_LOGGED = 100  # faults of the policy: each may name other jobs


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The cluster at one moment. `waiting` has the jobs in the order in which the policy will start them, each with the reason why it
    waits, and `places` their numbers there, from 1; `starts` are the Unix times at which they are expected to, where that is foreseen.
    `reading` are those whose data is being read, and how far that has come. `gpus` are those of all `hosts`, `kinds` what they are.
    `placements`: by group, why it is where it is, where that needs a word. `silent`: GPUs on which nobody is heard.
    """

    device: str = ""
    gpus: tuple[int, ...] = ()
    groups: tuple[JobGroup, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict[str, str])
    reading: Mapping[str, str] = field(default_factory=dict[str, str])
    places: Mapping[str, int] = field(default_factory=dict[str, int])
    starts: Mapping[str, float] = field(default_factory=dict[str, float])
    hosts: tuple[Host, ...] = ()
    kinds: Mapping[int, str] = field(default_factory=dict[int, str])
    placements: Mapping[str, str] = field(default_factory=dict[str, str])
    silent: frozenset[int] = frozenset()


class LiveState:
    """Safe in several threads. `gpus` is how many a job can get; 0 where hosts may bring any number. `fault` is why nothing can be
    scheduled; None while all is well.
    """

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._lock = threading.Lock()
        self._snapshot = ClusterSnapshot()
        self._steps: dict[str, int] = {}
        self.fault: str | None = "the controller has not started yet"
        self.draining = False
        self.counts: dict[str, int] = {}  # of faults and endings, for the metrics
        self._faults: set[str] = set()  # of the policy, that were logged

    @property
    def snapshot(self) -> ClusterSnapshot:
        return self._snapshot

    def show(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = snapshot

    def see_steps(self, job_id: str, steps: int) -> None:
        """Never back: a job that goes on from a checkpoint has been further."""
        with self._lock:
            self._steps[job_id] = max(steps, self._steps.get(job_id, 0))

    def forget(self, job_id: str) -> None:
        """The job has ended: the store has its last number."""
        with self._lock:
            self._steps.pop(job_id, None)

    def steps(self, job_id: str) -> int | None:
        return self._steps.get(job_id)

    def all_steps(self) -> dict[str, int]:
        with self._lock:
            return dict(self._steps)

    def count(self, what: str) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + 1

    def see_policy_fault(self, reason: str) -> None:
        """A decision was left out. Each reason is logged once: at the next event the policy may fail in the same way."""
        self.count("policy_fault")
        if reason not in self._faults and len(self._faults) < _MOST_LOGGED:
            self._faults.add(reason)
            log = logging.getLogger(__name__)
            log.warning("the policy could not decide (%s); what runs goes on, and it is asked again at the next event", reason)

    def waiting_for(self, job_id: str, status: str) -> str | None:
        """Why a job of this status does not train just now, in words."""
        if status == "preparing":
            return self._snapshot.reading.get(job_id, "its data is being read")
        if status == "paused":
            return PAUSED
        snapshot = self._snapshot
        if status == "running":  # in its group, where it is not let in yet, or cannot go on
            return snapshot.waiting.get(job_id)
        if status != "queued":
            return None
        starts = snapshot.starts.get(job_id)
        why = snapshot.waiting.get(job_id, f"a {place_names(snapshot.device)[0]}" if snapshot.device else "the server to begin")
        return why + ("" if starts is None else f"; expected to start {_in_about(starts - time.time())}")

    def queue_place(self, job_id: str, status: str) -> tuple[int | None, float | None]:
        """Of a job of this status: its place in the queue, 1 being the next, and the Unix time at which it is expected to start."""
        if status != "queued":
            return None, None
        return self._snapshot.places.get(job_id), self._snapshot.starts.get(job_id)


def _in_about(seconds: float) -> str:
    """A forecast, in words: it holds if no other job comes and steps take as long as they do."""
    if seconds <= 60:
        return "within a minute"
    minutes = math.ceil(seconds / 60)
    return f"in about {minutes} min" if minutes < 60 else f"in about {duration_text(60.0 * minutes)}"
