"""One rank of a run: `python -m tlora.engine.ranks.rank`. It loads the base on its GPU and trains the jobs that it is given.

The address of the run's owner comes on stdin, its number in RANK. It is the session of a run in one process (`engine/session.py`), with
its jobs from the owner instead of from the file, and its messages sent to the owner instead of shown.
"""

from __future__ import annotations

import os
import platform
import queue
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora.libraries import begin_imports, end_imports

if __name__ == "__main__":
    begin_imports()

import torch
from torch.distributed import FileStore, PrefixStore, Store
from transformers.utils import logging

from tlora.batching.pack import MicroBatch
from tlora.engine.earlier_run import with_plans
from tlora.engine.messages import (
    Assign,
    BaseKnown,
    Broken,
    Bye,
    Ended,
    Found,
    Full,
    Go,
    Hello,
    Leave,
    LogLine,
    Mail,
    Open,
    Ready,
    Room,
    RowMade,
    Shown,
    Stop,
    Take,
    ToRank,
    Unfollow,
)
from tlora.engine.ranks.idle_wait import wait_for
from tlora.engine.ranks.link import RankLine, connect
from tlora.engine.ranks.spanning import SpanExchange, open_mailbox
from tlora.engine.run_monitor import RunMonitor
from tlora.engine.session import Assignment, Loaded, Session, launch_facts, load
from tlora.engine.watcher import RunProgress, Watcher
from tlora.errors import ModelError, TloraError
from tlora.kernels.device import mark_on
from tlora.link.log import leave, note, show_stacks_when_asked
from tlora.planning.memory import memory_limit
from tlora.planning.plan import describe_plan
from tlora.planning.threads import compute_with
from tlora.processes import die_with_parent
from tlora.sharing.peers import Peers, Sharing
from tlora.store.model_card import library_versions
from tlora.store.serving import ServingFiles
from tlora.version import __version__
from tlora.worker_protocol import Joined, Left

_LAST_SECONDS = 3.0  # for a rank whose owner has ended to save its jobs; what it computes meanwhile is lost

Inbox = queue.SimpleQueue[ToRank | None]


class RemoteGuard:
    """The base's fingerprint as the run's owner reports it: nothing is saved before its verdict.

    `hear` runs in the thread that reads commands: the main thread may be waiting for a save that waits for the verdict.
    """

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._problem, self._told = "", True
        self._known = threading.Event()

    def hear(self, command: ToRank | None) -> None:
        """Look at a command, or at the end of the connection (None)."""
        match command:
            case Go(facts, is_known):
                self._facts = dict(facts)
                if is_known:
                    self._known.set()
            case BaseKnown(facts, problem):
                self._facts, self._problem, self._told = dict(facts), problem, False
                self._known.set()
            case None if not self._known.is_set():
                self._problem = "the process that compares the base's files with those of the earlier run has ended"
                self._known.set()
            case _:
                pass

    def check(self) -> bool:
        reported, self._told = self._told, True
        return not reported and bool(self._facts)

    def wait_for_verdict(self) -> None:
        """Raises ModelError for a base that is not the one that the run began with."""
        self._known.wait()
        if self._problem:
            raise ModelError(self._problem)

    def facts(self) -> dict[str, Any]:
        return dict(self._facts)


