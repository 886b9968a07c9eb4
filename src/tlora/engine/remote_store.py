"""The store of a worker that does not see its controller's: fetched before jobs need it, sent back as they write.

It stands between the line and the trainer, whose commands and reports pass through it. What a job reads (base, data, the adapter that it
starts from) is kept by hash in this host's cache, once for all workers. Its directory is a copy of this worker alone, from which rows and
checkpoints go back while it trains, and all of it before its end is reported: what the controller hears of lies in its store.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path

from tlora.cache_directory import cache_dir
from tlora.engine.heartbeat import Heartbeat
from tlora.engine.job_copy import JobCopy
from tlora.engine.messages import Command
from tlora.errors import ConfigError, TloraError
from tlora.link.log import note
from tlora.link.transfer import AgainError, StoreClient, TransferError, fetch_tree
from tlora.store.full_disk import ROOM_ON_DISK
from tlora.supermodel.base_name import public_name
from tlora.worker_protocol import Delayed, Failed, Finished, Join, Joined, Left, Load, Refused, Report

_SEND_SECONDS = 2.0  # between two looks at what jobs have written
_AGAIN_SECONDS = 1.0
_LAST_TRIES = 15  # of a job's last files, when the worker is about to end
_LOCK, _LOOK_SECONDS = ".lock", 0.1


class RemoteStore:
    """`inbox` is what the trainer's commands come from; `report` takes its reports."""

    def __init__(
        self,
        client: StoreClient,
        name: str,
        load: Load,
        commands: queue.SimpleQueue[Command],
        send: Callable[[Report], None],
        heartbeat: Heartbeat,
    ) -> None:
        """`name` is this worker's own in the host's cache; `load`, `commands` and `send` are those of a worker that sees the store."""
        self._client, self._load, self._send, self._heartbeat = client, load, send, heartbeat
        self._trees, self._own = cache_dir() / "hosts" / "trees", cache_dir() / "hosts" / "workers" / name
        self._jobs: dict[str, JobCopy] = {}
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._commands = commands
        _remove_others(self._own.parent)
        self._own.mkdir(parents=True)
        self._lock = os.open(self._own / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._sender = threading.Thread(target=self._send_back, name="store-sender", daemon=True)

    def open(self) -> Load | None:
        """What is to be loaded here: over a copy of the base, unless that is a hub's id, which is downloaded as anywhere. None for a worker
        that is to end meanwhile.

        Raises ConfigError where the base cannot be had.
        """
        try:
            copy = self._fetch("base")
        except (TransferError, OSError) as error:
            if self._gave_up():
                return None
            raise ConfigError(f"base_model {self._load.base_model}: does not come from the controller's host: {error}") from None
        threading.Thread(target=self._begin_jobs, name="store-fetcher", daemon=True).start()
        self._sender.start()
        load = replace(self._load, output_dir=str(self._own / "jobs"))
        if copy is None:
            return load
        return replace(load, base_model=str(copy), base_name=public_name(self._load.base_model, copy))

    def report(self, report: Report) -> None:
        """Of the trainer. The end of a job follows when its files are sent."""
        if isinstance(report, Joined) and report.job_id in self._jobs:
            self._jobs[report.job_id].trains = True
        if isinstance(report, Finished | Failed | Left) and report.job_id in self._jobs:
            self._ended.put(report)
            return
        if isinstance(report, Refused) and report.job_id in self._jobs:
            self._jobs.pop(report.job_id).remove()
        self._send(report)

    def close(self, timeout_seconds: float) -> None:
        """Send what is left, and remove this worker's copies."""
        self._ended.put(None)
        if self._sender.is_alive():
            self._sender.join(timeout_seconds)
        self._client.close()
        shutil.rmtree(self._own, ignore_errors=True)
        os.close(self._lock)

    # -- what is fetched -----------------------------------------------------------------------------------------------

    def _begin_jobs(self) -> None:
        """In a thread of its own, which passes the commands on in their order."""
        while True:
            command = self._commands.get()
            if isinstance(command, Join):
                try:
                    command = self._begin(command)
                except (TloraError, OSError) as error:
                    note(f"{command.job.name}: {error}")
                    self._jobs.pop(command.job.name, None)
                    self._send(Refused(command.job.name, f"its files do not come from the controller's host: {error}"))
                    continue
            self.inbox.put(command)

    def _begin(self, join: Join) -> Join:
        name, brought = join.job.name, self.bring(join)
        here, there, start = self._own / "jobs" / name, f"{self._load.output_dir}/{name}", join.job.adapter_path
        paths = {str(here): there} | ({brought.job.adapter_path: start} if start and brought.job.adapter_path else {})
        copy = JobCopy(self._client, name, join.attempt, here, paths)
        copy.fetch(self._gave_up, self._heartbeat.beat)
        self._jobs[name] = copy
        return brought

    def bring(self, join: Join) -> Join:
        """What the job reads, with its paths here. Raises TransferError, ConnectionError, CheckpointError."""
        name = join.job.name
        train, evaluation, start = (
            self._fetch(f"{kind}:{name}", called) if given else None
            for kind, given, called in (
                ("train", join.train_set, _name_of(join.train_set)),  # a checkpoint says on which set it was trained
                ("eval", join.eval_set, _name_of(join.eval_set)),
                ("start", join.job.adapter_path, ""),
            )
        )
        spec = join.job.model_copy(update={"adapter_path": str(start)}) if start else join.job
        return replace(join, job=spec, train_set=_text(train), eval_set=_text(evaluation))

    def _fetch(self, tree: str, name: str = "") -> Path | None:
        """As `fetch_tree`. One process of this host at a time; the others find it there."""
        self._trees.mkdir(parents=True, exist_ok=True)
        with _locked(self._trees / f"{_LOCK}-{tree.partition(':')[0]}", self._gave_up):
            return fetch_tree(self._client, tree, self._trees, self._gave_up, self._heartbeat.beat, name)

    def _gave_up(self) -> bool:
        return self._heartbeat.ending.is_set()

    # -- what is sent --------------------------------------------------------------------------------------------------

    def _send_back(self) -> None:
        """In a thread of its own, until `close`."""
        while True:
            try:
                ended = self._ended.get(timeout=_SEND_SECONDS)
            except queue.Empty:
                self._send_written()
                continue
            if ended is None:
                self._send_written()  # of jobs that were cut off
                return
            assert isinstance(ended, Finished | Failed | Left), ended
            self._end(self._jobs.pop(ended.job_id), ended)

    def _send_written(self) -> None:
        for copy in [copy for copy in self._jobs.values() if copy.trains]:
            with contextlib.suppress(OSError):  # the next time, or at its end
                copy.send(last=False)

    def _end(self, copy: JobCopy, ended: Finished | Failed | Left) -> None:
        tries = 0
        while True:
            try:
                copy.send(last=True)
                break
            except AgainError as error:
                self._send(Delayed(ended.job_id, ROOM_ON_DISK))
                tries += self._gave_up()
                if tries > _LAST_TRIES or self._client.closed.wait(_AGAIN_SECONDS):
                    note(f"{ended.job_id}: its last files are not sent: {error}")
                    break
            except (TransferError, OSError) as error:  # handed over: what is said of it is void
                note(f"{ended.job_id}: its last files are not sent: {error}")
                break
        copy.remove()
        self._send(copy.named_there(ended))


def _name_of(path: str | None) -> str:
    return Path(path).name if path is not None else ""


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


@contextlib.contextmanager
def _locked(path: Path, gave_up: Callable[[], bool]) -> Generator[None]:
    """Raises ConnectionAbortedError once `gave_up`."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if gave_up():
                    raise ConnectionAbortedError("given up") from None
                time.sleep(_LOOK_SECONDS)
        yield
    finally:
        os.close(handle)


def _remove_others(workers: Path) -> None:
    """The copies of workers of this host that have been killed."""
    for own in workers.iterdir() if workers.is_dir() else ():
        with contextlib.suppress(OSError):
            handle = os.open(own / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(own, ignore_errors=True)
            finally:
                os.close(handle)
