"""Starts, adopts, hears, watches and ends the workers of a cluster for their controller.

The reconciler decides what each worker gets. A worker's connection may end and begin again; a worker is lost when its process has ended,
as the kernel says of one of this host. For those of other hosts see `remote_hosts.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tlora.cluster.credentials import WorkerTokens
from tlora.cluster.leased_process import LeasedProcess
from tlora.cluster.limits import Limits
from tlora.cluster.listeners import Peer, UnixListener
from tlora.cluster.refusals import Refusals
from tlora.cluster.remote_hosts import ProvenEnd, RemoteHosts
from tlora.cluster.remote_worker import RemoteWorker, gpu_names
from tlora.cluster.session import Arrived, Gone, Heard, Inbox, Session, Spoke
from tlora.cluster.worker_process import file_stem, launch, read_records, remove_record, supervise, write_record
from tlora.cluster.worker_signs import WorkerSigns
from tlora.link.address import forget
from tlora.link.flight import read_flight
from tlora.link.process_identity import ProcessIdentity
from tlora.link.reactor import Reactor
from tlora.link.supervisor import SupervisedProcess
from tlora.link.tls_port import Listener, accept_from
from tlora.link.versions import unlike_tlora
from tlora.worker_protocol import REFUSED, Alive, Hello, Load, Refusal, Report

_FOUND_SECONDS = 30.0  # for workers of an earlier controller to dial again
AGAIN_SECONDS = 60.0  # after which a worker is started again where the last one was refused
_WATCH_SECONDS = 1.0
_HEARD_AT_ONCE = 512  # messages, before what follows of them is decided and acknowledged
_GONE_SECONDS = 60.0  # for the kernel to end a killed process
_LAST_WORDS_SECONDS = 10.0  # to read what an ended process has sent before
_REMEDY_HERE = "The controller starts workers on its own GPUs as it needs them: end this one"
_REMEDY_ELSEWHERE = "End one of the two or, if it has another GPU of that number, start it with another --host"


@dataclass(frozen=True)
class _Ended:
    worker: RemoteWorker  # which counts as ended once all is heard that it sent before: when its connection has ended too


class WorkerPool:
    """`workers` by the first of their GPUs. One thread listens and tells workers what to do; `inbox` and `wake` are for the others too."""

    read_records = staticmethod(read_records)

    def __init__(
        self,
        directory: Path,
        epoch: int,
        loads: Callable[[str], Load],
        gpus: tuple[int, ...],
        limits: Limits,
        note: Callable[[str], None],
    ) -> None:
        """`directory` gets logs and records; the caller holds the store's lock. `loads`: what a worker of a base loads. Raises ConfigError
        where no socket can be made.
        """
        self._directory, self._epoch, self._loads = directory, epoch, loads
        self._gpus, self._limits, self._note = gpus, limits, note
        self._not_before: dict[tuple[int, ...], float] = {}  # when a worker is started again on GPUs whose last one was refused
        self._of_strangers, self._of_workers = Refusals(note), Refusals(note)  # apart: no flood of strangers hides a worker's refusal
        self.workers: dict[int, RemoteWorker] = {}
        self._reactor = Reactor()
        self.inbox: Inbox[Heard | _Ended | ProvenEnd | None] = Inbox(self._reactor)
        self._unheard: list[Heard | _Ended | ProvenEnd] = []  # what came before the first `listen`
        self._sessions: dict[Session, RemoteWorker] = {}
        self._incarnations: dict[str, RemoteWorker] = {}  # also of some that are no more, as in what follows
        self._worker_on: dict[int, RemoteWorker] = {}  # as they were recorded last
        self._tokens, self._let_in_by = WorkerTokens(directory), dict[Session, str]()  # ids of the tokens of those that came over TCP
        self._unacknowledged: set[RemoteWorker] = set()
        self._signs = WorkerSigns(limits)
        self._watched = self._asked_tokens = time.monotonic()
        self._ending: dict[RemoteWorker, float] = {}  # whose processes have ended, and until when their last words are waited for
        self.remote_hosts = RemoteHosts(directory, gpus, limits.host_lease, lambda: loads("").device, note)
        self._listeners: list[Listener[Peer]] = []
        self.listen_on(UnixListener(directory))
        self.address = self._listeners[0].address

    def listen_on(self, listener: Listener[Peer]) -> None:
        """Accept workers that come there too. Closed with this crew."""
        self._listeners.append(listener)
        take = partial(Session, inbox=self.inbox, serve_files=self.remote_hosts.files.serve, reactor=self._reactor)
        threading.Thread(target=accept_from, args=(listener, take), name="worker-pool", daemon=True).start()

    # -- beginning and end ---------------------------------------------------------------------------------------------

    def find(self, records: Mapping[tuple[int, ...], ProcessIdentity]) -> None:
        """Wait for the workers of an earlier controller to dial again, as long as some do; those that do not are killed. Their reports are
        kept for `listen`: the caller cannot act on them yet.
        """
        deadline, looked = time.monotonic() + _FOUND_SECONDS, 0.0
        waiting, withheld = dict(records), len(self.remote_hosts.withheld)
        while (waiting or self.remote_hosts.awaits_workers) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                heard = self.inbox.get(timeout=min(left, _WATCH_SECONDS))
                if isinstance(heard, Arrived) or (isinstance(heard, Spoke) and isinstance(heard.message, Alive)):
                    self._hear(heard)
                elif heard is not None:
                    self._unheard.append(heard)
                if isinstance(heard, Arrived):
                    before, withheld = (len(waiting), withheld), len(self.remote_hosts.withheld)
                    waiting = {gpus: who for gpus, who in waiting.items() if not self._on(gpus)}
                    if (len(waiting), withheld) != before:  # else it is no one that was waited for: it may come again and again
                        deadline = time.monotonic() + _FOUND_SECONDS
            if time.monotonic() - looked >= _WATCH_SECONDS:
                looked = time.monotonic()
                waiting = {gpus: who for gpus, who in waiting.items() if who.is_alive}
        others = [worker.process.identity for worker in self.workers.values()]  # with other GPUs than recorded, if their record is old
        for gpus, identity in [(gpus, identity) for gpus, identity in waiting.items() if identity not in others]:
            who = f"the worker of {gpu_names(gpus)} (process {identity.pid})"
            self._note(f"{who} has not dialled again within {_FOUND_SECONDS:g} s: it is killed")
            supervise(self._log(gpus), identity).kill()

    def start(self, gpus: tuple[int, ...], base_model: str) -> RemoteWorker | None:
        """Start a worker on those GPUs, of another host by `bind`. None if the system has no process or file to spare now, or soon after
        one was refused that was started here: the caller tries again later.
        """
        if not set(gpus) <= set(self._gpus):
            return self.bind(gpus)
        if time.monotonic() < self._not_before.get(gpus, 0.0):
            return None
        load = self._loads(base_model)
        try:
            process = launch(gpus, self._gpus, load.device, self.address, self._log(gpus))
        except OSError as error:
            self._note(f"no worker can be started for {gpu_names(gpus)} now: {error}")
            return None
        return self._take_on(gpus, load, process)

    def bind(self, gpus: tuple[int, ...]) -> RemoteWorker | None:
        """A process that waits on the host of those GPUs is their worker now. None where none waits, or workers come by themselves."""
        return self._watch_over(worker) if (worker := self.remote_hosts.take_spare(gpus)) is not None else None

    def record(self, worker: RemoteWorker, before: tuple[int, ...]) -> None:
        """Where this and the next controller find a worker that has other GPUs than `before`."""
        self._worker_on |= dict.fromkeys(worker.gpus, worker)
        write_record(self._directory, worker.gpus, worker.process.identity)
        remove_record(self._directory, before, worker.process.identity)

    def abandon(self) -> None:
        """Leave all workers as they are: they train on for their lease, and the next controller finds them."""
        for listener in self._listeners:
            listener.close()
        for arrived in [heard for heard in (*self.inbox.close(), *self._unheard) if isinstance(heard, Arrived)]:
            arrived.session.close()
        self._reactor.close()
        self.remote_hosts.files.close()
        for refusals in (self._of_strangers, self._of_workers):
            refusals.tell_rest()

    def close(self, stop_seconds: float) -> None:
        """Let all workers checkpoint their jobs and exit; kill those that take longer than the timeout."""
        for worker in (*self.workers.values(), *self.remote_hosts.spares.values()):
            worker.stop()
        deadline = time.monotonic() + stop_seconds
        self._hear_out(deadline)
        for worker in self.workers.values():
            if not worker.process.wait(0.0):
                worker.process.kill(_GONE_SECONDS)
        self.workers.clear()
        self.abandon()
        forget(self.address)

    def _hear_out(self, deadline: float) -> None:
        """Wait for the workers' last words and ends."""
        while not all(worker.process.wait(0.0) for worker in self.workers.values()) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._hear(self.inbox.get(timeout=min(left, _WATCH_SECONDS)))
            self._watch()
        self.remote_hosts.forget_released(self.workers.values())

    # -- what is heard -------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Make `listen` return."""
        self.inbox.put(None)

    def listen(self, timeout_seconds: float) -> list[tuple[RemoteWorker, Report | None]]:
        """The workers' reports since the last call, waiting at most `timeout_seconds` for one, or for a host that comes or goes. None: the
        worker has ended.
        """
        unheard, self._unheard = self._unheard, []
        found = [report for heard in unheard for report in self._hear(heard)]
        deadline, woken = time.monotonic() + (0.0 if found else timeout_seconds), False
        while True:
            left = deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                heard = self.inbox.get(timeout=max(0.0, min(left, _WATCH_SECONDS)))
                for count in itertools.count(1):  # what comes faster than it is heard must not keep all else from being done
                    woken |= heard is None
                    found += self._hear(heard)
                    if count >= _HEARD_AT_ONCE:
                        break
                    heard = self.inbox.get(timeout=0.0)
            self._watch()
            self._stop_revoked()
            if found or woken or self.remote_hosts.events or left <= 0:
                return found

    def acknowledge(self) -> None:
        """The consequences of all that `listen` has returned so far are recorded."""
        heard, self._unacknowledged = self._unacknowledged, set()
        self.remote_hosts.forget_released(heard)
        for worker in heard:
            worker.acknowledge()

    def _hear(self, heard: Heard | _Ended | ProvenEnd | None) -> list[tuple[RemoteWorker, Report | None]]:
        match heard:
            case Arrived():
                self._arrive(heard)
            case Spoke(session, message):
                worker = self._sessions.get(session)
                if worker is not None and not (worker.given_up and worker.host is not None):  # else its lease shall end
                    self._signs.hear(worker)
                    self._unacknowledged.add(worker)
                    if isinstance(message, Alive):
                        worker.hear_alive(message)
                    elif (report := worker.take(message)) is not None:
                        self.remote_hosts.see_last_word(worker)
                        return [(worker, report)]
            case Gone(session, reason):
                self._let_in_by.pop(session, None)
                worker = self._sessions.pop(session, None)
                if reason:
                    (self._of_strangers if worker is None else self._of_workers).see(reason)
                if worker is not None:
                    worker.detach(session.send)
                    self.remote_hosts.see_line(worker)
                if worker in self._ending:
                    self.inbox.put(_Ended(worker))
            case _Ended(worker):
                if worker.connected and time.monotonic() < self._ending.setdefault(worker, time.monotonic() + _LAST_WORDS_SECONDS):
                    return []
                self._ending.pop(worker, None)
                self._incarnations.pop(worker.incarnation or "", None)
                if self.workers.get(worker.gpu) is worker:
                    self._signs.forget(worker)
                    if worker.incarnation is None and worker.process.exit_status == REFUSED:  # none of its jobs is to blame
                        worker.doomed, self._not_before[worker.gpus] = True, time.monotonic() + AGAIN_SECONDS
                    if worker.host is not None:
                        self.remote_hosts.lose(worker)
                    elif worker.load is not None:
                        worker.in_flight = read_flight(Path(worker.load.output_dir), worker.process.pid)
                    return [(worker, None)]
            case ProvenEnd():
                self.remote_hosts.prove(heard)
            case None:
                pass
        return []

    def _arrive(self, arrived: Arrived) -> None:
        if not self._gpus:  # a controller without GPUs of its own: all workers are of hosts, also one that happens to be on this machine
            arrived = replace(arrived, peer=replace(arrived.peer, is_remote=True, identity=None))
        session, hello = arrived.session, arrived.hello
        gpus = self.remote_hosts.numbers(hello, arrived.peer)
        before = [worker for worker in self._on(gpus) if worker.incarnation != hello.incarnation]
        for worker in before:
            self.remote_hosts.see_successor(worker)
        if any(worker.is_over or worker.process.wait(0.0) for worker in before):
            self._unheard.append(arrived)  # it begins anew, and its end has not been handled yet
            return
        session.open()
        reason = self._why_not(arrived)
        if reason:
            self._of_workers.see(reason)
            session.send(Refusal(reason))
            return
        worker = self._same(hello) or (self.workers.get(gpus[0]) if gpus else None)
        if worker is None and arrived.peer.is_remote and hello.host is not None:
            worker = self.remote_hosts.take_on(gpus, hello, hello.host, arrived.peer, self._epoch)
            _ = self._watch_over(worker) if gpus else self.wake()  # a group may wait for it
        elif worker is None:
            worker = self._take_on(gpus, hello.load, supervise(self._log(gpus), arrived.peer.identity))
        self._sessions[session] = worker
        if arrived.peer.token is not None:
            self._let_in_by[session] = arrived.peer.token.id
        self._signs.hear(worker)
        self._incarnations[hello.incarnation] = worker
        self._unacknowledged.add(worker)
        worker.attach(hello, session.send)
        self.remote_hosts.see_line(worker)

    def _why_not(self, arrived: Arrived) -> str:
        """Why a worker that sends Hello is refused; "" if it is accepted."""
        hello, pid, token, remote = arrived.hello, arrived.peer.pid, arrived.peer.token, arrived.peer.is_remote
        who = f"the worker that is process {pid}" + (f" of host {hello.host.name}" if remote and hello.host is not None else "")
        comes_to_save = bool(hello.jobs or self._same(hello))
        if remote and not comes_to_save and (reason := self.remote_hosts.why_unused(hello)):
            return f"{who} {reason}"
        if not remote and (reason := unlike_tlora(hello.versions)):
            updated = "The program was updated while this process ran: stop it and start it again. Jobs wait"
            return f"{who} {reason}. {updated if self._started_here(pid) else 'Start it with the same version'}"
        if remote and (reason := self.remote_hosts.why_not(hello, arrived.peer, self._same(hello))):
            return f"{who}: {reason}"
        if not (remote or hello.gpus):
            return f"{who} is of the controller's host. {_REMEDY_HERE}"
        if not remote and (list(hello.gpus) != sorted(set(hello.gpus)) or not set(hello.gpus) <= set(self._gpus)):
            rule = f"and a worker of this host has some of {list(self._gpus)}, those of its controller, in ascending order"
            return f"{who} has GPUs {list(hello.gpus)}, {rule}. To use others, start the controller with them (--gpus)"
        if hello.epoch > self._epoch:
            return f"{who} has heard of a later controller (epoch {hello.epoch}) than this one ({self._epoch}). Stop this one"
        if token is not None and token.has_expired and not self._was_here(arrived):
            return f"{who} comes with {token.id}, which has expired, and was not here before. `tlora worker-token` makes a new one"
        gpus = self.remote_hosts.numbers(hello, arrived.peer)
        for worker in self._on(gpus):
            same = worker.gpus == gpus or worker.incarnation == hello.incarnation
            known = same and not worker.given_up and pid in (0, worker.process.pid)
            if not (known and (worker.incarnation or hello.incarnation) == hello.incarnation):
                what = f"comes for {gpu_names(hello.gpus)}, and there is a worker already that has {worker.display_name}"
                return f"{who} {what} (process {worker.process.pid}). {_REMEDY_ELSEWHERE if remote else _REMEDY_HERE}"
        return ""

    def _was_here(self, arrived: Arrived) -> bool:
        """Whether the worker was let in before."""
        recorded = read_records(self._directory).get(arrived.hello.gpus)
        return self._same(arrived.hello) is not None if arrived.peer.is_remote else recorded == arrived.peer.identity

    def _same(self, hello: Hello) -> RemoteWorker | None:
        """The worker that has said Hello before, which may have other GPUs by now."""
        worker = self._incarnations.get(hello.incarnation)
        return worker if worker is not None and self.workers.get(worker.gpu) is worker else None

    def _on(self, gpus: tuple[int, ...]) -> list[RemoteWorker]:
        """Workers that have some of these, each once."""
        on = [worker for gpu in gpus if (worker := self._worker_on.get(gpu)) is not None]
        return [worker for worker in dict.fromkeys(on) if self.workers.get(worker.gpu) is worker and worker.overlaps(gpus)]

    def _started_here(self, pid: int) -> bool:
        """Whether that process is a worker that has not been let in yet."""
        return any(worker.process.pid == pid and worker.incarnation is None for worker in self.workers.values())

    def _take_on(self, gpus: tuple[int, ...], load: Load | None, process: SupervisedProcess) -> RemoteWorker:
        write_record(self._directory, gpus, process.identity)
        return self._watch_over(RemoteWorker(gpus, load, process, self._epoch, self._limits.lease))

    def _watch_over(self, worker: RemoteWorker) -> RemoteWorker:
        self.workers[worker.gpu] = worker
        self._worker_on |= dict.fromkeys(worker.gpus, worker)
        self._signs.hear(worker)
        if isinstance(worker.process, LeasedProcess):
            worker.process.when_ended(partial(self.inbox.put, _Ended(worker)))
        else:
            threading.Thread(target=self._await_end, args=(worker,), name=f"worker-{worker.gpu}", daemon=True).start()
        return worker

    def _await_end(self, worker: RemoteWorker) -> None:
        worker.process.wait()
        self.inbox.put(_Ended(worker))

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Kill workers that are silent, or without progress, for too long; `listen` reports their ends."""
        now = time.monotonic()
        if now - self._watched < max(_WATCH_SECONDS / 4, 1e-4 * len(self.workers)):  # a look at 8,000 takes 12 ms
            return
        late, self._watched = now - self._watched > 5 * _WATCH_SECONDS, now
        for refusals in (self._of_strangers, self._of_workers):
            refusals.look()
        self.remote_hosts.look()
        for worker in [worker for worker, until in self._ending.items() if now >= until]:
            self.inbox.put(_Ended(worker))
        for worker in self.workers.values():
            self.remote_hosts.watch(worker, self._signs.silent_seconds(worker, now))
            if late:  # this process itself was stopped and could not look
                self._signs.hear(worker)
            if not worker.given_up and (reason := self._signs.why_lost(worker, now)):
                worker.given_up = reason
                how = "it is killed" if worker.host is None else "it is answered no more, until its lease has ended"
                self._note(f"the worker of {worker.display_name} {reason}: {how}")
                threading.Thread(target=worker.process.kill, args=(_GONE_SECONDS,), daemon=True).start()

    def _stop_revoked(self) -> None:
        """Stop workers whose token was revoked; at most once a second, as it reads a file."""
        if not self._let_in_by or time.monotonic() - self._asked_tokens < _WATCH_SECONDS:
            return
        self._asked_tokens = time.monotonic()
        revoked = self._tokens.revoked(self._let_in_by.values())
        for session, token_id in self._let_in_by.items() if revoked else ():
            worker = self._sessions[session]
            if not worker.stopping and token_id in revoked:
                self._note(f"the worker of {worker.display_name} saves its jobs and ends: {token_id} was revoked")
                worker.stop()

    def _log(self, gpus: tuple[int, ...]) -> Path:
        return self._directory / f"{file_stem(gpus)}.log"
