"""The controller inside the server: accepted jobs through intake to the scheduler, and what becomes of them back into the store.

Truth is the database for orders and outcomes, the disk for training. A start submits all jobs that have not ended, in their order; nothing
is replayed. Where the server before was killed, its workers train on: they are found before anything is decided, with their jobs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine, Row
from sqlalchemy.exc import SQLAlchemyError

from tlora import durable
from tlora.api import OrderSpec
from tlora.cluster.controller import run as run_controller
from tlora.cluster.event_log import EventRecord
from tlora.cluster.learned_costs import LearnedCosts, learned_of
from tlora.errors import ConfigError, TloraError
from tlora.job import JobSpec
from tlora.protocol import Action, Event, JobRequest, Tick
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.service.backend_factory import BackendFactory, Cluster, intake_settings
from tlora.service.capacity import Capacity
from tlora.service.config import ServerConfig
from tlora.service.database import job_rows
from tlora.service.database.writer import Writer
from tlora.service.intake import Answer, IntakeRequest, request_line
from tlora.service.job_status_writer import JobStatusWriter, Recorded
from tlora.service.live_state import LiveState
from tlora.service.order_reader import Accepted, Feeder, OrderReader, StorePatience, submit, try_later, warn_of_lost_bases, warn_of_waiting
from tlora.service.problems import RefusedError
from tlora.service.storage import Storage
from tlora.service.usage import Usage
from tlora.service.waiting_queue import WaitingQueue
from tlora.shape.cost import CostModel
from tlora.shape.predicted_constants import live_constants, live_stage_rates
from tlora.wording.numbers import place_names

_BASES_SECONDS = 120.0  # for bases of accepted jobs to be looked at, before workers that are found are taken over without their jobs
_BASE_KEY = "base:"  # of intake's questions about bases


class Controller:
    """`start` once; `close` checkpoints all jobs and returns when their workers have ended."""

    def __init__(self, config: ServerConfig, engine: Engine, writer: Writer, live: LiveState, backend_factory: BackendFactory) -> None:
        self._config, self._engine, self._writer, self._live = config, engine, writer, live
        self._backend_factory, self._directory = backend_factory, config.directory
        for name in ("jobs", "workers", "bases", "tokens", "files"):
            durable.make_directory(self._directory / name)
        self._lock = threading.RLock()
        self._base_heard = threading.Condition(self._lock)
        self._bases: dict[str, str] = {}
        self._sizes: dict[str, int] = {}  # bytes of the bases that are known
        self._problems: dict[str, str] = {}  # of bases
        self._known: dict[str, str] = {}  # jobs that the cluster has -> their base
        self._early: dict[str, list[Row[Any]]] = {}  # jobs whose data is read, by the base that is not known yet
        self._homeless: dict[str, list[Accepted]] = {}  # jobs by their base, which no longer is served
        self._expected: dict[str, list[JobSpec]] = {}  # jobs whose data is being read, by the base that is not known yet
        self._cluster: Cluster | None = None
        self.scheduler: Scheduler | None = None
        self._closing = False
        self._store = StorePatience(lambda: self._closing)
        self._reader = OrderReader(engine, config.directory)
        self._capacity = Capacity(config, backend_factory.places)
        self.storage = Storage(config.directory, config.limits)
        self._usage = Usage(writer, config.usage_half_life_seconds)
        self._learned = LearnedCosts(config.directory, logging.getLogger(__name__).warning)
        self._feeder = Feeder(self._take_up)
        self._outcomes = JobStatusWriter(config.directory, writer, live, self._forget)
        self._queue = WaitingQueue(config.policy, self._outcomes.see_queue, place_names(backend_factory.places.device))
        self._events = EventRecord(config.directory / "logs", config.log_file_bytes)
        self._intake = backend_factory.intake(
            intake_settings(config, backend_factory.places.device), config.directory / "workers" / "intake.log", self._hear
        )
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self, bases: Mapping[str, str]) -> None:
        """Take up all jobs that have not ended."""
        with self._lock:
            self._intake.start()
            for name, path in bases.items():
                self.base_added(name, path)
            with self._engine.connect() as connection:
                rows = job_rows.open_jobs(connection)
            there = set[str]()
            for row in rows:
                self._take_up(Accepted(row), there)
            warn_of_lost_bases({name: len(jobs) for name, jobs in self._homeless.items()})
        self._feeder.start()
        self._thread.start()

    def close(self) -> None:
        """Checkpoint everything and end the workers and intake."""
        self._closing = True
        self._feeder.close()
        with self._lock:
            self._base_heard.notify_all()
            cluster = self._cluster
        if cluster is not None:
            cluster.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._intake.close()
        self._outcomes.requeue()
        self._outcomes.flush()

    # -- told by requests, of what has been committed; none of it waits ------------------------------------------------

    def check(self, order: OrderSpec) -> None:
        """Before anything is committed. Raises RefusedError for a job that can never run here."""
        self._capacity.check(order)

    def accepted(self, jobs: Sequence[Accepted]) -> None:
        """In a thread of its own: requests are answered meanwhile."""
        self._feeder.put(jobs)

    def asked(self, request: JobRequest) -> None:
        """Of a job that the cluster has; of another the store alone knows, and the cluster hears with its submission."""
        if request.verb == "cancel":
            self._intake.forget(request.job_id)
        with self._lock:
            if self._cluster is not None and request.job_id in self._known:
                self._cluster.ask(request)
        if request.verb == "cancel":
            self._outcomes.ended(request.job_id)

    def drain_host(self, host: str, *, finish: bool, undo: bool) -> None:
        """Raises RefusedError for a host that there is not."""
        with self._lock:
            if self._cluster is None:
                raise RefusedError(503, "not_ready", self._live.fault or "the cluster has not begun yet")
            try:
                self._cluster.drain(host, finish=finish, undo=undo)
            except ConfigError as error:
                raise RefusedError(404, "not_found", str(error)) from None

    def base_added(self, name: str, path: str) -> None:
        with self._lock:
            self._bases[name] = path
            self._problems.pop(name, None)  # it may have been mended
            self._feeder.put(self._homeless.pop(name, []))
        self._look_at_base(name)

    def _look_at_base(self, name: str) -> None:
        self._intake.put(_BASE_KEY + name, request_line(IntakeRequest(_BASE_KEY + name, self._bases[name])))

    def base_status(self, name: str) -> tuple[str, str | None, int | None]:
        """Of a base: "unknown", "ready" or "failed"; what is wrong with it; its bytes."""
        if name in self._problems:
            return "failed", self._problems[name], None
        return ("ready", None, self._sizes[name]) if name in self._sizes else ("unknown", None, None)

    # -- into the cluster ----------------------------------------------------------------------------------------------

    def _take_up(self, job: Accepted, there: set[str]) -> None:
        """Through intake, or, where its data has been read before, to the cluster. `there`: paths that need not be looked for."""
        row = job.row
        with self._lock:
            if row.base_model not in self._bases:
                self._homeless.setdefault(row.base_model, []).append(job)
                self._outcomes.wait_for(row.id, f"its base model {row.base_model}, which is not served any more: its operator must add it")
                return
            if self._reader.has_tokens(row):
                self._admit(row)
                return
            if row.intake is not None:
                self._outcomes.read_again(row.id)
            try:
                spec = self._reader.spec(row, self._bases, job.order)
            except (TloraError, ValueError, KeyError) as error:
                self._outcomes.fail(row.id, str(error))
                return
            if missing := self._reader.missing(row, spec, there):
                self._wait_for_files(row.id, missing)
                return
            tokens = str(self._directory / "tokens" / row.tenant)
            request = IntakeRequest(row.id, self._bases[row.base_model], row.tenant, spec, tokens)
            self._intake.put(row.id, request_line(request))
            self._expect(row.base_model, spec)

    def _expect(self, base_model: str, spec: JobSpec) -> None:
        """Load the base, which takes longer than most data does to be read, once it is known to be one. Holds the lock."""
        if self._cluster is not None and base_model in self._sizes:
            self._cluster.expect(base_model, spec)
        elif base_model not in self._problems:
            self._expected.setdefault(base_model, []).append(spec)

    def _expect_early(self, base_model: str) -> None:
        """The jobs that came before it was known what their base is."""
        for spec in self._expected.pop(base_model, []):
            self._expect(base_model, spec)

    def _hear(self, answer: Answer) -> None:
        """Of intake, in its thread: an answer that is lost would stall its job."""
        self._store.use("an answer of intake", lambda: self._take_answer(answer))

    def _take_answer(self, answer: Answer) -> None:
        key = answer["key"]
        if key.startswith(_BASE_KEY) and answer.get("disk_full"):  # nothing is known of it yet: its jobs wait
            try_later(self._look_at_base, key.removeprefix(_BASE_KEY))
        elif key.startswith(_BASE_KEY):
            self._see_base(key.removeprefix(_BASE_KEY), answer)
        elif "rows" in answer:
            self._outcomes.reading(key, answer["rows"], answer["share"])
        elif answer.get("disk_full"):
            self._readtry_later(key, "room on the server's disk, for what is made of its data")
        elif "problem" in answer:
            self._see_problem(key, answer["problem"])
        else:
            self._see_profile(key, {name: value for name, value in answer.items() if name != "key"})

    def _see_problem(self, job_id: str, problem: str) -> None:
        with self._engine.connect() as connection:
            row = job_rows.row_of(connection, job_id)
        missing = self._reader.missing(row) if row is not None and row.ended is None else []
        if missing:
            self._wait_for_files(job_id, missing)
        else:
            self._outcomes.fail(job_id, self._reader.in_tenants_words(job_id, problem))

    def _wait_for_files(self, job_id: str, missing: list[str]) -> None:
        """A job is never failed for what the server has lost: a disk may not be mounted, a backup not be back yet."""
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        logging.getLogger(__name__).warning("%s waits: %s%s is not in %s", job_id, missing[0], more, self._directory)
        self._readtry_later(job_id, f"{missing[0]}{more}, which the server has lost: its operator must bring it back")

    def _readtry_later(self, job_id: str, waits_for: str) -> None:
        """Its data cannot be read now, for reasons of the server's: the job waits, and nothing of it is lost."""
        self._outcomes.wait_for(job_id, waits_for)
        try_later(self._look_again, job_id)

    def _look_again(self, job_id: str) -> None:
        if self._closing:
            return
        try:
            with self._engine.connect() as connection:
                row = job_rows.row_of(connection, job_id)
        except SQLAlchemyError:
            try_later(self._look_again, job_id)
            return
        if row is not None and row.ended is None:
            self._feeder.put([Accepted(row)])

    def _see_base(self, name: str, answer: Answer) -> None:
        with self._lock:
            self._base_heard.notify_all()
            if "problem" in answer:
                self._problems[name] = answer["problem"]
                self._expected.pop(name, None)
                for row in self._early.pop(name, []):
                    self._outcomes.fail(row.id, answer["problem"])
                return
            self._problems.pop(name, None)
            self._sizes[name] = answer["bytes"]
            self._capacity.learn(name, self._bases[name])
            if self.scheduler is not None and self._cluster is not None:
                self._learn(self.scheduler.state.cost, name, self._cluster.now())
            self._expect_early(name)
            for row in self._early.pop(name, []):
                self._admit(row)

    def _see_profile(self, job_id: str, intake: dict[str, Any]) -> None:
        intake["warnings"] = [self._reader.in_tenants_words(job_id, warning) for warning in intake["warnings"]]

        def take(connection: Connection) -> Row[Any] | None:
            row = job_rows.row_of(connection, job_id)
            if row is not None:
                self.storage.admit(connection, row.tenant, [intake[key] for key in ("train_set", "eval_set") if intake[key]])
            status = job_rows.take_intake(connection, job_id, intake)
            return None if status is None else job_rows.row_of(connection, job_id)

        self._outcomes.read(job_id)
        try:
            row = self._store.write(self._writer, take)
        except RefusedError as error:
            self._outcomes.fail(job_id, f"there is no room for its tokenized data: {error.message}, and clone the job")
            return
        if row is not None:
            with self._lock:
                self._admit(row)

    def _admit(self, row: Row[Any]) -> None:
        """To the cluster, as the store has the job now. Holds the lock."""
        parameters = row.intake["profile"]["adapter_parameters"]
        problem = self._problems.get(row.base_model) or self._capacity.why_never(row.base_model, parameters)
        if problem is not None:
            self._outcomes.fail(row.id, problem)
        elif (uncut := self._capacity.why_uncut(row.base_model)) is not None:  # it was accepted under other settings
            self._outcomes.wait_for(row.id, f"its server: {uncut}, so that its operator must set layout: auto")
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
            bounds = self._capacity.most_gpus(row.base_model, self._live.gpus), self._capacity.least_gpus(row.base_model)
            submit(cluster, row, self._reader.spec(row, self._bases), *bounds)
        except (TloraError, ValueError, KeyError) as error:
            self._outcomes.fail(row.id, str(error))
            return
        self._known[row.id] = row.base_model
        if status == "paused":
            cluster.ask(JobRequest(row.id, "hold"))

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _has_open_jobs(self) -> bool:
        try:
            with self._engine.connect() as connection:
                return bool(job_rows.open_jobs(connection))
        except SQLAlchemyError:  # not known
            return True

    def _run(self) -> None:
        try:
            cluster = self._backend_factory.make(self._bases)
            cluster.more_to_come = self._has_open_jobs
            on_wait = warn_of_waiting if self._config.hosts_may_come or self._config.backend == "ray" else None
            places = self._backend_factory.places
            begins = CostModel({}, speed=places.speed, stage_rates=live_stage_rates(places.model))
            scheduler = Scheduler(LIVE_POLICIES[self._config.policy](), begins, self._live.see_policy_fault, self._usage.tenants, on_wait)
            cluster.follow(scheduler.state)
            try:
                self._events.begin(cluster.began_at_seconds)
                self._store.use("what tenants have used", lambda: self._usage.recall(self._engine, cluster.now()))
                with self._lock:
                    self._cluster, self.scheduler = cluster, scheduler
                    if self._closing:  # `close` came too early to stop it
                        cluster.stop()
                    scheduler.state.kinds.begin = lambda kind, cost: self._learned.teach_kind(kind, cost, cluster.now())
                    for name in list(self._sizes):
                        self._learn(scheduler.state.cost, name, cluster.now())
                    early, self._early = self._early, {}
                    rows = sorted((row for rows in early.values() for row in rows), key=lambda row: row.serial)
                    for name in list(self._expected):
                        self._expect_early(name)
                    for row in rows:
                        self._admit(row)
                self._outcomes.begin(self._backend_factory.places)
                self._live.fault = None
                self._wait_for_bases()
                look = partial(self._queue.look, scheduler)
                run_controller(scheduler, Recorded(cluster, self._outcomes.settle, self._outcomes.requeue, look), self._see)
            finally:
                with self._lock:
                    self._cluster = None
                    self._learned.see(cluster.now(), at_once=True)
                self._usage.save(cluster.now(), at_once=True)
                cluster.close()
                self._events.close()
        except Exception as error:
            logging.getLogger(__name__).exception("the controller ended")
            self._outcomes.requeue()
            self._live.fault = f"the controller ended ({type(error).__name__}: {error}); jobs are accepted, and trained after a restart"
        else:
            self._live.fault = "the server is shutting down"

    def _wait_for_bases(self) -> None:
        """Until all jobs that were accepted before are submitted: groups that are found are taken over with the jobs that are."""
        deadline = time.monotonic() + _BASES_SECONDS
        with self._lock:
            while self._early and not self._closing and (left := deadline - time.monotonic()) > 0:
                self._base_heard.wait(left)

    def _learn(self, cost: CostModel, name: str, now: float) -> None:
        """The base gets the speeds that are predicted of it on the GPUs here, and what was observed of itself."""
        if name not in cost.constants:
            cost.add(name, live_constants(self._sizes[name], self._capacity.parts_of(name), self._backend_factory.places.model))
            if (memory := self._capacity.memory_of(name)) is not None:
                cost.memory[name] = memory
            self._learned.teach(cost, name, learned_of(self._bases[name], self._backend_factory.places.device, self._config.recompute), now)

    def _see(self, now: float, item: Event | Action) -> None:
        self._events.see(now, item, self._sizes)
        self._outcomes.see(item)
        self._usage.save(now)
        self._queue.see(now, item)
        if isinstance(item, Tick) and self.scheduler is not None:
            with self._lock:  # a base may be added meanwhile
                self._learned.see(now)

    def _forget(self, job_id: str) -> None:
        """The job has ended. One that was cancelled is told of twice: by its owner, and by the cluster, which forgets it then."""
        with self._lock:
            self._known.pop(job_id, None)
            if self._cluster is not None:
                self._cluster.forget(job_id)
