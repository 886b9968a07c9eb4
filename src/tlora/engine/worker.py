"""A worker's process: `python -m tlora.engine.worker --connect ADDRESS`, or `tlora worker`. It dials its controller and does as it wants.

What is wanted becomes commands in `worker_reconciler.py`, which `trainer.py` obeys; `link/dialer.py` holds the line. The controller may end
and come back: the worker trains on meanwhile, for its lease.
SIGTERM, a refusal and the end of the lease make it checkpoint its jobs and exit.
Model libraries are imported after the first answer: a worker says Hello in a second.
"""

from __future__ import annotations

import _thread
import argparse
import os
import queue
import signal
import threading
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tlora.cache_directory import open_caches
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.worker_reconciler import WorkerReconciler
from tlora.errors import ConfigError, RankError
from tlora.libraries import leave_unused_out, no_collection
from tlora.link.address import is_tcp
from tlora.link.dialer import Dialer
from tlora.link.endpoint import Endpoint, find_entrance
from tlora.link.log import leave, note, show_stacks_when_asked
from tlora.link.transfer import OpenStore, StoreClient
from tlora.link.versions import versions
from tlora.sharing.multicast import turn_multicast_off
from tlora.worker_protocol import PROTOCOL, REFUSED, Alive, DesiredState, Farewell, Hello, HostLabels, Lending, Load, Report

if TYPE_CHECKING:  # model libraries are imported when there is something to load
    from tlora.engine.ranks.spanning_jobs import RankContext
    from tlora.engine.remote_store import RemoteStore
    from tlora.engine.trainer import Trainer
    from tlora.job import JobSpec

EXPIRED = 75  # exit status of a worker whose lease has ended, as its controller was not heard: a temporary failure, by sysexits.h
FIRST_LEASE_SECONDS = 600.0  # until a Want says otherwise
_ANEW = -1  # instead of an exit status: serve once more
_AGAIN_SECONDS = 5.0  # before a worker begins anew whose leader is not reached
_STORE_SECONDS = 15.0  # at the end, for the jobs' last files to be sent
_DRAIN_SECONDS = 5.0  # at the end, for the last reports to be taken

SeeGpus = Callable[[tuple[int, ...]], None]  # this process uses those GPUs alone, or it raises ConfigError


