"""A process that is one rank: `python -m tlora.engine.ranks.rank [worker]`. It loads the base on its GPU and trains what it is told to.

The address of who leads it comes on stdin, its number in RANK. As a rank of a run it is the session of a run in one process
(`engine/session.py`), as one of a worker it is the trainer of a worker with one GPU (`engine/trainer.py`): commands come from the process
that leads it, and what it has to say goes there.
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

from tlora.engine.earlier_run import with_plans
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.interrupts import OF_THE_TERMINAL
from tlora.engine.launch_facts import launch_facts
from tlora.engine.messages import (
    Assign,
    BaseFacts,
    Broken,
    Bye,
    Enter,
    Hello,
    LogLine,
    Open,
    Ready,
    RowMade,
    Sending,
    Shown,
    Stop,
    ToRank,
    Written,
)
from tlora.engine.ranks.devices import name_of, training_flops
from tlora.engine.ranks.early_stage import EarlyStage, meet_last_stage
from tlora.engine.ranks.last_stage import StagePipeline, meet_early_stages
from tlora.engine.ranks.link import RankLine, connect
from tlora.engine.ranks.spanning import SpanExchange, open_mailbox
from tlora.engine.ranks.spanning_jobs import RankContext
from tlora.engine.ranks.stage_links import StageLinks
from tlora.engine.ranks.worker_stages import open_early_stage
from tlora.engine.run_monitor import RunMonitor
from tlora.engine.session import Assignment, Loaded, Session, load
from tlora.engine.watcher import RunProgress, Watcher
from tlora.engine.worker import open_trainer, set_device
from tlora.errors import ModelError, TloraError
from tlora.link.flight import flight_name
from tlora.link.log import leave, note, show_stacks_when_asked
from tlora.planning.memory import memory_limit
from tlora.planning.plan import describe_plan
from tlora.planning.threads import compute_with
from tlora.processes import die_with_parent
from tlora.shape.stages import LayerRange
from tlora.sharing.peers import BASE_LOADED, STAGES_CONNECTED, Peers, Sharing
from tlora.sharing.relayed_memory import Relay
from tlora.store.model_card import library_versions
from tlora.store.serving import ServingFiles
from tlora.supermodel.cpu_dtype import slow_dtypes
from tlora.supermodel.supermodel import SuperModel
from tlora.version import __version__
from tlora.worker_protocol import Alive, Memory

OF_WORKER = "worker"
_BEAT_SECONDS = 1.0
_LAST_SECONDS = 3.0  # for a rank whose owner has ended to save its jobs; what it computes meanwhile is lost

Inbox = queue.SimpleQueue[Any]


class RemoteGuard:
    """The base's fingerprint as the run's owner reports it: nothing is saved before its verdict.

    `hear` runs in the thread that reads commands: the main thread may be waiting for a save that waits for the verdict.
    """

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._problem, self._told, self._begun = "", True, False
        self._known = threading.Event()

    def hear(self, command: ToRank | None) -> None:
        """Look at a command, or at the end of the connection (None)."""
        match command:
            case BaseFacts(facts, is_known, problem):
                self._told, self._begun = not self._begun, True  # the first says nothing that base.json does not have
                self._facts, self._problem = dict(facts), problem
                if is_known:
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


class _EarlyStageAssigned(Exception):  # noqa: N818  (no error: it ends the load of a session)
    """The rank computes a stage before the last one, and has no jobs."""

    def __init__(self, assign: Assign) -> None:
        super().__init__()
        self.assign = assign


class RankOfRun:
    """Rank `number` of `count`. `hear` is called in the thread that reads commands, `train` takes them from `inbox`."""

    def __init__(self, inbox: Inbox, number: int, count: int) -> None:
        self._inbox, self._number, self._count = inbox, number, count
        self._guard, self._orphaned = RemoteGuard(), _Orphaned()
        self._assigned_jobs = frozenset[str]()
        self._session: Session | None = None
        self._store: Store | None = None  # by which ranks find each other
        self._links: StageLinks | None = None  # with the stages before
        self._stages: tuple[LayerRange, ...] = ()
        self._through_host = False  # hidden states between stages

    def hear(self, command: ToRank | Sending | None) -> None:
        assert not isinstance(command, Sending), "the ranks of a run are of one host"
        self._guard.hear(command)
        self._inbox.put(command)
        self._orphaned.hear(command)

    def train(self, line: RankLine) -> Bye:
        """From the first command to the last. Raises what concerns all jobs."""
        self._line = line
        opened = self._next(Open)
        run, place = opened.run, torch.device(opened.device)
        reads = run.links != "host" and reads_peers(place)
        limit = memory_limit(place, run.memory_limit)
        self._line.send(Memory((limit,), name_of(place), reads, training_flops(place)))
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
        try:
            loaded = load(run, place, monitor, opened.resume, None, self._assigned)
        except _EarlyStageAssigned as assigned:
            return self._train_early_stage(assigned.assign, place)
        exchange = self._connect(loaded, place)
        if self._stages:
            self._links = meet_early_stages(Peers(self._meet("stages", STAGES_CONNECTED)), loaded, place, self._through_host)
        run = with_plans(run, [job.spec for job in loaded.plan.jobs])
        run = run.model_copy(update={"cpu_threads": loaded.threads or run.cpu_threads})
        self._line.send(Ready(launch_facts(loaded, place), loaded.threads, loaded.plan.warnings, describe_plan(loaded.plan)))
        self._next(BaseFacts)
        die_with_parent(False)  # from now on there is something to save
        pipeline = None
        if self._links is not None:  # not before the other stages have the word to begin, as orders follow
            pipeline = StagePipeline(loaded.model, self._links, self._stages, self._line.send)
        serving = ServingFiles(run.base_model)
        self._session = session = Session(
            run, loaded, monitor, serving, self._guard, self._inbox, self._line.send, exchange=exchange, pipeline=pipeline
        )
        with compute_with(loaded.threads):
            try:
                session.driver.train(self._inbox, session)
            finally:
                session.driver.close()
        session.tell_ended()
        monitor.close(session.driver)
        fetches = loaded.model.fetches
        waited = {"exchange_wait_seconds": session.driver.waited_seconds} if self._spans else {}
        waited |= {"stage_wait_seconds": self._links.waited_seconds} if self._links is not None else {}
        return Bye(waited | ({"fetch_wait_seconds": fetches.exposed_seconds} if fetches is not None else {}))

    def _next(self, kind: type[Any]) -> Any:
        """The next command, which is of this kind, or the end."""
        command = self._inbox.get()
        if command is None or isinstance(command, Stop):
            raise SystemExit(0)
        assert isinstance(command, kind), f"{command} came, and not {kind.__name__}"
        return command

    def _train_early_stage(self, assign: Assign, place: torch.device) -> Bye:
        """Compute a stage before the last, as that one orders."""
        self._find_others(assign)
        run = assign.run
        if place.type == "cuda" and place.index is not None:
            torch.cuda.set_device(place)
        layers = assign.stages[self._number]
        model = SuperModel.from_pretrained(run.base_model, run.dtype, str(place), run.deterministic, run.base_precision, layers)
        links, threads = meet_last_stage(Peers(self._meet("stages", STAGES_CONNECTED)), model, self._through_host)
        facts = {"device": name_of(place), "token_budget": links.sizes.tokens, "recomputed_layers": 0, "recomputed_by_tokens": []}
        self._line.send(Ready(facts, threads, (), f"layers {layers.first} to {layers.stop - 1} of {layers.count}"))
        self._next(BaseFacts)
        with compute_with(threads):
            EarlyStage(model, links, self._inbox).run()
        return Bye({"stage_wait_seconds": links.waited_seconds})

    def _find_others(self, assign: Assign) -> None:
        self._store, self._spans = FileStore(assign.store, self._count) if assign.store else None, dict(assign.spans)
        self._through_host = assign.run.links == "host"

    def _assigned(self) -> Assignment:
        assign: Assign = self._next(Assign)
        if assign.stages and self._number < self._count - 1:
            raise _EarlyStageAssigned(assign)
        self._assigned_jobs, self._stages = assign.jobs, assign.stages
        self._find_others(assign)
        sharing = self._meet("base", BASE_LOADED) if assign.shared else None
        peer_jobs = frozenset(job for job, span in assign.spans.items() if self._number in span.peers)
        return Assignment(assign.run, assign.jobs, sharing, assign.spans, peer_jobs, assign.stages, assign.kept_out, self._number)

    def _meet(self, about: str, occasion: str) -> Sharing:
        assert self._store is not None, "no store was assigned"
        return Sharing(PrefixStore(about, self._store), self._number, self._count, occasion=occasion)

    def _connect(self, loaded: Loaded, place: torch.device) -> SpanExchange:
        """With the other ranks, where a job spans some. Raises RankError."""
        layouts = {job.spec.name: job.layout for job in loaded.plan.jobs if job.layout is not None}
        spans = {job: span for job, span in self._spans.items() if job in layouts}
        if not spans:
            return SpanExchange(self._number, {}, self._line.send)
        sizes, peers = {job: layouts[job].numel for job in spans}, Peers(self._meet("spans", "the ranks that jobs span were connected"))
        mailbox = open_mailbox(spans, sizes, loaded.model.bank.sum_dtype, peers, place, range(self._count))
        clock = None if loaded.model.deterministic else time.monotonic
        return SpanExchange(self._number, spans, self._line.send, mailbox, clock)

    def _show(self, progress: RunProgress) -> None:
        """Of its own jobs; of those that are led elsewhere, only the rates."""
        here = self._session.here if self._session is not None else self._assigned_jobs
        rates = {job.name: job.tokens_per_second for job in progress.jobs if job.name not in here and job.tokens_per_second}
        self._line.send(Shown(replace(progress, jobs=tuple(job for job in progress.jobs if job.name in here)), rates))


class RankOfWorker:
    """The same of a worker."""

    def __init__(self, inbox: Inbox, number: int) -> None:
        self._inbox, self._number = inbox, number
        self._heartbeat = Heartbeat("loading")
        self._line: RankLine | None = None
        self._relay = Relay(number, self._send_bytes)

    def hear(self, command: ToRank | Sending | None) -> None:
        if command is None:  # what it would write now, its successor may be reading
            os._exit(1)
        if isinstance(command, Sending):
            self._relay.take(command.written.number, command.written.sender, command.written.start, command.content)
            return
        if isinstance(command, Stop):
            self._heartbeat.ending.set()
        self._inbox.put(command)

    def train(self, line: RankLine) -> Bye:
        entered = self._inbox.get()
        assert isinstance(entered, Enter), entered
        threading.Thread(target=self._beat, args=(line,), name="heartbeat", daemon=True).start()
        flight, self._line = flight_name(entered.worker_pid, self._number), line
        together, stages = entered.together, entered.stages
        rank_context = RankContext(self._number, together, entered.store, flight, self._relay, stages, entered.apart, entered.slow_dtypes)
        load = replace(entered.load, device=entered.device)
        if stages and self._number != stages[-1]:
            set_device(load.device)
            stage = open_early_stage(load, self._inbox, line.send, rank_context, entered.expected)
            self._heartbeat.begin("waiting")  # for the last stage, whose heartbeat says what goes on
            stage.run()
            return Bye()
        open_trainer(load, self._inbox, line.send, self._heartbeat, rank_context, lambda: entered.expected).go_on()
        return Bye()

    def _send_bytes(self, number: int, to: int, start: int, content: memoryview) -> None:
        assert self._line is not None, "nothing spans hosts before the base is loaded"
        self._line.send(Sending(Written(number, self._number, to, start, len(content)), content))

    def _beat(self, line: RankLine) -> None:
        heartbeat, last_beat = self._heartbeat, None
        while True:
            beat = Alive(0, heartbeat.phase, heartbeat.count, heartbeat.in_flight)
            if beat != last_beat:
                line.send(beat)
            last_beat = beat
            time.sleep(_BEAT_SECONDS)


def reads_peers(device: torch.device) -> bool:
    """Whether `device` reads the memory of all other GPUs that this process sees."""
    if device.type != "cuda":
        return True
    own = torch.cuda.current_device() if device.index is None else device.index
    return all(torch.cuda.can_device_access_peer(own, other) for other in range(torch.cuda.device_count()) if other != own)


def hello(rank: int, run_digest: str = "") -> Hello:
    versions = library_versions() | {"tlora": __version__, "python": platform.python_version()}
    return Hello(rank, os.getpid(), platform.node(), versions, run_digest, slow_dtypes())


class _Orphaned:
    """What becomes of a rank whose owner has ended without a Stop. `hear` runs in the thread that reads commands, so that it is at once,
    also in the middle of a long step. Before it trains there is nothing to save; then it has a few seconds to save its jobs.
    """

    def __init__(self) -> None:
        self._writes = self._stops = False

    def hear(self, command: ToRank | None) -> None:
        self._writes |= isinstance(command, BaseFacts)
        self._stops |= isinstance(command, Stop)
        if command is None and not self._stops:
            if self._writes:
                time.sleep(_LAST_SECONDS)
            note("the process that owns this run has ended: so does this rank")
            os._exit(1)


def ignore_signals(*numbers: signal.Signals) -> None:
    """They reach a whole terminal, or all processes of a service: what follows from them is decided by who leads."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def serve(address: str, number: int, count: int, run_digest: str = "", *, of_worker: bool = False) -> int:
    """Train for the process that leads from `address` until it sends a stop. Returns the exit status."""
    inbox: Inbox = queue.SimpleQueue()
    if not of_worker:
        signal.signal(signal.SIGTERM, lambda *_: inbox.put(Stop()))  # a SimpleQueue may be entered again by a handler
        ignore_signals(signal.SIGINT, signal.SIGHUP)
    rank = RankOfWorker(inbox, number) if of_worker else RankOfRun(inbox, number, count)
    line = connect(address, rank.hear)(hello(number, run_digest))
    try:
        line.send(rank.train(line))
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
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    status = 1
    try:
        if of_worker := sys.argv[1:] == [OF_WORKER]:
            ignore_signals(*OF_THE_TERMINAL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_TERMINAL)
        address, _, number = sys.stdin.read().partition("\n")  # a rank that was started ahead gets its number there
        status = serve(address, int(number or os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), of_worker=of_worker)
    except BaseException:
        note(traceback.format_exc())
    leave(status)  # libraries' threads must not keep a rank alive whose owner waits for it


if __name__ == "__main__":
    main()
