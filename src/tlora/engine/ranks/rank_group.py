"""The ranks of a run as its owner has them: started, spoken to, heard, and ended for good when they can no longer be counted on."""

from __future__ import annotations

import queue
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.interrupts import OF_THE_TERMINAL, blocked_in_children
from tlora.engine.messages import (
    BaseFacts,
    Broken,
    Bye,
    Fetched,
    FromRank,
    Hello,
    Published,
    Ready,
    Sending,
    Sent,
    StageBatch,
    StageChange,
    Stop,
    ToRank,
    addressees,
)
from tlora.engine.ranks.external import Launched, tell_ranks
from tlora.engine.ranks.lent_ranks import LentRank, LentRanks
from tlora.engine.ranks.link import Meeting
from tlora.errors import ConfigError, RankError
from tlora.link.process_identity import identify
from tlora.link.supervisor import LOOK_SECONDS, SupervisedProcess, start_process
from tlora.sharing.multicast import NO_MULTICAST
from tlora.worker_protocol import Listening, Memory

RANK = ("tlora.engine.ranks.rank",)
RANK_OF_WORKER = (*RANK, "worker")
_MOST_AHEAD = 64  # ranks that are started before the number of GPUs is known
_HELLO_SECONDS = 600.0  # for a rank's first word: its libraries may come over a slow network
_GONE_SECONDS = 60.0  # for a rank to exit after its last word


@dataclass(frozen=True)
class Lost:
    """The rank's process has ended, and will write nothing more. `broken`: what it said of that itself. `lent`: it was another host's."""

    reason: str
    broken: Broken | None = None
    lent: bool = False

    @property
    def by_another(self) -> bool:
        """It has ended because it could not reach another rank."""
        return self.broken is not None and self.broken.error == RankError.__name__


