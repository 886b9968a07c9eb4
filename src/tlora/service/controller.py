"""The controller inside the server: accepted jobs through intake to the scheduler, and what becomes of them back into the store.

Truth is the database for orders and outcomes, the disk for training. A start submits all jobs that have not ended, in their order; nothing
is replayed. Where the server before was killed, its workers train on: they are found before anything is decided, with their jobs.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine, Row
from sqlalchemy.exc import SQLAlchemyError

from tlora import durable
from tlora.cluster.backend import Backend
from tlora.cluster.controller import run as run_controller
from tlora.cluster.reconciler import LocalJob
from tlora.costs.cost import CostModel
from tlora.costs.hardware import cost_model, nearest_base
from tlora.errors import ConfigError, TloraError
from tlora.job import JobSpec
from tlora.protocol import Action, Event, JobProfile, JobSubmitted
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.service.config import ServerConfig
from tlora.service.database import file_rows, job_rows
from tlora.service.database.writer import Operation, StoreError, Writer
from tlora.service.intake import Answer, Intake
from tlora.service.intake_requests import IntakeRequest, IntakeSettings, request_line
from tlora.service.live_state import LiveState
from tlora.service.machine import Places
from tlora.service.orders import OrderSpec, job_spec
from tlora.service.outcomes import Outcomes

T = TypeVar("T")
_MOST_PATHS = 10_000
_INTAKE_SLOTS = 2  # batches of jobs whose data is read at a time: one tenant never holds both
_BASES_SECONDS = 120.0  # for bases of accepted jobs to be looked at, before workers that are found are taken over without their jobs
_STORE_SECONDS = 2.0  # between two tries to write to a store that cannot be written
_BASE_KEY = "base:"  # of intake's questions about bases


class Cluster(Backend, Protocol):
    """What the controller needs of `cluster.local.LocalBackend`; tests give one whose workers are fake."""

    @property
    def began_at_seconds(self) -> float: ...
    def submit(self, spec: JobSubmitted, job: LocalJob, at_seconds: float | None = None) -> None: ...
    def cancel(self, job_id: str, at_seconds: float = 0.0) -> None: ...
    def hold(self, job_id: str, at_seconds: float = 0.0) -> None: ...
    def release(self, job_id: str, at_seconds: float = 0.0) -> None: ...
    def forget(self, job_id: str) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class ReadsData(Protocol):
    """What the controller needs of `intake.Intake`."""

    def start(self) -> None: ...
    def put(self, key: str, line: bytes) -> None: ...
    def forget(self, key: str) -> None: ...
    def close(self) -> None: ...
    @property
    def pid(self) -> int | None: ...


@dataclass(frozen=True)
class Hall:
    """Where jobs are trained. `make` gives the cluster over base models, name -> directory or hub id, a mapping that may grow;
    `intake` what reads their data, from its settings, its log and what to call with its answers.
    """

    places: Places
    make: Callable[[Mapping[str, str]], Cluster]
    intake: Callable[[IntakeSettings, Path, Callable[[Answer], None]], ReadsData] = Intake


class Controller:
    """A `services.Desk`. `start` once; `close` checkpoints all jobs and returns when their workers have ended."""

    def __init__(self, config: ServerConfig, engine: Engine, writer: Writer, live: LiveState, hall: Hall) -> None:
        self._config, self._engine, self._writer, self._live = config, engine, writer, live
        self._hall = hall
        self._directory = config.directory
        for name in ("jobs", "workers", "bases", "tokens", "files"):
            durable.make_directory(self._directory / name)
        self._lock = threading.RLock()
        self._base_heard = threading.Condition(self._lock)
        self._bases: dict[str, str] = {}
        self._sizes: dict[str, int] = {}  # bytes of the bases that are known
        self._problems: dict[str, str] = {}  # of bases
        self._known: dict[str, str] = {}  # jobs that the cluster has -> their base
        self._early: dict[str, list[Row[Any]]] = {}  # jobs whose data is read, by the base that is not known yet
        self._cluster: Cluster | None = None
        self._scheduler: Scheduler | None = None
        self._closing = False
        self._paths: dict[str, Path] = {}  # of files' bytes, which never change
        self._inbox: queue.SimpleQueue[Sequence[Row[Any]] | None] = queue.SimpleQueue()  # jobs that were accepted
        self._feeder = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._outcomes = Outcomes(config.directory, writer, live, self._forget)
        self._intake = hall.intake(_intake_settings(config), config.directory / "workers" / "intake.log", self._hear)
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self, bases: Mapping[str, str]) -> None:
        """Take up all jobs that have not ended."""
        with self._lock:
            self._intake.start()
            for name, path in bases.items():
                self.base_added(name, path)
            with self._engine.connect() as connection:
                rows = job_rows.open_jobs(connection)
            self._writer.do(self._outcomes.requeue)
            self._take_up(rows)
        self._feeder.start()
        self._thread.start()

    def close(self) -> None:
        """Checkpoint everything and end the workers and intake."""
        self._closing = True
        self._inbox.put(None)
        with self._lock:
            self._base_heard.notify_all()
            cluster = self._cluster
        if cluster is not None:
            cluster.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._intake.close()
        self._outcomes.flush()

    @property
    def intake_pid(self) -> int | None:
        return self._intake.pid

    # -- told by requests ----------------------------------------------------------------------------------------------

    def accepted(self, rows: Sequence[Row[Any]]) -> None:
        """In a thread of its own: requests are answered meanwhile."""
        self._inbox.put(rows)

    def _feed(self) -> None:
        while (rows := self._inbox.get()) is not None:
            try:
                with self._lock:
                    self._take_up(rows)
            except SQLAlchemyError:  # the store does not answer: these jobs are accepted, and wait for it
                traceback.print_exc()
                time.sleep(_STORE_SECONDS)
                self._inbox.put(rows)

    def paused(self, job_id: str) -> None:
        self._ask(job_id, lambda cluster: cluster.hold(job_id))

    def resumed(self, job_id: str) -> None:
        self._ask(job_id, lambda cluster: cluster.release(job_id))

    def cancelled(self, job_id: str) -> None:
        self._intake.forget(job_id)
        self._ask(job_id, lambda cluster: cluster.cancel(job_id))
        self._outcomes.ended(job_id)

    def base_added(self, name: str, path: str) -> None:
        with self._lock:
            self._bases[name] = path
        self._intake.put(_BASE_KEY + name, request_line(IntakeRequest(_BASE_KEY + name, path)))

    def base_status(self, name: str) -> tuple[str, str | None, int | None]:
        if name in self._problems:
            return "failed", self._problems[name], None
        return ("ready", None, self._sizes[name]) if name in self._sizes else ("unknown", None, None)

    def _ask(self, job_id: str, ask: Callable[[Cluster], None]) -> None:
        """Of a job that the cluster has; of another the store alone knows, and the cluster hears with its submission."""
        with self._lock:
            if self._cluster is not None and job_id in self._known:
                ask(self._cluster)

    # -- into the cluster ----------------------------------------------------------------------------------------------

    def _take_up(self, rows: Sequence[Row[Any]]) -> None:
        """Through intake, or, where their data has been read before, to the cluster."""
        for row in rows:
            if row.intake is not None:
                self._admit(row)
                continue
            try:
                spec = self._spec(row)
            except (TloraError, ValueError, KeyError) as error:
                self._outcomes.fail(row.id, str(error))
                continue
            tokens = str(self._directory / "tokens" / row.tenant)
            request = IntakeRequest(row.id, self._bases[row.base_model], row.tenant, spec, tokens)
            self._intake.put(row.id, request_line(request))

    def _spec(self, row: Row[Any]) -> JobSpec:
        order = OrderSpec.model_validate(row.order)
        if row.base_model not in self._bases:
            raise ConfigError(f"base_model {row.base_model!r}: is not served here any more. Order another")
        if any(file not in self._paths for file in order.data.file_ids):
            if len(self._paths) > _MOST_PATHS:
                self._paths.clear()
            with self._engine.connect() as connection:
                self._paths |= file_rows.paths_of(connection, self._directory, row.tenant, order.data.file_ids)
        paths = {file: self._paths[file] for file in order.data.file_ids}
        start = self._directory / "jobs" / order.start_from if order.start_from else None
        return job_spec(order, row.id, paths, start)

    def _hear(self, answer: Answer) -> None:
        """Of intake, in its thread. A store that does not answer is waited for: an answer that is lost would stall its job."""
        while not self._closing:
            try:
                self._take_answer(answer)
                return
            except SQLAlchemyError:
                traceback.print_exc()
                time.sleep(_STORE_SECONDS)

    def _take_answer(self, answer: Answer) -> None:
        key = answer["key"]
        if key.startswith(_BASE_KEY):
            self._see_base(key.removeprefix(_BASE_KEY), answer)
        elif "rows" in answer:
            self._outcomes.reading(key, answer["rows"], answer["share"])
        elif "problem" in answer:
            self._outcomes.fail(key, self._in_tenants_words(key, answer["problem"]))
        else:
            self._see_profile(key, {name: value for name, value in answer.items() if name != "key"})

    def _see_base(self, name: str, answer: Answer) -> None:
        with self._lock:
            self._base_heard.notify_all()
            if "problem" in answer:
                self._problems[name] = answer["problem"]
                for row in self._early.pop(name, []):
                    self._outcomes.fail(row.id, answer["problem"])
                return
            self._sizes[name] = answer["bytes"]
            if self._scheduler is not None:
                self._learn(self._scheduler.state.cost, name)
            for row in self._early.pop(name, []):
                self._admit(row)

    def _see_profile(self, job_id: str, intake: dict[str, Any]) -> None:
        intake["warnings"] = [self._in_tenants_words(job_id, warning) for warning in intake["warnings"]]

        def take(connection: Connection) -> Row[Any] | None:
            status = job_rows.take_intake(connection, job_id, intake)
            return None if status is None else job_rows.row_of(connection, job_id)

        row = self._insist(take)
        if row is not None:
            with self._lock:
                self._admit(row)

    def _insist(self, operation: Operation[T]) -> T | None:
        """The operation's value, as soon as the store can be written; None when the server ends before."""
        while not self._closing:
            try:
                return self._writer.do(operation)
            except StoreError:
                time.sleep(_STORE_SECONDS)
        return None

    def _in_tenants_words(self, job_id: str, message: str) -> str:
        """Files by the names that the tenant gave them, not by where they lie."""
        with self._engine.connect() as connection:
            row = job_rows.row_of(connection, job_id)
            if row is None:
                return message
            order = OrderSpec.model_validate(row.order)
            paths = file_rows.paths_of(connection, self._directory, row.tenant, order.data.file_ids)
            for file, path in paths.items():
                message = message.replace(str(path), file_rows.name_of(connection, file))
        return message.replace(str(self._directory), "")

    def _admit(self, row: Row[Any]) -> None:
        """To the cluster, as the store has the job now. Holds the lock."""
        if row.base_model in self._problems:
            self._outcomes.fail(row.id, self._problems[row.base_model])
        elif self._cluster is None or row.base_model not in self._sizes:
            self._early.setdefault(row.base_model, []).append(row)
        elif row.id not in self._known:
            self._submit(self._cluster, row)

    def _submit(self, cluster: Cluster, row: Row[Any]) -> None:
        with self._engine.connect() as connection:  # it may have been paused or cancelled while its data was read
            status = job_rows.status_of(connection, row.id)
        if status not in ("preparing", "queued", "running", "paused"):
            return
        try:
            spec, intake = self._spec(row), row.intake
            profile = JobProfile(**intake["profile"] | {"length_histogram": tuple(intake["profile"]["length_histogram"])})
            deadline = None if spec.deadline_seconds is None else cluster.now() + row.created + spec.deadline_seconds - time.time()
            gpus = min(spec.gpus, self._live.gpus)  # accepted when there were more: its replicas run in turn
            submitted = JobSubmitted(row.id, row.base_model, gpus, profile, row.tenant, spec.priority, deadline, spec.max_slowdown)
            cluster.submit(submitted, LocalJob(spec, intake["train_set"], intake["eval_set"]), self._arrival(cluster, row))
        except (TloraError, ValueError, KeyError) as error:
            self._outcomes.fail(row.id, str(error))
            return
        self._known[row.id] = row.base_model
        if status == "paused":
            cluster.hold(row.id)

    @staticmethod
    def _arrival(cluster: Cluster, row: Row[Any]) -> float | None:
        """Of a job that an earlier server has accepted: when, on the clock of the cluster whose workers were found. Else None: now."""
        at_seconds = cluster.now() - max(0.0, time.time() - row.created)
        return at_seconds if at_seconds < cluster.began_at_seconds else None

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            cluster = self._hall.make(self._bases)
            scheduler = Scheduler(LIVE_POLICIES[self._config.policy](), self._cost(), self._see_fault)
            try:
                with self._lock:
                    self._cluster, self._scheduler = cluster, scheduler
                    for name in list(self._sizes):
                        self._learn(scheduler.state.cost, name)
                    early, self._early = self._early, {}
                    rows = sorted((row for rows in early.values() for row in rows), key=lambda row: row.serial)
                    for row in rows:
                        self._admit(row)
                self._outcomes.begin(self._hall.places)
                self._live.fault = None
                self._wait_for_bases()
                run_controller(scheduler, cluster, self._see)
            finally:
                with self._lock:
                    self._cluster = None
                cluster.close()
        except Exception as error:
            traceback.print_exc()
            self._live.fault = f"the controller ended ({type(error).__name__}: {error}); jobs are accepted, and trained after a restart"
        else:
            self._live.fault = "the server is shutting down"

    def _wait_for_bases(self) -> None:
        """Until all jobs that were accepted before are submitted: groups that are found are taken over with the jobs that are."""
        deadline = time.monotonic() + _BASES_SECONDS
        with self._lock:
            while self._early and not self._closing and (left := deadline - time.monotonic()) > 0:
                self._base_heard.wait(left)

    def _cost(self) -> CostModel:
        return cost_model(bases={})

    def _learn(self, cost: CostModel, name: str) -> None:
        """The base gets the speeds of the measured one that is nearest in size."""
        if name not in cost.constants:
            like = nearest_base(self._sizes[name])
            cost.add(name, cost_model(bases={name: like}).constants[name])

    def _see(self, _: float, item: Event | Action) -> None:
        self._outcomes.see(item)

    def _see_fault(self, reason: str) -> None:
        self._live.count("policy_fault")

    def _forget(self, job_id: str) -> None:
        """The job has ended. One that was cancelled is told of twice: by its owner, and by the cluster, which forgets it then."""
        with self._lock:
            self._known.pop(job_id, None)
            if self._cluster is not None:
                self._cluster.forget(job_id)


def _intake_settings(config: ServerConfig) -> IntakeSettings:
    limits = config.limits
    return IntakeSettings(
        str(config.directory / "bases"),
        config.dtype,
        config.base_precision,
        _INTAKE_SLOTS,
        limits.intake_memory_bytes,
        limits.intake_cpu_seconds,
        limits.intake_seconds,
        limits.line_bytes,
        limits.file_rows,
    )
