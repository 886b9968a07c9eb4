"""Signs of life of workers: when each was heard last, how long it has not got further, and which is lost by that. It ends none."""

from __future__ import annotations

import time

from tlora.cluster.limits import Limits
from tlora.cluster.remote_worker import RemoteWorker


class WorkerSigns:
    """Of one thread. Times are those of the monotonic clock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._heard_at: dict[RemoteWorker, float] = {}  # also when it was started
        self._moved_at: dict[RemoteWorker, tuple[tuple[str, int], float]] = {}  # its phase and count, and since when

    def hear(self, worker: RemoteWorker) -> None:
        """It has just said something, or was started."""
        self._heard_at[worker] = time.monotonic()

    def forget(self, worker: RemoteWorker) -> None:
        self._heard_at.pop(worker, None)
        self._moved_at.pop(worker, None)

    def silent_seconds(self, worker: RemoteWorker, now: float) -> float:
        return now - self._heard_at.get(worker, now)

    def why_lost(self, worker: RemoteWorker, now: float) -> str:
        """What it exceeds of the limits; "" if nothing. Workers of other hosts are watched by their leases too."""
        limits, heartbeat = self._limits, worker.heartbeat
        silent = self.silent_seconds(worker, now)
        if silent > limits.stopped and worker.process.is_stopped:
            return f"was stopped for {silent:.0f} s"
        if worker.incarnation is None:
            return f"has said nothing for {silent:.0f} s since its start" if silent > limits.starting else ""
        if worker.host is None and silent > (limits.silent if heartbeat is None or heartbeat.phase == "training" else limits.loading):
            return f"has given no sign of life for {silent:.0f} s"
        if heartbeat is None or heartbeat.phase == "waiting":
            return ""
        place = (heartbeat.phase, heartbeat.count)
        if self._moved_at.get(worker, (None, 0.0))[0] != place:
            self._moved_at[worker] = (place, now)
        still = now - self._moved_at[worker][1]
        return f"has been {heartbeat.phase} for {still:.0f} s without getting further" if still > getattr(limits, heartbeat.phase) else ""
