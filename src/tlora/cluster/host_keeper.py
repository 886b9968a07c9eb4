"""Decides on which hosts of an engine workers run, from what the queue needs, and passes on what the engine proves about their ends.

A host is taken when jobs wait, and given back when it has been idle for a while. What is asked of the engine and what comes is noted.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tlora.cluster.engine_hosts import Demand, Prove
from tlora.cluster.host_engine import EngineHost, EngineLostError, HostEngine, HostsSeen, HostsWanted, WorkerOrder
from tlora.wording.numbers import quantity

SYNC_SECONDS = 1.0
_LEAVE_SECONDS = 30.0  # for agents to end
_LOOK_SECONDS = 0.5
_AGAIN_SECONDS = 10.0  # before a lost engine is tried again
_LATE_SECONDS = 600.0  # without a worker, after which a host is late: others have its GPUs, it starts slowly, or its workers are refused
_FORGIVEN_SECONDS = 3600.0  # after a late host was given back, it is as any other
_MOURNED_SECONDS = 600.0  # for which a dead host's workers are declared dead: one whose line stands is not, until that ends too


@dataclass(frozen=True, slots=True)
class HostLimits:
    """`min_hosts` always have workers. With `max_hosts` the engine is asked for as many hosts as the queue needs, up to that, and for as
    many more at most in place of late ones, which bring no worker; None: those that there are. A host is given back after `idle_seconds`
    without a job.
    """

    min_hosts: int = 0
    max_hosts: int | None = None
    idle_seconds: float = 300.0


@dataclass(frozen=True, slots=True)
class KnownHosts:
    """What is known of an engine's hosts. `kept` of the `live` ones have workers, `idle_since` is when those that are idle became so. What
    `tried` have is known. From those that are `late` no worker has come for long; of each, the GPUs that an agent of ours holds.
    """

    live: Mapping[str, EngineHost]
    kept: Collection[str] = ()
    idle_since: Mapping[str, float] = field(default_factory=dict[str, float])
    tried: Collection[str] = ()
    late: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class Choice:
    """Hosts that get workers, in the order in which they are taken; those that are given back; hosts that are asked for."""

    keep: tuple[str, ...]
    drain: tuple[str, ...]
    request: int | None


def choose_hosts(hosts: KnownHosts, demand: Demand, limits: HostLimits, now: float) -> Choice:
    """At `now`, on the clock of `hosts.idle_since`.

    What waits is covered by idle hosts first, then by further ones, the largest first, and by late ones last, which stay as long as others
    do not suffice. A job that all hosts together cannot hold counts for nothing. For one that lacks another kind of GPU each host is tried
    once, one after the other. An engine takes late hosts for some of those that it is asked for.
    """
    live, kept, late = hosts.live, hosts.kept, hosts.late
    keep = [name for name in kept if name in live and name not in late]
    most = len(live) if limits.max_hosts is None else limits.max_hosts
    waiting = _what_may_run(live, demand, limits)
    uncovered = waiting - sum(live[name].places for name in keep if name not in demand.busy)
    further = sorted(live.keys() - set(keep), key=lambda name: (name in late, name not in kept, -live[name].places, name))
    for name in further:
        if len(keep) >= most or (uncovered <= 0 and len(keep) >= limits.min_hosts):
            break
        keep.append(name)
        uncovered -= late.get(name, live[name].places)
    known = {*hosts.tried, *late}
    if demand.lacks_another and len(keep) < most and set(keep) <= known:
        keep += [name for name in further if name not in keep and name not in known][:1]
    drain = [name for name in kept if name in live and name not in keep]
    if not waiting:
        idle = [name for name in keep if name in hosts.idle_since and now - hosts.idle_since[name] >= limits.idle_seconds]
        drain += idle[: max(0, len(keep) - limits.min_hosts)]
    request = None if limits.max_hosts is None else _request(hosts, demand, waiting, limits.min_hosts, limits.max_hosts)
    return Choice(tuple(name for name in keep if name not in drain), tuple(drain), request)


def _request(hosts: KnownHosts, demand: Demand, waiting: int, least: int, most: int) -> int:
    """Hosts that the engine is asked for. Where those that are not late are fewer than are needed, late ones are none of `most`."""
    places = max((host.places for host in hosts.live.values()), default=1)
    needed = max(least, len(demand.busy) + math.ceil(waiting / places))
    late = len(hosts.late) if needed > len(demand.busy) else 0
    beside = 0 if len(hosts.live) - len(hosts.late) >= min(needed, most) else min(late, most)
    return min(most + beside, min(needed, most) + late)


def _what_may_run(live: Mapping[str, EngineHost], demand: Demand, limits: HostLimits) -> int:
    """GPUs that those jobs ask for which the hosts that may be taken have room for; all, while no host was seen."""
    places = [host.places for host in live.values()]
    most = sum(places) if limits.max_hosts is None else max(places, default=0) * limits.max_hosts
    return sum(gpus * count for gpus, count in demand.waiting.items() if not live or gpus <= most)


class HostKeeper:
    """A thread that syncs with an engine each second. `want` and `close` may be called from any thread."""

    def __init__(self, engine: HostEngine, order: WorkerOrder, limits: HostLimits, prove: Prove, note: Callable[[str], None]) -> None:
        """`prove` hears of ends, `note` gets lines for a person."""
        self._engine, self._order, self._limits, self._prove, self._note = engine, order, limits, prove, note
        self._demand = Demand()
        self._live: dict[str, EngineHost] = {}
        self._kept: list[str] = []
        self._idle_since: dict[str, float] = {}
        self._tried: set[str] = set()  # hosts of which all workers have come, or have had their time, or which were given back
        self._taken: dict[str, float] = {}  # hosts that are kept, and since when
        self._waited_for: dict[str, float] = {}  # hosts that are kept, and since when without a worker
        self._late: dict[str, float] = {}  # hosts from which no worker has come in time, and until when they were kept
        self._times_late: Counter[str] = Counter()  # since a worker came: each time a host gets twice the time, as it may start slowly
        self._running: list[str] = []  # hosts with an agent that starts workers
        self._leaving: tuple[str, ...] = ()  # hosts that are being given back
        self._spent: tuple[str, ...] = ()  # hosts whose agents start no worker any more: they were given back, and may be taken again
        self._dead: dict[str, float] = {}  # hosts, and when they were found missing
        self._proven: dict[str, set[tuple[int, str]]] = {}  # by host, of the ends that its agent told last
        self._requested: int | None = None
        self._lost = False
        self._drained: tuple[str, ...] = ()  # hosts whose agents are about to end
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def most_gpus(self) -> int:
        """That the hosts which may be taken have: all that are there, or `max_hosts` as wide as the widest of them. Late ones count only
        where all are late. 0: none was seen.
        """
        live, most = self._live, self._limits.max_hosts
        timely = [host.places for name, host in live.items() if name not in self._late]
        places = timely or [host.places for host in live.values()]
        if most is None:
            return sum(places)
        return max(places, default=0) * min(most, max(len(places), most - (len(live) - len(timely))))

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)
        self._thread.start()

    def want(self, demand: Demand) -> None:
        self._demand = demand

    def drain(self) -> None:
        """Choose no more. All workers save their jobs and end, and `close` ends their agents."""
        self._stop()
        self._drained = tuple(self._kept)
        self._end_agents()

    def close(self) -> None:
        """Leave the engine. Its agents stay, unless `drain` was called before: then they are waited for."""
        self._stop()
        deadline = time.monotonic() + _LEAVE_SECONDS
        while self._drained and time.monotonic() < deadline:
            self._end_agents()
            time.sleep(_LOOK_SECONDS if self._drained else 0.0)
        self._engine.close()

    def _stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _end_agents(self) -> None:
        """Those of `_drained`, which are those that are there still."""
        if not self._drained:
            return
        try:
            seen = self._engine.sync(HostsWanted(self._order, drain=self._drained, request=None if self._requested is None else 0))
        except EngineLostError as error:
            self._note(f"{self._engine.name}: agents on hosts could not be ended: {error}")
            self._drained = ()
        else:
            self._drained = tuple(report.host for report in seen.agents if report.host in self._drained)

    def _run(self) -> None:
        while not self._ended.wait(_AGAIN_SECONDS if self._lost else SYNC_SECONDS):
            self.step(time.monotonic())

    def step(self, now: float) -> None:
        """Choose, sync, and pass on what was seen."""
        demand = self._demand
        self._mark_idle(demand, now)
        self._judge(demand, now)
        late = {name: self._live[name].places if name in self._running else 0 for name in self._late}
        choice = choose_hosts(KnownHosts(self._live, self._kept, self._idle_since, self._tried, late), demand, self._limits, now)
        try:
            places = max((host.places for host in self._live.values()), default=1)
            drain = tuple(dict.fromkeys((*choice.drain, *self._spent)))
            seen = self._engine.sync(HostsWanted(self._order, choice.keep, drain, choice.request, places, dict(demand.workers)))
        except EngineLostError as error:
            self._lose(str(error))
            return
        if self._lost:
            self._lost = False
            self._note(f"{self._engine.name} is there again")
        self._tell(choice, seen)
        self._tried.update(choice.drain)
        self._running = [report.host for report in seen.agents if report.running]
        self._kept = [*choice.keep, *(name for name in self._running if name not in choice.keep)]
        self._spent = tuple(report.host for report in seen.agents if not report.running)
        self._see(seen, now)

    def _lose(self, why: str) -> None:
        """No end is proven by that: workers keep their leases, save their jobs and end."""
        if not self._lost:
            self._note(f"{self._engine.name} cannot be reached: {why}. Its workers save their jobs; it is tried again")
        self._lost = True
        self._live, self._kept, self._dead, self._spent = {}, [], {}, ()
        self._running.clear()
        self._times_late.clear()
        self._tried.clear()
        self._late.clear()
        self._idle_since.clear()

    def _judge(self, demand: Demand, now: float) -> None:
        """Which hosts have come with all of their GPUs that can be hoped for, and which bring none."""
        for name, since in list(self._late.items()):
            if demand.workers.get(name) or (name not in self._kept and now - since >= _FORGIVEN_SECONDS):
                del self._late[name]
                self._tried.discard(name)
        for name in [name for name in self._kept if name in self._live]:
            come = len(demand.workers.get(name, ()))
            if come >= self._live[name].places or now - self._taken.setdefault(name, now) >= _LATE_SECONDS:
                self._tried.add(name)
            if come or name in demand.busy:
                self._waited_for[name] = now
                self._times_late.pop(name, None)
            elif name in self._late:
                self._late[name] = now
            elif now - self._waited_for.setdefault(name, now) >= (patience := _LATE_SECONDS * 2 ** self._times_late[name]):
                self._late[name] = now
                self._times_late[name] += 1
                self._note(f"no worker of host {name} has come in {patience:g} s: other hosts are taken before it")
        for since in (self._taken, self._waited_for):
            for name in since.keys() - set(self._kept):
                del since[name]

    def _mark_idle(self, demand: Demand, now: float) -> None:
        for name in self._kept:
            if name in demand.busy:
                self._idle_since.pop(name, None)
            else:
                self._idle_since.setdefault(name, now)
        for name in self._idle_since.keys() - set(self._kept):
            del self._idle_since[name]

    def _tell(self, choice: Choice, seen: HostsSeen) -> None:
        if choice.request is not None and choice.request != self._requested:
            self._requested = choice.request
            self._note(f"{self._engine.name} was asked for {quantity(choice.request, 'host')}; there are {len(seen.hosts)}")
        for name in choice.drain:
            if name in self._kept and name not in self._late and name not in self._leaving:
                self._note(f"host {name} is given back: it was idle for {self._limits.idle_seconds:g} s")
        self._leaving = choice.drain
        for problem in seen.problems:
            self._note(f"{self._engine.name}: {problem}")

    def _see(self, seen: HostsSeen, now: float) -> None:
        live = {host.name: host for host in seen.hosts}
        for host in live.values():
            if host.name not in self._live:
                self._note(f"host {host.name} has come, with {quantity(host.places, 'GPU')}")
        for name in self._live.keys() - live.keys():
            self._note(f"host {name} is gone: {self._engine.name} has lost its node")
            self._dead[name] = now
        self._live = live
        self._tried &= live.keys()
        self._late = {name: since for name, since in self._late.items() if name in live}
        self._times_late = Counter({name: times for name, times in self._times_late.items() if name in live})
        for report in seen.agents:
            ends = {(end.pid, end.how) for end in report.ended if end.pid}
            for pid, how in sorted(ends - self._proven.get(report.host, set())):
                self._prove(report.host, pid, how)
            self._proven[report.host] = ends  # what is told no longer may come again: pids do
        for name, since in list(self._dead.items()):
            self._prove(name, None, f"is on a host that {self._engine.name} has lost")
            if now - since > _MOURNED_SECONDS:
                del self._dead[name]
                if name not in live:
                    self._proven.pop(name, None)
