"""What starts workers on other hosts, such as Ray, as a controller sees it: one verb, to which the whole wish is an argument.

An engine says which hosts there are, keeps an agent on each that is wanted, and says what has ended there. Its agents start
`tlora worker --connect`, and workers dial home: what they train is none of an engine's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tlora.message_codec import Codec, message


class EngineLostError(Exception):
    """The engine cannot be reached. Its workers are on their own: they keep their leases, save their jobs and end."""


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """How workers are started on every host. `token` lets them in over TCP. On `device` "cpu" each computes with one thread."""

    connect: str
    fingerprint: str
    token: str = field(repr=False)
    device: str


@dataclass(frozen=True, slots=True)
class EngineHost:
    """A live host with `places`: its GPUs, each of which gets a worker. `failure_domain` "": the host alone."""

    name: str
    places: int
    failure_domain: str = ""


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The process `pid` of a host has ended, as `how` says in words: it writes nothing any more."""

    pid: int
    how: str


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Of the agent on a host: workers that run there, and all that have ended under it lately."""

    host: str
    running: int
    ended: tuple[WorkerEnd, ...] = ()


@message
class HostsWanted:
    """Agents that shall be: `keep` gets one where there is none, `drain` has its workers save their jobs and end, and goes then. Hosts in
    neither are left as they are. `request`: so many hosts with `request_places` each shall come; None: no wish.
    `workers`: the pids on each host of those that are not known to have ended, which another agent there may have started.
    """

    order: WorkerOrder
    keep: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    request: int | None = None
    request_places: int = 1
    workers: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


@message
class HostsSeen:
    """All live hosts; a report of each that has an agent; and what went wrong, in words."""

    hosts: tuple[EngineHost, ...] = ()
    agents: tuple[AgentReport, ...] = ()
    problems: tuple[str, ...] = ()


ENGINE_MESSAGES: Codec[HostsWanted | HostsSeen] = Codec(HostsWanted | HostsSeen)


class HostEngine(Protocol):
    name: str  # for a person

    def sync(self, wanted: HostsWanted) -> HostsSeen:
        """Say what is wanted, and hear what there is. Starts what is missing without waiting for it. Raises EngineLostError."""
        ...

    def close(self) -> None:
        """Leave the engine. Its agents stay, unless the engine itself ends with this process."""
        ...
