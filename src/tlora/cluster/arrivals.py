"""A list of what users will ask, and when, as one client of the local back end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tlora.cluster.local import LocalBackend
from tlora.cluster.reconciler import LocalJob
from tlora.errors import ConfigError
from tlora.protocol import JobCancelled, JobHeld, JobReleased, JobSubmitted, Request

Arrival = tuple[float, JobSubmitted | Request]


def submit_all(backend: LocalBackend, jobs: Mapping[str, LocalJob], arrivals: Iterable[Arrival]) -> None:
    """Ask for all `arrivals`, each with its time on the back end's clock, and seal the back end. Raises ConfigError for one of them."""
    for seconds, event in sorted(arrivals, key=lambda arrival: arrival[0]):
        match event:
            case JobSubmitted(name):
                if name not in jobs:
                    raise ConfigError(f"unknown job {name!r}. Give its spec too")
                backend.submit(event, jobs[name], seconds)
            case JobCancelled(name):
                backend.cancel(name, seconds)
            case JobHeld(name):
                backend.hold(name, seconds)
            case JobReleased(name):
                backend.release(name, seconds)
    backend.seal()