class RankGroup:
    """`count` ranks, of which those in `hellos` have connected, those in `memory` have reported their device, and those in `ready` have
    loaded the base of a run.
    """

    def __init__(self, count: int, own: Sequence[int] | None = None, program: tuple[str, ...] = RANK) -> None:
        """`own` are the ranks that `start` starts, by default all; the others come by themselves, started by a cluster's launcher.
        `program`: a module and its arguments. Ranks of a run have sessions and logs of their own, all others those of this process.
        """
        self._program = program
        self.count, self._own = count, list(range(count)) if own is None else list(own)
        self._meeting = Meeting()
        self._processes: dict[int, SupervisedProcess | LentRank] = {}
        self._lenders: LentRanks | None = None
        self.hellos: dict[int, Hello] = {}
        self.lost: dict[int, Lost] = {}
        self._broken: dict[int, Broken] = {}
        self._out: set[int] = set()  # said Bye, or were ended before they had anything to save
        self._dropped: set[int] = set()
        self.memory: dict[int, Memory] = {}
        self.ready: dict[int, Ready] = {}
        self.going: set[int] = set()  # they write
        self.spans: dict[str, ReplicaPlacement] = {}  # jobs that several ranks compute now: what these tell each other is passed on
        self._looked, self._began = 0.0, dict.fromkeys(range(count), time.monotonic())
        self.rendezvous: object = None  # kept open for the ranks of a launcher
        self._ahead: SupervisedProcess | None = None  # of the next rank that is added
        self._prepared = False

    @property
    def address(self) -> str:
        """Where ranks find this process."""
        return self._meeting.address

    @property
    def store(self) -> str:
        """A file by which ranks that share a base find each other."""
        return str(self._meeting.directory / "store")

    @property
    def launched_elsewhere(self) -> bool:
        """Whether a launcher watches the ranks too, and ends all when one is lost."""
        return len(self._own) < self.count

    def start(self) -> None:
        self._began = dict.fromkeys(range(self.count), time.monotonic())
        for rank in self._own:
            self._start(rank)

    def _start(self, rank: int) -> None:
        ahead, self._ahead, self._prepared = self._ahead, None, False
        if ahead is not None:
            ahead.give_stdin(f"{self._meeting.address}\n{rank}")
        if ahead is None or ahead.has_ended:
            ahead = self._start_process(rank, self._meeting.address)
        self._processes[rank] = ahead

    def _start_process(self, rank: int, stdin: str | None) -> SupervisedProcess:
        environment = {**NO_MULTICAST, "WORLD_SIZE": str(max(self.count, rank + 1)), "LOCAL_RANK": str(rank), "RANK": str(rank)}
        module, *arguments = self._program
        of_run = self._program == RANK
        log = self._meeting.directory / f"gpu{rank}.log" if of_run else open(2, "wb", 0, closefd=False)  # noqa: SIM115
        with blocked_in_children(() if of_run else OF_THE_TERMINAL):
            return start_process(module, log, arguments, environment, stdin, own_session=of_run)

    def prepare(self) -> None:
        """Have the process of the next rank that is added load its libraries by then. It waits, without a GPU, and ends with this process.
        Where the system has none to spare, that rank starts as others do.
        """
        if not self._prepared:
            self._prepared = True
            with suppress(OSError):
                self._ahead = self._start_process(self.count, None)

    def add(self) -> int:
        """Start one more rank, whose number is returned. Raises OSError where the system has no process or file to spare."""
        rank = self.count
        self._start(rank)
        self.count += 1
        self._own.append(rank)
        self._began[rank] = time.monotonic()
        return rank

    def let_lend(self, address: str) -> Listening:
        """Let workers of other hosts lend their GPUs, at an address of this host. Raises OSError."""
        if self._lenders is None:
            self._lenders = LentRanks(address, self._meeting.directory, lambda rank, said: self._meeting.inbox.put((rank, said)))
        return self._lenders.listening

    def add_lent(self, gpu: int) -> int:
        """One more rank, on a GPU of another host, which begins when its lender has come. Returns its number."""
        assert self._lenders is not None, f"GPU {gpu} is another host's, and nobody can lend it"
        rank = self.count
        self.count += 1
        self._began[rank] = time.monotonic()
        self._processes[rank] = self._meeting.lines[rank] = self._lenders.add(rank, gpu)
        return rank

    def is_lent(self, rank: int) -> bool:
        return isinstance(self._processes.get(rank), LentRank)

    def release_lenders(self, wanted: Collection[int]) -> None:
        """Of other GPUs than these, once their ranks have ended."""
        if self._lenders is not None:
            self._lenders.release(set(wanted))

    def end(self, rank: int) -> None:
        """It saves what it has and ends, which is reported by its `Bye`."""
        self.send(rank, Stop())

    def drop(self, rank: int) -> None:
        """Kill a rank that has nothing to save. Nothing more is heard of it."""
        self._out.add(rank)
        self._dropped.add(rank)
        self._processes[rank].kill()

    @property
    def lives_here(self) -> bool:
        """Whether a rank of this host has not ended. Others have nothing to save."""
        return any(not self.is_lent(rank) for rank in self.living)

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(self.count) if rank not in self.lost and rank not in self._out]

    def send(self, rank: int, command: ToRank) -> None:
        self._meeting.send(rank, command)

    def send_all(self, command: ToRank) -> None:
        for rank in self.living:
            self.send(rank, command)

    def hand(self, rank: int, facts: BaseFacts, lock: int) -> None:
        """With `facts` a copy of the open file whose lock keeps other runs out of the run's directory: from now on the rank may write."""
        self.going.add(rank)
        self._meeting.send_file(rank, facts, lock)

    def wake(self) -> None:
        """`listen` returns."""
        self._meeting.inbox.put(None)

    def listen(self, timeout_seconds: float) -> list[tuple[int, FromRank | Lost]]:
        """What ranks have said since the last call; waits for it so long at most."""
        heard: list[tuple[int, FromRank | Lost]] = []
        try:
            item = self._meeting.inbox.get(timeout=timeout_seconds)
            while True:
                if item is not None:
                    heard += self._heard(*item)
                item = self._meeting.inbox.get_nowait()
        except queue.Empty:
            pass
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            for rank in self.living:
                process = self._processes.get(rank)
                if (reason := process.why_lost() if process is not None else "") or (reason := self._why_silent(rank)):
                    heard += self._lose(rank, reason)
        return heard

    def _why_silent(self, rank: int) -> str:
        """Why a rank that has not said Hello is not waited for any longer; "" while it is."""
        process = self._processes.get(rank)
        if isinstance(process, LentRank) and process.line is None:  # its lender is still on its way, or fetches the base
            self._began[rank] = time.monotonic()
        if rank in self.hellos or time.monotonic() - self._began[rank] <= _HELLO_SECONDS:
            return ""
        return f"has said nothing for {_HELLO_SECONDS:g} s since its start"

    def _heard(self, rank: int, report: FromRank | Sending | None) -> list[tuple[int, FromRank | Lost]]:
        if rank in self.lost or rank in self._dropped:  # its jobs are elsewhere
            return []
        if isinstance(report, Sending):
            if report.written.to in self.living:
                self._meeting.send(report.written.to, report)
            return []
        match report:
            case None:
                return [] if rank in self._out else self._lose(rank, "")
            case Hello():
                self.hellos[rank] = report
                if rank not in self._processes:
                    self._processes[rank] = SupervisedProcess(identify(report.pid))
            case Broken():
                self._broken[rank] = report
                return []
            case Memory():
                self.memory[rank] = report
            case Ready():
                self.ready[rank] = report
            case Bye():
                self._out.add(rank)
            case Published(job) | Fetched(job) | Sent(job):
                for to in addressees(report, self.spans[job]) if job in self.spans else ():
                    self.send(to, report)
                return []
            case StageBatch() | StageChange():
                for to in self.living:
                    if to != rank:
                        self.send(to, report)
                return []
            case _:
                pass
        return [(rank, report)]

    def _lose(self, rank: int, reason: str) -> list[tuple[int, FromRank | Lost]]:
        """Its connection or its process has ended, or it hangs."""
        process = self._processes.get(rank)
        if process is None:  # a launcher's, which never came
            self.lost[rank] = Lost(reason)
            return [(rank, self.lost[rank])]
        if not reason:
            process.wait(_GONE_SECONDS if rank in self._broken and not self.is_lent(rank) else 1.0)  # it is about to exit
            reason = process.how_it_ended()
        process.kill()
        if rank not in self.hellos and self._meeting.problem:
            reason = f"{reason}; {self._meeting.problem}"
        broken = self._broken.get(rank)
        self.lost[rank] = Lost(broken.reason if broken is not None else reason, broken, self.is_lent(rank))
        return [(rank, self.lost[rank])]

    def stop(self, first: int = 0) -> None:
        """Ranks from `first` on save their jobs and end; those that have nothing to save end at once."""
        for rank in [each for each in self.living if each >= first]:
            if rank in self.going:
                self.send(rank, Stop())
                continue
            self._out.add(rank)
            if rank in self._processes:
                self._processes[rank].kill()

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """May be called twice. Ranks of this host that are still there save their jobs and end, and are waited for."""
        if self._ahead is not None:
            self._ahead.kill()
            self._ahead.give_stdin("")
            self._ahead = None
        self.stop()
        self._meeting.end_lines()
        for rank, process in sorted(self._processes.items(), key=lambda item: self.is_lent(item[0])):
            if self.is_lent(rank) or not process.wait(_GONE_SECONDS):  # a lent one writes nothing
                process.kill()
        if self._lenders is not None:
            self._lenders.close()
        self._meeting.close(keep_logs=bool(self.lost))


@contextmanager
def start_ranks(gpus: str | None, launch: Launched | None = None) -> Iterator[RankGroup | None]:
    """The ranks of `--gpus`, started before this process has loaded its libraries, or those of a launcher. None where nothing says how
    many.

    Raises ConfigError where the two disagree.
    """
    text = (gpus or "").strip()
    count = int(text) if text.isdecimal() else len([part for part in text.split(",") if part.strip()]) if "," in text else 0
    if launch is not None:
        if count not in (0, launch.count):
            raise ConfigError(f"--gpus {text}, and {launch.count} ranks are launched. Leave --gpus out, or launch {count}")
        rank_group = RankGroup(launch.count, own=[0])
        rank_group.rendezvous = tell_ranks(rank_group.address, launch)
    elif 1 < count <= _MOST_AHEAD:
        rank_group = RankGroup(count)
    else:
        yield None
        return
    rank_group.start()
    try:
        yield rank_group
    finally:
        rank_group.close()
