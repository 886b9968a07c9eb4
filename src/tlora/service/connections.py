"""Which connections a server keeps: how many, how many of one address, and how long a client may keep it waiting. Knows no sockets.

A connection waits while no request is answered on it: its first or next header has not come whole. It is stalled while a request is
answered and the client has to act: to send the body, or to read the answer. Where there are as many connections as may be, the one that
has waited longest gives way to a new one, then the one that has been stalled longest. A request that the server works on never does.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from tlora.service.config import ConnectionLimits

STALLED_SECONDS = 0.5  # from which on a client's silence in a request makes room for others
_LOG_SECONDS = 60.0  # between two lines about connections that were turned away


class Member(Protocol):
    """A connection, as its place is kept here. `address` is None where it is not limited by that."""

    @property
    def address(self) -> str | None: ...

    def unread_seconds(self, clock: float) -> float:
        """For how long its client has kept the server waiting by not reading what was sent (`Unread`); 0 where it has read all."""
        ...

    def unsent_seconds(self) -> float:
        """For how long the body of its request has been waited for, beyond what came is worth."""
        ...

    def time_out(self) -> None:
        """Close it: what it waits for has not come in time."""
        ...

    def drop(self) -> None:
        """Close it at once, whatever is on its way."""
        ...


class Body:
    """How long a request's client may still keep the server waiting for its body: waiting uses the time up, and bytes earn it back at
    `bytes_per_second`, up to `seconds`. So a slow line takes as long as it needs, and a byte a second gains nothing.
    """

    __slots__ = ("_bytes_per_second", "_seconds", "_since", "ended", "left")

    def __init__(self, ended: bool, seconds: float, bytes_per_second: float) -> None:
        """`ended`: the request has none."""
        self.ended, self.left = ended, seconds
        self._seconds, self._bytes_per_second = seconds, bytes_per_second
        self._since: float | None = None

    def wait(self) -> None:
        """The server waits for a part from now on."""
        self._since = time.monotonic()

    def take(self, count: int) -> None:
        """A part of so many bytes has come."""
        self.left = min(self._seconds, self._seconds - self.unsent_seconds() + count / self._bytes_per_second)
        self._since = None

    def unsent_seconds(self) -> float:
        """Of waiting that the bytes have not earned; 0 while the server does not wait."""
        return 0.0 if self._since is None else self._seconds - self.left + time.monotonic() - self._since


class Unread:
    """How long a client has kept the server waiting for room for its answer: waiting counts, and bytes that are read take it back at
    `bytes_per_second`. So a slow line is served for as long as it takes, and a byte a second gains nothing.
    """

    __slots__ = ("_at", "_bytes_per_second", "_read", "_seconds")

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._at = self._read = self._seconds = 0.0

    def look(self, clock: float, written: int, waiting: int) -> float:
        """`written` counts all bytes that were handed to the connection so far, `waiting` those that it has not got rid of."""
        read = written - waiting
        earned, passed = max(0.0, read - self._read) / self._bytes_per_second, clock - self._at
        self._seconds = max(0.0, self._seconds + passed - earned) if waiting else 0.0
        self._at, self._read = clock, read
        return self._seconds


@dataclass(slots=True)
class _Address:
    count: int = 0
    waiting: OrderedDict[Member, float] = field(default_factory=OrderedDict[Member, float])
    stalled: list[Member] = field(default_factory=list[Member])


class Connections:
    """All of a server, in one thread. `clock` counts the seconds in which its loop ran: one that stood still costs no client its time."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits, self.most = limits, limits.most
        self.clock = 0.0
        self.refused = self.dropped = self.timed_out = 0
        self._members: dict[Member, None] = {}
        self._waiting: OrderedDict[Member, float] = OrderedDict()  # until when each may; the longest waiting first
        self._stalled: list[Member] = []  # as of the last `pass_time`; the longest stalled last
        self._addresses: dict[str, _Address] = {}
        self._logged = -_LOG_SECONDS

    @property
    def count(self) -> int:
        return len(self._members)

    def admit(self, member: Member) -> bool:
        """Whether there is room, for which another may have had to go. It waits for its first header from now on."""
        place = None if member.address is None else self._addresses.get(member.address)
        if place is not None and place.count >= self.limits.per_address and not self._make_room(place.waiting, place.stalled):
            self._refuse(f"{place.count} connections of {member.address} are open, as many as one address may have")
            return False
        if len(self._members) >= self.most and not self._make_room(self._waiting, self._stalled):
            self._refuse(f"{len(self._members)} connections are open, as many as may be")
            return False
        self._members[member] = None
        if member.address is not None:
            self._addresses.setdefault(member.address, _Address()).count += 1
        self.wait(member, begun=True)
        return True

    def wait(self, member: Member, begun: bool) -> None:
        """For a header from now on, which has `begun`; where it has not, the connection is kept for a next request."""
        if member in self._members:
            self.serve(member)
            seconds = self.limits.header_seconds if begun else self.limits.keep_alive_seconds
            self._waiting[member] = until = self.clock + seconds
            if member.address is not None:
                self._addresses[member.address].waiting[member] = until

    def serve(self, member: Member) -> None:
        """Its header has come whole."""
        if self._waiting.pop(member, None) is not None and member.address is not None:
            del self._addresses[member.address].waiting[member]

    def leave(self, member: Member) -> None:
        """It is closed. May be said twice."""
        if member not in self._members:
            return
        self.serve(member)
        del self._members[member]
        if member.address is not None:
            place = self._addresses[member.address]
            place.count -= 1
            if not place.count:
                del self._addresses[member.address]

    def pass_time(self, seconds: float) -> None:
        """Close what has waited too long, and see what is stalled."""
        self.clock += seconds
        for member in [member for member, until in self._waiting.items() if until <= self.clock]:
            self.timed_out += 1
            self.serve(member)
            member.time_out()
        stalled: list[tuple[float, Member]] = []
        for member in list(self._members):
            unread = member.unread_seconds(self.clock)
            if unread >= self.limits.write_seconds:
                self.timed_out += 1
                self.leave(member)
                member.drop()
            elif (longest := max(unread, member.unsent_seconds())) >= STALLED_SECONDS:
                stalled.append((longest, member))
        self._stalled = [member for _, member in sorted(stalled, key=lambda pair: pair[0])]
        for place in self._addresses.values():
            place.stalled.clear()
        for member in self._stalled:
            if member.address is not None:
                self._addresses[member.address].stalled.append(member)

    def _make_room(self, waiting: OrderedDict[Member, float], stalled: list[Member]) -> bool:
        victim = next(iter(waiting), None)
        while victim is None and stalled:
            found = stalled.pop()
            if found in self._members and max(found.unread_seconds(self.clock), found.unsent_seconds()) >= STALLED_SECONDS:
                victim = found
        if victim is None:
            return False
        self.dropped += 1
        self.leave(victim)
        victim.drop()
        return True

    def _refuse(self, why: str) -> None:
        self.refused += 1
        now = time.monotonic()
        if now - self._logged >= _LOG_SECONDS:
            self._logged = now
            logging.getLogger(__name__).warning("%s, and each has a request that is answered: more are refused", why)


@lru_cache(maxsize=1024)  # asked for each request
def shared_address(host: str | None) -> str | None:
    """What the connections of one client have in common: the address, of IPv6 its /64. None for a unix socket's end."""
    found = _parse(host)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(found), 64), strict=False))
    return None if found is None else str(found)


def is_proxy(host: str | None, trusted_proxies: Sequence[str]) -> bool:
    """Whether the address is a trusted proxy's, behind which are many clients."""
    if "*" in trusted_proxies:
        return True
    found = _parse(host)
    return found is not None and any(found in ipaddress.ip_network(proxy, strict=False) for proxy in trusted_proxies)


def forwarders(trusted_proxies: Sequence[str]) -> list[str]:
    """`trusted_proxies` for uvicorn, which must trust the same ones: alone it takes "*" only by itself, and where the server listens on
    `::` it does not know a proxy that comes over IPv4.
    """
    if "*" in trusted_proxies:
        return ["*"]
    found = list(trusted_proxies)
    for proxy in trusted_proxies:
        network = ipaddress.ip_network(proxy)
        if network.version == 4:
            found.append(f"::ffff:{network.network_address}/{96 + network.prefixlen}")
    return found


def _parse(host: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found
