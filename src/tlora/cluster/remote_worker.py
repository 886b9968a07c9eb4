"""What a controller knows of one worker: what it has sent, what it has heard, and which reports are new. No sockets, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from tlora.job import JobSpec
from tlora.link.outbox import ReportInbox
from tlora.link.process_identity import ProcessIdentity
from tlora.protocol import JobGroup
from tlora.worker_protocol import (
    Ack,
    Alive,
    DesiredState,
    Ending,
    Envelope,
    Farewell,
    FromController,
    GpusChanged,
    Hello,
    HostLabels,
    Join,
    Joined,
    Lending,
    Listening,
    Load,
    Loaded,
    Report,
    Settled,
)

LEASE_SECONDS = 600.0
HOST_LEASE_SECONDS = 180.0
_NOTHING = Load("", "", "cpu", 0.0)
NUMBERS_PER_EPOCH = 10**9  # generations and attempts of a later controller are higher than those of an earlier one


class Process(Protocol):
    """`SupervisedProcess`."""

    @property
    def pid(self) -> int: ...
    @property
    def identity(self) -> ProcessIdentity | None: ...
    @property
    def is_stopped(self) -> bool: ...
    @property
    def exit_status(self) -> int | None: ...
    def wait(self, timeout_seconds: float | None = None) -> bool: ...
    def kill(self, timeout_seconds: float | None = None) -> None: ...
    def how_it_ended(self) -> str: ...


Send = Callable[[FromController], None]


@dataclass(frozen=True, slots=True)
class Held:
    """An attempt of a job that only this worker has, until it reports its end or ends itself. `steps`: when it was adopted."""

    attempt: int
    steps: int = 0


def gpu_names(gpus: tuple[int, ...], one: str = "GPU", several: str = "GPUs") -> str:
    """For a person: GPU 0, or GPUs 0, 1."""
    return f"{several if len(gpus) > 1 else one} {', '.join(map(str, gpus))}"


class RemoteWorker:
    """`gpus` are its own, of its host, in ascending order, with those that are about to be; `lent` are those of other hosts that work for
    it, whose workers come to what `listening` says. `lends_to`: the group for which its own work, under another worker. `jobs` are those
    that it holds. `loaded`, `doomed` (it ends by itself), `is_over` (it writes nothing any more), `fixed` (it can have no other GPUs) and
    `settled` (the last generation) are as it has said.

    `host` is None for one of the controller's own. Else it is leased, `first_number` is the cluster's number of that host's GPU 0, and over
    the line all GPUs have the host's numbers. `about_to_tell` is called with what it is about to be told to have.
    """

    def __init__(
        self,
        gpus: tuple[int, ...],
        load: Load | None,
        process: Process,
        epoch: int,
        lease_seconds: float = LEASE_SECONDS,
        host: HostLabels | None = None,
        first_number: int = 0,
        *,
        files_by_line: bool = False,
    ) -> None:
        """`load` is None for a worker that came by itself, until the controller has chosen what it loads."""
        self.gpus, self.load, self.process = gpus, load, process
        self.host, self.first_number = host, first_number
        self.about_to_tell: Callable[[DesiredState], object] = lambda _: None
        self.incarnation: str | None = None
        self.lent: tuple[int, ...] = ()
        self.listening: Listening | None = None
        self.lends_to = ""
        self.reads: tuple[Join, ...] = ()  # jobs whose data it may read, as it computes parts of them for another
        self.address = self.reached_at = ""  # of its host, for other hosts; and of the controller's, as it has come there
        self.loaded = self.stopping = self.begins_anew = self.doomed = self.is_over = self.fixed = False
        self.jobs: dict[str, Held] = {}
        self.found: JobGroup | None = None  # its group, as an earlier controller wanted it
        self.settled = 0
        self.expected: tuple[JobSpec, ...] = ()  # jobs that may come, until it has loaded its base
        self.residents: dict[str, int] = {}  # when it was settled last
        self.heartbeat: Alive | None = None
        self.given_up = ""  # why it was killed
        self.joined: set[str] = set()  # jobs that have taken part in its micro-batches
        self.in_flight: frozenset[str] = frozenset()  # jobs of its last micro-batch, once it has ended; empty if unknown
        generation, leased = epoch * NUMBERS_PER_EPOCH, host is not None
        self._want = DesiredState(
            epoch, generation, load or _NOTHING, lease_seconds=lease_seconds, leased=leased, files_by_line=files_by_line
        )
        self._inbox = ReportInbox()
        self._send: Send | None = None

    @property
    def gpu(self) -> int:
        """The first of its GPUs, by which it is known: no two workers have one in common. -1: it waits for some."""
        return self.gpus[0] if self.gpus else -1

    @property
    def choice(self) -> tuple[int, ...]:
        """GPUs of which it can have any, as other processes of its host can; none where it has its own alone."""
        return tuple([gpu + self.first_number for gpu in self.host.any_of]) if self.host is not None else ()

    @property
    def display_name(self) -> str:
        if self.host is None:
            return gpu_names(self.gpus)
        return f"{gpu_names(tuple(gpu - self.first_number for gpu in self.gpus or self.choice))} of host {self.host.name}"

    @property
    def all_gpus(self) -> tuple[int, ...]:
        """Also those that others lend it."""
        return tuple(sorted((*self.gpus, *self.lent)))

    def give_back(self) -> None:
        """It has no group: it is to have nothing, or, where others lend it GPUs, a group without jobs that lets these go. Where they hold
        stages of its base it ends.
        """
        group = self._want.group
        if self.is_cut and self.lent:
            self.stop(begins_anew=True)
        else:
            self.want(replace(group, gpus=self.gpus, job_ids=(), weights=()) if group is not None and self.lent else None, (), False)

    @property
    def is_cut(self) -> bool:
        """Whether it has its base in stages, each on a GPU."""
        return self.load is not None and self.load.stages > 0

    def can_hold(self, gpus: tuple[int, ...]) -> bool:
        """Whether its base lies on these, or will: stages stay where they are."""
        return not self.is_cut or (self.load is not None and self.load.stages == len(gpus) and set(self.all_gpus) <= set(gpus))

    def overlaps(self, gpus: tuple[int, ...]) -> bool:
        return not set(self.gpus).isdisjoint(gpus)

    @property
    def obeys(self) -> bool:
        """Whether messages to the worker still have an effect."""
        return not (self.stopping or self.doomed)

    @property
    def group_id(self) -> str:
        """The group that it was last told to run; "" for none."""
        return self._want.group.group_id if self._want.group is not None else ""

    @property
    def wanted_gpus(self) -> tuple[int, ...]:
        """Those that it was last told to have."""
        return self._want.group.gpus if self._want.group is not None else self.all_gpus

    def answers(self, report: GpusChanged) -> bool:
        """Whether the report is about the GPUs that it was last told to have."""
        return report.order >= self._want.gpus_order

    @property
    def is_settled(self) -> bool:
        """Whether the worker has reached the last desired state."""
        return self.settled == self._want.generation

    @property
    def files_by_line(self) -> bool:
        """Whether it does not see the store, so that files go over the line."""
        return self._want.files_by_line

    @property
    def connected(self) -> bool:
        return self._send is not None

    def give(self, load: Load) -> None:
        """Set what the worker loads; it has been told nothing yet."""
        assert self.load is None or not self._is_decided, f"{self.load} is loaded, and {load} cannot be"
        self.load = load
        self._want = replace(self._want, load=load)

    def want(self, group: JobGroup | None, jobs: tuple[Join, ...], alone: bool, listen: str = "") -> None:
        """Set the worker's desired state: this group and nothing else. `listen`: where those come that lend it GPUs."""
        before, order = self._want.group, self._want.gpus_order
        if group is not None and (before is None or before.gpus != group.gpus):
            order = self._want.generation + 1
        expected = () if self.loaded else self.expected
        lent = tuple(gpu for gpu in group.gpus if gpu in self.lent) if group is not None else ()
        what = {"group": group, "jobs": jobs, "alone": alone, "expected": expected, "lent": lent}
        wanted = replace(self._want, **what, gpus_order=order, listen=listen or self._want.listen)
        if wanted != self._want or not self._is_decided:
            self._tell(wanted)

    def lend(self, group_id: str, leader: RemoteWorker, gpus: Iterable[int], jobs: tuple[Join, ...]) -> None:
        """Have its GPUs work for the group's worker, which listens; it may read what these jobs read."""
        there, self.lends_to = leader.listening, group_id
        assert there is not None and self.load is not None, f"{leader.display_name} does not listen, or nothing is to be loaded"
        theirs = {gpu - leader.first_number: gpu - self.first_number for gpu in gpus}
        wanted = replace(self._want, lend=Lending(there.address, there.fingerprint, there.key, theirs))
        if wanted != self._want or jobs != self.reads:
            self.reads = jobs
            self._tell(wanted)

    def stop(self, *, begins_anew: bool = False) -> None:
        """Have the worker checkpoint its jobs and exit. With `begins_anew` its GPUs are wanted still: one of another host, which nobody
        starts again from here, comes again by itself, without a base.
        """
        if not self.stopping:
            self.stopping, self.begins_anew = True, begins_anew and self.host is not None and not self.doomed
            self._tell(replace(self._want, stop=True, begins_anew=self.begins_anew))

    def _tell(self, wanted: DesiredState) -> None:
        self.about_to_tell(wanted)
        self._want = replace(wanted, generation=self._want.generation + 1)
        self._say_want()

    def _say_want(self) -> None:
        """Until something is decided, an adopted worker trains on, and one without a load waits: both are answered."""
        self._say(self._want if self._is_decided else Ack(self._inbox.told))

    @property
    def _is_decided(self) -> bool:
        return self._want.generation > self._want.epoch * NUMBERS_PER_EPOCH

    def _say(self, message: FromController) -> None:
        if self._send is not None:
            if isinstance(message, DesiredState):
                lent = tuple(gpu - self.first_number for gpu in message.lent)
                gpus = tuple(gpu - self.first_number for gpu in self.gpus) if self.choice else ()
                message = replace(message, group=self._shifted(message.group, -1), lent=lent, gpus=gpus)
            self._send(message)

    def _shifted(self, group: JobGroup | None, sign: int) -> JobGroup | None:
        """The group with its host's numbers of GPUs (-1), or the cluster's (+1)."""
        if group is None or not self.first_number:
            return group
        return replace(group, gpus=tuple(gpu + sign * self.first_number for gpu in group.gpus))

    # -- what it says --------------------------------------------------------------------------------------------------

    def attach(self, hello: Hello, send: Send) -> None:
        """The worker has connected: send it what is wanted."""
        if self.incarnation is None:
            self.incarnation, self._inbox = hello.incarnation, ReportInbox(hello.last_seq)
            self.loaded, self.found = hello.loaded, self._shifted(hello.group, 1)
            self.joined |= {held.job_id for held in hello.jobs if held.resident}
            self.jobs |= {held.job_id: Held(held.attempt, held.steps) for held in hello.jobs}
        self._send = send
        self._say_want()

    def detach(self, send: Send) -> None:
        """The given connection has ended; another may exist by now."""
        if self._send == send:
            self._send = None

    def take(self, said: Envelope) -> Report | None:
        """The worker's report if it is new: each counts once, in order."""
        if not self._inbox.take(said):
            return None
        match said.report:
            case GpusChanged(gpus):
                return replace(said.report, gpus=tuple(gpu + self.first_number for gpu in gpus))
            case Loaded():
                self.loaded = True
            case Listening():
                self.listening = said.report
            case Ending():
                self.doomed = True
            case Farewell():
                self.doomed = self.is_over = True
            case Joined(job_id):
                self.joined.add(job_id)
            case Settled(generation, jobs) if generation == self._want.generation:
                self.settled, self.residents = generation, jobs
                wanted = {join.job.name for join in self._want.jobs}
                for name in self.jobs.keys() - jobs.keys() - wanted:  # wanted so briefly that the worker never heard of it
                    del self.jobs[name]
            case _:
                pass
        return said.report

    @property
    def suspects(self) -> list[str]:
        """The jobs that may have killed it: those that it computed, and those that were joining."""
        return [name for name in self.jobs if not self.in_flight or name in self.in_flight or name not in self.joined]

    def has_base(self, path: str) -> bool:
        """Whether it has loaded the base at `path`, or is to."""
        return self.load is not None and self.load.base_model == path

    def holds(self, job_id: str, attempt: int) -> bool:
        held = self.jobs.get(job_id)
        return held is not None and held.attempt == attempt

    def hear_alive(self, alive: Alive) -> None:
        """Answer, so that the worker knows that it is heard, and repeat what it has missed."""
        self.heartbeat = alive
        self._say(Ack(self._inbox.told, alive.said_seconds))
        if alive.generation != self._want.generation:
            self._say_want()

    def acknowledge(self) -> None:
        """The consequences of the reports taken so far are recorded."""
        if (seq := self._inbox.due()) is not None:
            self._say(Ack(seq))
