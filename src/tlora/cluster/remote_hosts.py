"""The workers of other hosts, as a pool sees them: who may come, which GPUs come and go with them, and when one counts as lost.

Such a worker's end cannot be seen from here. It is proven by its last word, by an engine, or by the end of its lease; until then its jobs
have no other place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tlora.cluster.file_service import FileService
from tlora.cluster.hosts import Hosts, node_events
from tlora.cluster.kept_kind import KeptKind, kinds_of
from tlora.cluster.leased_process import DRIFT_SECONDS, LeasedProcess
from tlora.cluster.leases import Leases
from tlora.cluster.listeners import Peer
from tlora.cluster.remote_worker import RemoteWorker
from tlora.link.versions import unlike_tlora, unlike_torch
from tlora.protocol import Event, GpusLost, GpusUnheard
from tlora.worker_protocol import DesiredState, Hello, HostLabels

AWAY_SECONDS = 60.0  # for a worker that begins anew to come again


@dataclass(frozen=True, slots=True)
class ProvenEnd:
    """An engine says that the process `pid` of a host, or all of its processes (None), has ended, as `how` says."""

    host: str
    pid: int | None
    how: str


class RemoteHosts:
    """`events`, for the back end to take, say which GPUs have come and gone. Not for several threads."""

    def __init__(
        self, directory: Path, own: tuple[int, ...], lease_seconds: float, device: Callable[[], str], note: Callable[[str], None]
    ) -> None:
        """`directory`: the store's `workers/`; `own`: the GPUs of the controller's host; `device`: "cpu" if the cluster trains on CPUs."""
        self._directory, self._lease_seconds, self._device, self._note = directory, lease_seconds, device, note
        self.hosts, self._leases, self._began = Hosts(own), Leases(directory), time.monotonic()
        self._away: dict[tuple[int, ...], float] = {}  # GPUs whose worker begins anew, and until when it is waited for
        self._processes: dict[tuple[int, ...], dict[RemoteWorker, None]] = {}  # by the GPUs of which each can have any; none is lost
        self.spares: dict[str, RemoteWorker] = {}  # those of them that have no GPU yet, by incarnation, while their lines stand
        self._outlived: set[str] = set()  # incarnations that were lost by their leases
        self.kept_kind: KeptKind | None = None  # where all jobs stay on one
        self._leaving: set[str] = set()  # incarnations that came to save their jobs and end: their GPUs are not used
        self._lost: list[str] = []  # incarnations whose jobs are not free yet
        self._workers_of: dict[str, dict[RemoteWorker, None]] = {}  # host -> its workers that are not lost
        self._unheard: set[int] = set()  # GPUs on which nobody is heard
        self.files = FileService(directory.parent)
        self.events: list[Event] = []

    @property
    def withheld(self) -> set[str]:
        """Jobs that workers of an earlier controller may still hold, and no other may be given yet."""
        return self._leases.withheld

    @property
    def awaits_workers(self) -> bool:
        """Whether workers of an earlier controller have not come again."""
        return bool(self._leases.withheld)

    def numbers(self, hello: Hello, peer: Peer) -> tuple[int, ...]:
        """The numbers of the worker's GPUs in the cluster; of one of this host its own."""
        if not peer.is_remote or hello.host is None:
            return hello.gpus
        return tuple(gpu + self.hosts.first_number(hello.host) for gpu in hello.gpus)

    def why_not(self, hello: Hello, peer: Peer, known: RemoteWorker | None) -> str:
        """Why a worker of another host is refused at its Hello; "" if it is not. `known`: as it came before."""
        host = hello.host
        if host is None:
            return "it says nothing of its host"
        if hello.incarnation in self._outlived:
            return "its lease has ended, and its jobs have gone on elsewhere. Start it again"
        if known is not None and not known.files_by_line and not peer.shares_store:
            return f"it does not see {self._directory} any more, where it has begun. Mount it again, and start it again"
        return self.hosts.why_not(host, hello.gpus) or self._why_taken(host, hello.gpus)

    def _why_taken(self, host: HostLabels, gpus: tuple[int, ...]) -> str:
        """Why a process may not have these of the host's GPUs, or any of its agent's: workers that another command has started can have
        some. Two that have their own alone are the pool's to compare.
        """
        first = self.hosts.first_number(host)
        choice, there = ({gpu + first for gpu in some} for some in (host.any_of, host.any_of or gpus))
        for other in self._workers_of.get(host.name, ()):
            is_other_boot = other.connected and bool(choice) and other.host is not None and other.host.boot != host.boot
            if (set(other.choice) != choice or is_other_boot) and not there.isdisjoint(other.choice or other.gpus):
                return f"there is a worker of {other.display_name} already. End one of the two, or name their hosts apart with --host"
        return ""

    def why_unused(self, hello: Hello) -> str:
        """Why the worker of another host may not train here, though it may come to save its jobs; "" if it may."""
        on_cpu = self._device() == "cpu"
        if reason := unlike_tlora(hello.versions):
            return f"{reason}. Start it with the same version"
        if reason := unlike_torch(hello.versions):
            return f"{reason}. Install the same there"
        if hello.host is not None and any((device.kind == "cpu") != on_cpu for device in hello.host.devices):
            return f"has {hello.host.devices[0].kind}, and this cluster trains on {'CPUs' if on_cpu else 'GPUs'}"
        return self.kept_kind.why_not(hello.host) if hello.host is not None and self.kept_kind is not None else ""

    def take_on(self, gpus: tuple[int, ...], hello: Hello, host: HostLabels, peer: Peer, epoch: int) -> RemoteWorker:
        """A worker that has come; `gpus` are the cluster's numbers. One that may not train here is told to save its jobs and end."""
        process, number = LeasedProcess(host.name, peer.pid, self._lease_seconds), self.hosts.first_number(host)
        options = epoch, self._lease_seconds, host, number
        worker = RemoteWorker(gpus, hello.load, process, *options, files_by_line=not peer.shares_store)
        self.hosts.take_on(worker.choice or gpus)
        worker.address, worker.reached_at = host.address or peer.address, peer.reached_at
        worker.about_to_tell = lambda want: self._grant(hello.incarnation, want, worker)
        self._leases.arrive(hello.incarnation)
        if worker.files_by_line and hello.load is not None:
            self.files.grant(hello.incarnation, hello.load.base_model, {held.job_id: (held.attempt, None) for held in hello.jobs})
        self._away.pop(worker.choice or gpus, None)
        if reason := self.why_unused(hello):
            self._note(f"the worker of {worker.display_name} saves its jobs and ends: it {reason}")
            self._leaving.add(hello.incarnation)
            worker.stop()
        else:
            if self.kept_kind is not None:
                self.kept_kind.settle(kinds_of(host)[0])
            if not self._processes.get(worker.choice):
                self._note(f"a worker has come for {worker.display_name}")
                self.events += node_events(host, worker.choice or gpus)
            if worker.choice:
                self._count(worker, hello.incarnation)
            self._hear_of_ends(host)
        self._workers_of.setdefault(host.name, {})[worker] = None
        return worker

    def _count(self, worker: RemoteWorker, incarnation: str) -> None:
        """One more process that can have any of its host's GPUs, of which an agent keeps one for each: with more, those that are silent and
        hold no job are no more.
        """
        there = self._processes.setdefault(worker.choice, {})
        if not worker.gpus:
            if (before := self.spares.get(incarnation)) is not None:  # the end of its last line has not been heard yet
                self._forget(before)
            self.spares[incarnation] = worker
        for other in list(there) if len(there) >= len(worker.choice) else ():
            self.see_successor(other)
        there[worker] = None

    def _hear_of_ends(self, host: HostLabels) -> None:
        """What the agent of a host says of processes that it has started."""
        for worker in self._workers_of.get(host.name, ()):
            is_over = worker.host is not None and worker.host.process in host.ended
            if is_over and isinstance(worker.process, LeasedProcess):
                worker.process.prove_end("has ended, as its host's agent says")

    def take_spare(self, gpus: tuple[int, ...]) -> RemoteWorker | None:
        """A process of the host of `gpus` that waits for some: these are its own from now on. None if there is none, and while a worker of
        an earlier controller may come again that has them.
        """
        for incarnation, worker in self.spares.items() if not self.awaits_workers else ():
            if set(gpus) <= set(worker.choice) and worker.connected and worker.obeys:
                worker.gpus = gpus
                del self.spares[incarnation]
                return worker
        return None

    def _lose_spare(self, worker: RemoteWorker) -> None:
        """Its line has ended. It holds nothing, and comes again by itself or is started again."""
        if self.spares.get(worker.incarnation or "") is worker:
            del self.spares[worker.incarnation or ""]
            self._forget(worker)
            if not self._processes.get(worker.choice):
                self._lose_gpus(worker.choice, "nothing is heard of its host")

    def _forget(self, worker: RemoteWorker) -> None:
        """The process is no more."""
        for there in (self._workers_of.get(worker.host.name if worker.host is not None else ""), self._processes.get(worker.choice)):
            if there is not None:
                there.pop(worker, None)
        self.files.end(worker.incarnation or "")

    def _grant(self, incarnation: str, want: DesiredState, worker: RemoteWorker) -> None:
        self._leases.grant(incarnation, {join.job.name: join.attempt for join in want.jobs}, self._lease_seconds)
        if want.files_by_line:
            self.files.grant(incarnation, want.load.base_model, {join.job.name: (join.attempt, join) for join in want.jobs})
            self.files.let_read(incarnation, worker.reads)

    def lose(self, worker: RemoteWorker) -> None:
        """Its end is proven. Its GPUs go with it, unless it was stopped to begin anew. A cut line is no job's fault."""
        how = worker.process.how_it_ended()
        self._forget(worker)
        gpus, others = worker.choice or worker.gpus, self._processes.get(worker.choice)
        self._lost.append(worker.incarnation or "")
        if not worker.doomed:
            worker.doomed = True
            self._outlived.add(worker.incarnation or "")
            self._note(f"the worker of {worker.display_name} {how}")
        if worker.begins_anew or others:  # others of its host can have its GPUs
            self._away |= {} if others else {gpus: time.monotonic() + AWAY_SECONDS}
            self._hear_of_gpus(worker)
        elif worker.incarnation not in self._leaving:
            self._lose_gpus(gpus, how)
        self._leaving.discard(worker.incarnation or "")

    def see_line(self, worker: RemoteWorker) -> None:
        """Its connection has ended, or stands again."""
        if not (worker.gpus or worker.connected):
            self._lose_spare(worker)
        self._hear_of_gpus(worker)

    def _hear_of_gpus(self, worker: RemoteWorker) -> None:
        """Tell which GPUs of the worker's host nobody is heard on, and which are heard again: its own, and those of which it could have
        some, where none is heard that can.
        """
        if not isinstance(worker.process, LeasedProcess):
            return
        gpus, there = worker.choice or worker.gpus, self._processes.get(worker.choice, {}) if worker.choice else (worker,)
        silent = [each for each in there if self._is_missed(each)]
        heard = any(each.connected for each in there)
        are = {gpu for each in silent for gpu in (each.gpus if heard else gpus)}
        were = self._unheard.intersection(gpus)
        self._unheard.difference_update(were)
        self._unheard.update(are)
        most = f"{self._lease_seconds + DRIFT_SECONDS:g} s after its last word, when its lease has ended"
        why = f"nothing is heard of its host {worker.process.host}: unless it comes again, its jobs go on elsewhere {most}"
        for changed, said in ((are - were, why), (were - are, "")):
            self.events += [GpusUnheard(tuple(sorted(changed)), said)] if changed else []

    def _is_missed(self, worker: RemoteWorker) -> bool:
        """Whether it is not heard, and neither came only to end nor begins anew without a job."""
        is_gone = worker.is_over or worker.process.wait(0.0) or (worker.stopping and not worker.jobs)
        return not (worker.connected or is_gone or worker.incarnation in self._leaving)

    def _lose_gpus(self, gpus: tuple[int, ...], how: str) -> None:
        self.events.append(GpusLost(gpus, how))
        self._unheard.difference_update(gpus)

    def see_last_word(self, worker: RemoteWorker) -> None:
        """It has reported something: if that it writes nothing any more, that is proof."""
        if isinstance(worker.process, LeasedProcess) and worker.is_over:
            worker.process.prove_end("has ended by itself")

    def see_successor(self, worker: RemoteWorker) -> None:
        """Another has come for its GPUs. One whose line has ended and that holds no job writes nothing: its lease need not be awaited."""
        if isinstance(worker.process, LeasedProcess) and not (worker.connected or worker.jobs):
            worker.process.prove_end("has ended: another has come for its GPUs")

    def prove(self, end: ProvenEnd) -> None:
        """An engine's word. Of a whole host it is no proof for a worker whose line stands: it is repeated, and counts later."""
        for worker in self._workers_of.get(end.host, ()):
            process, is_meant = worker.process, end.pid is None and not worker.connected
            if isinstance(process, LeasedProcess) and (is_meant or process.pid == end.pid):
                process.prove_end(end.how)

    def watch(self, worker: RemoteWorker, silent_seconds: float) -> None:
        """Call now and then: its lease may have ended."""
        process = worker.process
        if isinstance(process, LeasedProcess) and process.has_outlived(silent_seconds):
            process.prove_end(f"was not heard for {silent_seconds:.0f} s, and its lease of {process.lease_seconds:g} s has ended")

    def look(self) -> None:
        """Call now and then: what was waited for may be late."""
        now = time.monotonic()
        if self._leases.withheld and now - self._began > self._leases.longest_seconds + DRIFT_SECONDS:
            names = ", ".join(self._leases.release_withheld())
            self._note(f"workers of other hosts have not come again, and their leases have ended: {names} may go on elsewhere")
        for gpus in [gpus for gpus, until in self._away.items() if now > until]:
            del self._away[gpus]
            self._lose_gpus(gpus, "its worker has not come again")

    def forget_released(self, heard: Iterable[RemoteWorker]) -> None:
        """The jobs that workers which were heard, or are lost, hold no longer are free, also for the next controller."""
        for worker in heard:
            if worker.host is not None and worker.incarnation is not None:
                held = {} if worker.is_over else {name: job.attempt for name, job in worker.jobs.items()}
                self._leases.keep(worker.incarnation, held)
                self.files.keep(worker.incarnation, held)
        for incarnation in self._lost:
            self._leases.keep(incarnation, ())
        self._lost.clear()