class Worker:
    """The threads of a worker meet here: the one that trains, and the two of the line."""

    def __init__(self, gpus: tuple[int, ...], endpoint: Endpoint, host: HostLabels | None = None) -> None:
        """`host`: what is said of this one, for a worker that may be of another host than its controller."""
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of the trainer
        self.heartbeat = Heartbeat()
        self._incarnation, self._host, self._endpoint = uuid.uuid4().hex, host, endpoint
        self._worker_reconciler, self._lock = WorkerReconciler(gpus), threading.RLock()
        self._load: Load | None = None
        self._told = threading.Event()  # what to load, or to stop
        self._refusal = ""  # why the controller does not want this worker
        self.dialer = Dialer(endpoint, self, FIRST_LEASE_SECONDS)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Those of this host that it has; none before it is told what to load, where it may have any (`HostLabels.any_of`)."""
        return self._worker_reconciler.gpus

    def wait_for_load(self) -> Load | None:
        """What to load; None for a worker that is to stop before it has loaded anything."""
        self._told.wait()
        return self._load

    def open_store(self, load: Load) -> RemoteStore | None:
        """What stands for the store on this host, if it is not seen from here. `load`: as `wait_for_load` gave it."""
        want = self._worker_reconciler.want
        if want is None or not want.files_by_line:
            return None
        from tlora.engine.remote_store import RemoteStore

        client = StoreClient(self._endpoint, OpenStore(self._incarnation, PROTOCOL))
        return RemoteStore(client, self._incarnation, load, self.inbox, self.report, self.heartbeat)

    @property
    def lending(self) -> Lending | None:
        """To whom this worker lends its GPUs, if it has no group of its own."""
        want = self._worker_reconciler.want
        return want.lend if want is not None else None

    @property
    def expected(self) -> tuple[JobSpec, ...]:
        """The jobs that it shall have by now, and those that may come."""
        want = self._worker_reconciler.want
        return (*(join.job for join in want.jobs), *want.expected) if want is not None else ()

    def report(self, report: Report) -> None:
        """Of the trainer."""
        with self._lock:
            self._worker_reconciler.hear_report(report)
            self._pass_on()

    # -- what the line asks --------------------------------------------------------------------------------------------

    def hello(self, last_seq: int) -> Hello:
        with self._lock:
            worker_reconciler, want = self._worker_reconciler, self._worker_reconciler.want
            return Hello(
                self._incarnation,
                worker_reconciler.claimed,
                versions(),
                self._load,
                worker_reconciler.loaded,
                want.group if want is not None else None,
                tuple(worker_reconciler.held),
                want.epoch if want is not None else 0,
                want.generation if want is not None else 0,
                last_seq,
                self._host,
            )

    def alive(self) -> Alive:
        heartbeat, want = self.heartbeat, self._worker_reconciler.want
        return Alive(want.generation if want is not None else 0, heartbeat.phase, heartbeat.count, heartbeat.in_flight)

    def hear(self, want: DesiredState) -> bool:
        with self._lock:
            if not self._worker_reconciler.hear_want(want):
                return False
            if self._load is None and not want.stop:
                self._load = want.load
            self._pass_on()
            self._told.set()
            return True

    def end(self, reason: str) -> None:
        """All jobs are checkpointed, and the process ends."""
        with self._lock:
            if not self._worker_reconciler.stopping and (self._load is not None or not self._refusal):  # else all is said in the end
                note(f"this worker saves its jobs and ends: {reason}")
            self._worker_reconciler.stop(reason)
            self._pass_on()
            self._told.set()

    def expire(self) -> None:
        note("its lease has ended, and its jobs may begin elsewhere: this worker ends at once, with all its ranks")
        leave(EXPIRED)

    def be_refused(self, reason: str) -> None:
        with self._lock:
            if not self._worker_reconciler.stopping:
                self._refusal = f"refused by the controller: {reason}"
            self.end(self._refusal)

    @property
    def is_stopped(self) -> bool:
        """Whether its controller wants no more of it."""
        want = self._worker_reconciler.want
        return want is not None and want.stop

    @property
    def begins_anew(self) -> bool:
        """Whether its controller wants its GPUs still, and not what it has loaded."""
        want = self._worker_reconciler.want
        return want is not None and want.stop and want.begins_anew

    def check_refusal(self) -> None:
        """Raises ConfigError where that is what has ended it."""
        if self._refusal:
            raise ConfigError(self._refusal)

    def _pass_on(self) -> None:
        worker_reconciler = self._worker_reconciler
        for command in worker_reconciler.commands:
            self.inbox.put(command)
        worker_reconciler.commands.clear()
        if worker_reconciler.stopping:
            self.heartbeat.ending.set()
        reports, worker_reconciler.reports = worker_reconciler.reports, []
        if reports:
            self.dialer.put(reports, worker_reconciler.want.generation if worker_reconciler.want is not None else 0)


def serve(endpoint: Endpoint, gpus: tuple[int, ...], see_gpus: SeeGpus | None = None, host: HostLabels | None = None) -> int:
    """Work for the controller there until it sends a stop. Returns the exit status: 143 after SIGTERM, as a shell expects; `_ANEW` where
    the controller wants a worker here that has loaded nothing. Without `gpus` it gets some of its host's. `see_gpus` is called before
    torch is imported, if there is something to load on GPUs.

    Raises ConfigError if nothing listens there, or the controller cannot be trusted or refuses this worker; then all is saved.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # no library may wait for an answer
    open_caches(note)
    worker = Worker(gpus, endpoint, host)
    received: list[int] = []

    def on_signal(number: int, _: object) -> None:
        received.append(number)
        _thread.start_new_thread(worker.end, (signal.Signals(number).name,))  # what was interrupted may hold a lock

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, on_signal)
    try:
        worker.dialer.start()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"no cluster listens at {endpoint.address} ({why}). Start `tlora cluster` or `tlora serve` first") from None
    load, store, alone = worker.wait_for_load(), None, False
    if load is not None:
        worker.heartbeat.begin("loading")
        store = worker.open_store(load)
        load = store.open() if store is not None else load
    if load is not None:
        gpus = worker.gpus
        if see_gpus is not None and load.device != "cpu":
            see_gpus((*gpus, *(gpu for gpu in (host.any_of if host is not None else ()) if gpu not in gpus)))
        alone = _compute(worker, load, gpus, store)
    if store is not None:
        store.close(_STORE_SECONDS)
    worker.report(Farewell())
    worker.dialer.drain(_DRAIN_SECONDS)
    worker.check_refusal()
    worker.dialer.close()
    anew = worker.begins_anew or (alone and host is not None)
    if received or alone or anew:
        return 128 + received[0] if received else _ANEW if anew else 1
    if not worker.is_stopped:  # its lease has ended: it is worth another start, once the controller is there
        return EXPIRED
    note("this worker has saved its jobs and ends: its controller, whose log says why, has stopped it")
    return 0


