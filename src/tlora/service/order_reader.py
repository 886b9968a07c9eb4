"""From a job's row in the store to what is trained, with the paths of its files; and back, from paths to the tenant's names.

The `Feeder` hands accepted jobs to the controller in a thread of its own, so that no request waits for what the controller does.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, Row
from sqlalchemy.exc import SQLAlchemyError

from tlora.api import OrderSpec, job_spec
from tlora.cluster.reconciler import LocalJob
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.protocol import JobProfile, JobSubmitted
from tlora.service.backend_factory import Cluster
from tlora.service.database import file_rows, job_rows
from tlora.service.database.writer import Operation, StoreError, Writer
from tlora.wording.numbers import quantity

T = TypeVar("T")
_MOST_PATHS = 10_000
_KEYS = {"eval_path": "eval_file", "adapter_path": "start_from"}  # of a jobs file


def start_path(directory: Path, start_from: str) -> Path:
    """Where the adapter lies that an order starts from: a job's own, or one of its checkpoints."""
    job_id, _, checkpoint = start_from.partition(":")
    return directory / "jobs" / job_id / checkpoint


class Accepted(NamedTuple):
    """A job in the store; `order` is the row's, where it has been read."""

    row: Row[Any]
    order: OrderSpec | None = None


class OrderReader:
    """Remembers where files lie: their bytes never change. The caller sees to it that `spec` is asked by one thread at a time."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self._engine, self._directory = engine, directory
        self._paths: dict[str, Path] = {}

    def spec(self, row: Row[Any], bases: Mapping[str, str], order: OrderSpec | None = None) -> JobSpec:
        """The job of `row`; `order` is the row's, where it has been read. Raises ConfigError where its base is none of `bases` any more,
        and what `job_spec` does.
        """
        order = order or OrderSpec.model_validate(row.order)
        if row.base_model not in bases:
            raise ConfigError(f"base_model {row.base_model!r}: is not served here any more. Order another")
        if any(file not in self._paths for file in order.data.file_ids):
            if len(self._paths) > _MOST_PATHS:
                self._paths.clear()
            with self._engine.connect() as connection:
                self._paths |= file_rows.paths_of(connection, self._directory, row.tenant, order.data.file_ids)
        paths = {file: self._paths[file] for file in order.data.file_ids}
        start = start_path(self._directory, order.start_from) if order.start_from else None
        return job_spec(order, row.id, paths, start)

    def missing(self, row: Row[Any], spec: JobSpec | None = None, there: set[str] | None = None) -> list[str]:
        """What the job needs, was not removed, and yet does not lie in the server's directory, as its tenant calls it. With the job's
        `spec` the store is asked only where something is missing. Paths in `there` are not looked for again; those found are added.
        """
        if spec is not None:
            there = set() if there is None else there
            sources = [source.path for source in (*spec.data.sources, *spec.data.eval_sources)]
            wanted = {*sources, *([spec.adapter_path] if spec.adapter_path else [])} - there
            found = {path for path in wanted if Path(path).exists()}
            there |= found
            if found == wanted:
                return []
        order = OrderSpec.model_validate(row.order)
        with self._engine.connect() as connection:
            paths = file_rows.paths_of(connection, self._directory, row.tenant, order.data.file_ids)
            lost = [f"file {file_rows.name_of(connection, file)}" for file, path in paths.items() if not path.is_file()]
            source = job_rows.row_of(connection, order.start_from) if order.start_from else None
            if source is not None and source.removed is None and not (self._directory / "jobs" / source.id).is_dir():
                lost.append(f"the adapter of {source.id}")
        return lost

    @staticmethod
    def has_tokens(row: Row[Any]) -> bool:
        """Whether its data has been read, and what was made of it is there still."""
        return row.intake is not None and all(Path(row.intake[key]).is_dir() for key in ("train_set", "eval_set") if row.intake[key])

    def in_tenants_words(self, job_id: str, message: str) -> str:
        """What `in_tenants_words` makes of it for the job of that id."""
        with self._engine.connect() as connection:
            return in_tenants_words(connection, self._directory, job_rows.row_of(connection, job_id), message)


def in_tenants_words(connection: Connection, directory: Path, row: Row[Any] | None, message: str) -> str:
    """Files by the names that the tenant of the job in `row` gave them, not by where they lie, and keys as an order has them."""
    for key, ours in _KEYS.items():
        message = re.sub(rf"(?<![\w'\"]){key}\b", ours, message)
    if row is None:
        return message
    order = OrderSpec.model_validate(row.order)
    paths = file_rows.paths_of(connection, directory, row.tenant, order.data.file_ids)
    for file, path in paths.items():
        message = message.replace(str(path), file_rows.name_of(connection, file))
    return message.replace(str(directory), "")


def submit(cluster: Cluster, row: Row[Any], spec: JobSpec, most_gpus: int, least_gpus: int) -> None:
    """Of a job that an earlier server has accepted it is told when, where the cluster's workers are that server's. Raises TloraError,
    ValueError, KeyError.
    """
    intake = row.intake
    profile = JobProfile(**intake["profile"] | {"length_histogram": tuple(intake["profile"]["length_histogram"])})
    created = cluster.now() + row.created - time.time()
    deadline = None if spec.deadline_seconds is None else created + spec.deadline_seconds
    gpus = max(least_gpus, min(spec.gpus, most_gpus or spec.gpus))  # accepted when there were more: its replicas run in turn
    rest = (row.tenant, spec.priority, deadline, spec.max_slowdown)
    submitted = JobSubmitted(row.id, row.base_model, gpus, profile, *rest, least_gpus=least_gpus)
    arrival = min(created, cluster.now())
    cluster.submit(
        submitted, LocalJob(spec, intake["train_set"], intake["eval_set"]), arrival if arrival < cluster.began_at_seconds else None
    )


_ROOM_SECONDS = 10.0  # between two tries to read data whose tokens have no room on the disk
STORE_SECONDS = 2.0  # between two tries of a store that does not answer


class StorePatience:
    """Asks a store that does not answer again and again, until the server ends. Jobs are accepted meanwhile where it can be written."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over

    def use(self, what: str, use: Callable[[], object]) -> None:
        """Call `use` until it raises no SQLAlchemyError."""
        while not self._is_over():
            try:
                use()
                return
            except SQLAlchemyError:
                logging.getLogger(__name__).exception(f"{what}: waits for the store")
                time.sleep(STORE_SECONDS)

    def write(self, writer: Writer, operation: Operation[T]) -> T | None:
        """The operation's value, as soon as the store can be written; None when the server ends before."""
        while not self._is_over():
            try:
                return writer.do(operation)
            except StoreError:
                time.sleep(STORE_SECONDS)
        return None


