"""For how long a controller puts up with a worker's silence."""

from __future__ import annotations

from dataclasses import dataclass

from tlora.cluster.remote_worker import HOST_LEASE_SECONDS, LEASE_SECONDS


@dataclass(frozen=True, slots=True)
class Limits:
    """For how many seconds a worker may be silent: stopped, silent although it runs, and at one thing in a phase. `lease`: for how long it
    trains on when it hears nothing of a controller; `host_lease`: the same for a worker of another host, whose jobs wait for so long.
    """

    stopped: float = 20.0
    silent: float = 60.0
    starting: float = 600.0
    loading: float = 3600.0
    compiling: float = 3600.0
    training: float = 900.0
    lease: float = LEASE_SECONDS
    host_lease: float = HOST_LEASE_SECONDS