class Rank:
    """Commands in `inbox`, reports over `line`."""

    def __init__(self, line: RankLine, inbox: Inbox, guard: RemoteGuard, number: int, count: int) -> None:
        """`number` of `count` ranks. `guard` hears each command before it enters `inbox`."""
        self._guard = guard
        self._line, self._inbox, self._number, self._count = line, inbox, number, count
        self._here: set[str] = set()  # jobs that wait or train here
        self._begun: set[str] = set()
        self._leaving: set[str] = set()
        self._changed = True  # a job has begun, ended or come to wait since the last Room or Full
        self._waited = 0.0  # seconds, for other ranks' parts of jobs
        self._store: Store | None = None  # by which ranks find each other

    def run(self) -> Bye:
        """From the first command to the last. Raises what concerns all jobs."""
        opened = self._next(Open)
        run, place = opened.run, torch.device(opened.device)
        self._line.send(Found(name_of(place), memory_limit(place, run.memory_limit)))
        watcher = Watcher(self._show, lambda line: self._line.send(LogLine(line)))
        monitor = RunMonitor(
            Path(run.output_dir),
            {job.name: job.r for job in run.jobs},
            watcher,
            opened.resume,
            started=opened.started,
            write_row=lambda row: self._line.send(RowMade(row)),
        )
        monitor.ended = opened.ended
        loaded = load(run, place, monitor, opened.resume, None, self._assigned)
        self._exchange = self._connect(loaded, place)
        run = with_plans(run, [job.spec for job in loaded.plan.jobs])
        run = run.model_copy(update={"cpu_threads": loaded.threads or run.cpu_threads})
        self._line.send(Ready(launch_facts(loaded, place), loaded.threads, loaded.plan.warnings, describe_plan(loaded.plan)))
        self._next(Go)
        die_with_parent(False)  # from now on there is something to save
        self._session = Session(run, loaded, monitor, ServingFiles(run.base_model), self._guard, exchange=self._exchange)
        self._driver = self._session.driver
        with compute_with(loaded.threads):
            try:
                self._driver.train(self._obey, self._look)
            finally:
                self._driver.close()
        self._tell_ended()
        monitor.close(self._driver)
        fetches = loaded.model.fetches
        waited = {"exchange_wait_seconds": self._waited} if self._spans else {}
        return Bye(waited | ({"fetch_wait_seconds": fetches.exposed_seconds} if fetches is not None else {}))

    def _next(self, kind: type[Any]) -> Any:
        """The next command, which is of this kind, or the end."""
        command = self._inbox.get()
        if command is None or isinstance(command, Stop):
            raise SystemExit(0)
        assert isinstance(command, kind), f"{command} came, and not {kind.__name__}"
        return command

    def _assigned(self) -> Assignment:
        assign: Assign = self._next(Assign)
        self._here = set(assign.jobs)
        self._store, self._spans = FileStore(assign.store, self._count) if assign.store else None, dict(assign.spans)
        sharing = self._meet("base") if assign.shared else None
        follows = frozenset(job for job, span in assign.spans.items() if self._number in span.peers)
        return Assignment(assign.run, assign.jobs, sharing, assign.spans, follows)

    def _meet(self, about: str) -> Sharing:
        assert self._store is not None, "no store was assigned"
        return Sharing(PrefixStore(about, self._store), self._number, self._count)

    def _connect(self, loaded: Loaded, place: torch.device) -> SpanExchange:
        """With the other ranks, where a job spans some. Raises RankError."""
        layouts = {job.spec.name: job.layout for job in loaded.plan.jobs if job.layout is not None}
        spans = {job: span for job, span in self._spans.items() if job in layouts}
        if not spans:
            return SpanExchange(self._number, {}, self._line.send)
        sizes = {job: layouts[job].numel for job in spans}
        mailbox = open_mailbox(spans, sizes, loaded.model.bank.sum_dtype, Peers(self._meet("spans")), place)
        return SpanExchange(self._number, spans, self._line.send, mailbox)

    # -- while it trains -----------------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """What has arrived since the last micro-batch; with nothing to do, wait for something. False: stop."""
        while True:
            while not self._inbox.empty():
                if not self._heard(self._inbox.get()):
                    return False
            busy = self._session.admit()
            self._tell_begun()
            if busy and not self._driver.group.idle:
                return True
            if not self._heard(self._wait()):
                return False

    def _wait(self) -> ToRank | None:
        """The next command. Until it comes, jobs whose files have been written are reported."""
        records = self._driver.records

        def look() -> bool:
            records.see_ended()
            self._tell_ended()
            return bool(records.ending)

        given = mark_on(self._driver.group.model.device)
        command, seconds = wait_for(self._inbox, given, look)
        if self._driver.group.runs:
            self._waited += seconds
        return command

    def _heard(self, command: ToRank | None) -> bool:
        """Obey one command. False: stop."""
        match command:
            case None | Stop():
                return False
            case Take(job):
                self._exchange.dissolve(job)  # also one that spanned other ranks
                self._here.add(job)
                self._session.take(job)
                self._changed = True
            case Leave(job) if job in self._session.waiting:
                self._changed = False  # room for a job that waits elsewhere is not what this makes
                self._session.let_go(job)
                self._exchange.dissolve(job)
                self._here.discard(job)
                self._line.send(Left(job, 0, None))
            case Leave(job):
                if job in self._driver.group.runs:
                    self._leaving.add(job)
                    self._session.let_go(job)
                    self._exchange.dissolve(job)
            case Unfollow(job):
                self._session.let_go(job)
                self._exchange.dissolve(job)
            case Mail(sender, note):
                self._exchange.hear(sender, note)
            case BaseKnown():
                pass  # the guard has heard it
            case _:
                raise AssertionError(f"{command} came to a rank that trains")
        return True

    def _look(self, packed: MicroBatch | None) -> None:
        self._session.look(packed)
        self._tell_ended()

    def _tell_begun(self) -> None:
        for job in (self._driver.group.runs.keys() & self._here) - self._begun:
            self._begun.add(job)
            self._changed = True
            self._line.send(Joined(job, self._driver.group.runs[job].progress.step))
        self._tell_ended()
        if self._changed:
            self._changed = False
            self._line.send(Full() if self._session.waiting else Room())

    def _tell_ended(self) -> None:
        """Jobs whose files are written. One that was let go has left, unless it came to its end in that very step."""
        results = self._driver.records.results
        for job in list(results):
            result = results.pop(job)
            self._here.discard(job)
            self._begun.discard(job)
            self._changed = True
            moved = job in self._leaving and result.status == "stopped"
            self._leaving.discard(job)
            self._line.send(Left(job, result.steps, None) if moved else Ended(result))

    def _show(self, progress: RunProgress) -> None:
        """Of its own jobs; of those that have their home elsewhere, only the rates."""
        rates = {job.name: job.tokens_per_second for job in progress.jobs if job.name not in self._here and job.tokens_per_second}
        self._line.send(Shown(replace(progress, jobs=tuple(job for job in progress.jobs if job.name in self._here)), rates))


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def hello(rank: int, run_digest: str = "") -> Hello:
    versions = library_versions() | {"tlora": __version__, "python": platform.python_version()}
    return Hello(rank, os.getpid(), platform.node(), versions, run_digest)