class Feeder:
    """`put` in any thread; `take_up` gets one job after the other, and a set that lives as long as those that waited together: paths that
    need not be looked for, as many orders name the same files.
    """

    def __init__(self, take_up: Callable[[Accepted, set[str]], None]) -> None:
        self._take_up = take_up
        self._inbox: queue.SimpleQueue[Sequence[Accepted] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, jobs: Sequence[Accepted]) -> None:
        self._inbox.put(jobs)

    def close(self) -> None:
        """Take nothing more up than what has begun; does not wait."""
        self._inbox.put(None)

    def _run(self) -> None:
        while True:
            found = [self._inbox.get()]
            while not self._inbox.empty():  # this is the only thread that takes from it
                found.append(self._inbox.get())
            if None in found:  # the store has all jobs: the next server takes up those that are left
                return
            self._take_up_all([job for jobs in found if jobs is not None for job in jobs])

    def _take_up_all(self, jobs: Sequence[Accepted]) -> None:
        there = set[str]()
        for number, job in enumerate(jobs):
            try:
                self._take_up(job, there)
            except SQLAlchemyError:  # the store does not answer: these jobs are accepted, and wait for it
                logging.getLogger(__name__).exception("accepted jobs wait for the store")
                time.sleep(STORE_SECONDS)
                self._inbox.put(jobs[number:])
                return
            except Exception:  # of this job alone: the others are taken up all the same
                logging.getLogger(__name__).exception("%s: is taken up when the server starts again", job.row.id)


def try_later(what: Callable[[T], object], argument: T) -> None:
    """As soon as there may be room on the disk."""
    again = threading.Timer(_ROOM_SECONDS, what, (argument,))
    again.daemon = True
    again.start()


def warn_of_waiting(job_id: str, reason: str) -> None:
    logging.getLogger(__name__).warning("%s waits for workers of other hosts: %s", job_id, reason)


def warn_of_lost_bases(jobs_by_base: Mapping[str, int]) -> None:
    """How many jobs were accepted for bases that the server is not started with any more."""
    for name, count in jobs_by_base.items():
        waits = quantity(count, "job waits", "jobs wait")
        logging.getLogger(__name__).warning(
            "%s for base model %s, which is not served any more: `tlora bases add %s=...`, or start with it", waits, name, name
        )