def _compute(worker: Worker, load: Load, gpus: tuple[int, ...], store: RemoteStore | None) -> bool:
    """Work as the group's worker, or lend the GPUs to that of another host. Whether it has ended because it is left alone: then no job is
    to blame, and it may begin anew. Raises RankError.
    """
    from tlora.engine.ranks.lending import Lender
    from tlora.engine.ranks.lent_ranks import LostLenderError
    from tlora.engine.ranks.worker_group import WorkerGroup

    inbox, report = (worker.inbox, worker.report) if store is None else (store.inbox, store.report)
    if (lending := worker.lending) is not None:
        worker.heartbeat.begin("waiting")
        bring = store.bring if store is not None else lambda join: join
        try:
            reason = Lender(load, gpus, lending, bring).run(inbox)
        except ConfigError as error:
            reason = str(error)
            worker.heartbeat.ending.wait(_AGAIN_SECONDS)  # the leader may have ended meanwhile, or a network is mended
        return _end_alone(worker, reason)
    group = WorkerGroup(load, gpus, inbox, report, worker.heartbeat, lambda: worker.expected)
    show_stacks_when_asked(lambda: group.rank_pids)
    try:
        group.go_on()
    except LostLenderError as error:
        return _end_alone(worker, str(error))
    except RankError:  # what its ranks have said before says which job may have ended them
        worker.dialer.drain(_DRAIN_SECONDS)
        raise
    return False


def _end_alone(worker: Worker, reason: str) -> bool:
    """Whether it ends for that reason, and not as it was told to: a controller that hears of the end may say so too, which is too late."""
    is_told = worker.is_stopped
    worker.end(reason)
    return not is_told


def open_trainer(
    load: Load,
    inbox: queue.SimpleQueue[Any],
    send: Callable[[Any], None],
    heartbeat: Heartbeat,
    rank_context: RankContext | None = None,
    expected: Callable[[], Sequence[JobSpec]] = tuple,
) -> Trainer:
    """The model libraries, then the base. The arguments as of `Trainer`; `expected` is asked when the libraries are there."""
    with no_collection():
        from transformers.utils import logging

        from tlora.engine.trainer import Trainer
    set_device(load.device)
    logging.disable_progress_bar()  # the last line of the log is reported for a worker that has died
    logging.set_verbosity_error()
    return Trainer(load, inbox, send, heartbeat, rank_context, expected())


def set_device(device: str) -> None:
    """Compute there."""
    import torch

    if device == "cpu":
        torch.set_num_threads(1)  # bits depend on their number, and workers on one CPU are like GPUs of their own
    elif device != "cuda":
        torch.cuda.set_device(device)  # kernels are launched on the current device


def main() -> None:
    """Serve and exit."""
    parser = argparse.ArgumentParser(prog="python -m tlora.engine.worker", description=__doc__)
    parser.add_argument("--connect", required=True, help="unix:/path/to/controller.sock, or a cluster's output directory")
    parser.add_argument("--gpus", type=parse_gpus, default=(0,), help="the numbers of its GPUs in the cluster, with commas")
    arguments = parser.parse_args()
    run(arguments.connect, arguments.gpus)


def parse_gpus(text: str) -> tuple[int, ...]:
    """Numbers with commas, as the cluster counts its GPUs; in ascending order. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ConfigError(f"--gpus {text}: must be different numbers of GPUs, such as 0 or 0,1")
    return tuple(sorted(map(int, parts)))


def run(
    address: str,
    gpus: tuple[int, ...],
    fingerprint: str | None = None,
    token_file: Path | None = None,
    see_gpus: SeeGpus | None = None,
    label: Callable[[tuple[int, ...]], HostLabels] | None = None,
) -> None:
    """`serve`, with the options of `tlora worker`, and exit: without a look at threads that may wait for a controller, or open a job.
    `label` says of the GPUs what they are, and whether the worker can have any of them.
    """
    status = 1
    show_stacks_when_asked()
    leave_unused_out()
    turn_multicast_off()
    try:
        endpoint = find_entrance(address, fingerprint, token_file)
        host = label(gpus) if label is not None and is_tcp(endpoint.address) else None
        own = () if host is not None and host.any_of else gpus
        while (status := serve(endpoint, own, see_gpus, host)) == _ANEW:
            pass
    except ConfigError as error:
        note(f"error: {error}")
        status = REFUSED
    except KeyboardInterrupt:  # before it serves, where there is nothing to save
        status = 130
    except BaseException:
        note(traceback.format_exc())
    leave(status)


if __name__ == "__main__":
    main()