class _Orphaned:
    """What becomes of a rank whose owner has ended without a Stop. `hear` runs in the thread that reads commands, so that it is at once,
    also in the middle of a long step. Before it trains there is nothing to save; then it has a few seconds to save its jobs.
    """

    def __init__(self) -> None:
        self._writes = self._stops = False

    def hear(self, command: ToRank | None) -> None:
        self._writes |= isinstance(command, Go)
        self._stops |= isinstance(command, Stop)
        if command is None and not self._stops:
            if self._writes:
                time.sleep(_LAST_SECONDS)
            note("the process that owns this run has ended: so does this rank")
            os._exit(1)


def serve(address: str, rank: int, count: int, run_digest: str = "") -> int:
    """Train for the owner at `address` until it sends a stop. Returns the exit status."""
    inbox: Inbox = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(Stop()))  # a SimpleQueue may be entered again by a handler
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach a whole terminal; what follows is the owner's decision
        signal.signal(number, signal.SIG_IGN)
    guard, orphaned = RemoteGuard(), _Orphaned()

    def hear(command: ToRank | None) -> None:
        guard.hear(command)
        inbox.put(command)
        orphaned.hear(command)

    line = connect(address, hear)(hello(rank, run_digest))
    try:
        line.send(Rank(line, inbox, guard, rank, count).run())
    except SystemExit:
        return 0
    except BaseException as error:
        note(traceback.format_exc())
        if isinstance(error, TloraError):
            line.send(Broken(str(error), type(error).__name__))
        else:
            line.send(Broken(f"{type(error).__name__}: {error}"))
        return 1
    return 0


def main() -> None:
    """Serve and exit."""
    end_imports()
    show_stacks_when_asked()
    die_with_parent()
    address, rank = sys.stdin.read(), int(os.environ["RANK"])
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    status = 1
    try:
        status = serve(address, rank, int(os.environ["WORLD_SIZE"]))
    except BaseException:
        note(traceback.format_exc())
    leave(status)  # libraries' threads must not keep a rank alive whose owner waits for it


if __name__ == "__main__":
    main()
