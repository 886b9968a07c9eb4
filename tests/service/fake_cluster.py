"""A cluster and an intake that train and read nothing: the scheduler and the store are the real ones."""

from __future__ import annotations

import hashlib
import json
import os
import queue
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tlora.cluster.reconciler import LocalJob
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupReady,
    JobFailed,
    JobFinished,
    JobRequest,
    JobSubmitted,
    NodeAdded,
    NodeDraining,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.scheduler.state import ClusterState
from tlora.service.backend_factory import BackendFactory, Cluster, ReadsData
from tlora.service.intake import parse_request
from tlora.service.machine import Devices

STEPS = 10
TOKEN_BYTES = 5000  # of a set, without what it says of itself
PROFILE = {"tokens_per_step": 100.0, "steps": STEPS, "longest_sample_tokens": 30, "adapter_parameters": 1000, "length_histogram": [0, 1]}


class FakeCluster(Cluster):
    """Jobs that are placed train when they are told to, or, with `eager`, at once and to their end. `trained` has every job that ended
    by itself, each time that it did.
    """

    def __init__(self, directory: Path, eager: bool = True, gpus: int = 2) -> None:
        self._directory, self.eager = directory, eager
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._node = NodeAdded("local", tuple(range(gpus)))
        self._inbox.put(self._node)
        self._began = time.monotonic()
        self.placed: dict[str, str] = {}  # job -> group
        self.submitted: list[str] = []
        self.specs: dict[str, LocalJob] = {}
        self.trained: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.closed = False
        self.more_to_come = lambda: False

    @property
    def began_at_seconds(self) -> float:
        return 0.0

    def now(self) -> float:
        return time.monotonic() - self._began

    def poll(self) -> list[Event]:
        event = self._inbox.get()
        return [event] if event is not None else []

    def execute(self, action: Action) -> None:
        match action:
            case StartGroup(group) | ChangeGroup(group):
                self._inbox.put(GroupReady(group.group_id))
                for job_id in group.job_ids:
                    if job_id in self.specs and self.placed.get(job_id) != group.group_id:
                        self.placed[job_id] = group.group_id
                        if self.eager:
                            self.step(job_id, 1)
                            self.finish(job_id)
            case StopGroup() | RejectJob():
                pass

    def submit(self, spec: JobSubmitted, job: LocalJob, at_seconds: float | None = None) -> None:
        assert spec.job_id not in self.specs, f"{spec.job_id} was submitted twice"
        self.submitted.append(spec.job_id)
        self.specs[spec.job_id] = job
        self._inbox.put(spec)

    def ask(self, request: JobRequest, at_seconds: float = 0.0) -> None:
        self.asked.append((request.verb, request.job_id))
        if request.verb == "cancel":
            self.specs.pop(request.job_id, None)
        elif request.verb == "hold":
            self.placed.pop(request.job_id, None)
        self._inbox.put(request)

    def forget(self, job_id: str) -> None:
        self.asked.append(("forget", job_id))

    def drain(self, host: str, *, finish: bool = False, undo: bool = False) -> None:
        if host != "local":
            raise ConfigError(f"unknown host {host!r}. There are local")
        self._inbox.put(self._node if undo else NodeDraining(host, finish))

    def follow(self, state: ClusterState) -> None:
        del state

    def expect(self, base_model: str, spec: JobSpec) -> None:
        self.asked.append(("expect", base_model))

    def stop(self) -> None:
        self._inbox.put(None)

    def close(self) -> None:
        self.closed = True

    # -- what a test lets happen ---------------------------------------------------------------------------------------

    def step(self, job_id: str, steps: int, step_seconds: float = 0.1) -> None:
        if job_id in self.specs:
            self._inbox.put(StepsDone(job_id, self.placed[job_id], steps, step_seconds))

    def finish(self, job_id: str) -> None:
        """With a result and an adapter on the disk, as a worker leaves them."""
        if self.specs.pop(job_id, None) is None:
            return
        self.trained.append(job_id)
        place = self._directory / "jobs" / job_id
        place.mkdir(parents=True, exist_ok=True)
        result = {"name": job_id, "status": "done", "steps": STEPS, "train_loss": 0.5, "num_tokens": 7, "path": str(place)}
        (place / "result.json").write_text(json.dumps(result))
        (place / "adapter_model.safetensors").write_bytes(b"weights of " + job_id.encode())
        (place / "adapter_config.json").write_text("{}")
        (place / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
        self._inbox.put(JobFinished(job_id))

    def fail(self, job_id: str, reason: str) -> None:
        self.specs.pop(job_id, None)
        self._inbox.put(JobFailed(job_id, reason))

    def tick(self) -> None:
        self._inbox.put(Tick())


class FakeIntake(ReadsData):
    """Answers at once, or, when `held`, once it is let go. A job whose name says so has data that cannot be read."""

    def __init__(self, on_answer: Callable[[dict[str, Any]], None], held: bool = False) -> None:
        self._answer, self.held = on_answer, held
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.asked: list[str] = []
        self._waiting: list[bytes] = []
        self._forgotten: set[str] = set()

    @property
    def pid(self) -> int | None:
        return None

    def start(self) -> None:
        import threading

        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, key: str, line: bytes) -> None:
        self.asked.append(key)
        if self.held and not key.startswith("base:"):
            self._waiting.append(line)
        else:
            self._lines.put(line)

    def let_go(self) -> None:
        self.held = False
        waiting, self._waiting = self._waiting, []
        for line in waiting:
            self._lines.put(line)

    def tell(self, answer: dict[str, Any]) -> None:
        """As if the process had said so."""
        self._answer(answer)

    def forget(self, key: str) -> None:
        self._forgotten.add(key)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            request = parse_request(line)
            if request.key in self._forgotten:
                continue
            if request.spec is None:
                self._answer({"key": request.key, "bytes": 1 << 30})
            elif request.spec.seed == 666:
                path = request.spec.data.sources[0].path
                self._answer({"key": request.key, "problem": f"{path}, line 3: not JSON; correct it"})
            else:
                data = request.spec.data
                made = [
                    make_set(Path(request.tokens_dir), [one.path for one in part], data.max_length)
                    for part in (data.sources, data.eval_sources)
                ]
                sets = {"train_set": made[0], "eval_set": made[1], "samples": 80, "warnings": []}
                self._answer({"key": request.key, "profile": PROFILE} | sets)


def make_set(place: Path, files: list[str], max_length: int) -> str | None:
    """As intake leaves it, in a directory whose name follows from what it is made of; None where that is nothing."""
    if not files:
        return None
    final = place / hashlib.sha256(f"{[Path(file).name for file in files]} {max_length}".encode()).hexdigest()[:32]
    if not final.exists():
        scratch = place / f"tmp-{os.getpid()}-{final.name}"
        scratch.mkdir(parents=True)
        (scratch / "tokens.bin").write_bytes(bytes(TOKEN_BYTES))
        (scratch / "meta.json").write_text(json.dumps({"report": {"files": files, "rendered": [["a sample in clear", 1.0]]}}))
        (place / "known").mkdir(exist_ok=True)
        (place / "known" / f"{final.name}.json").write_text(json.dumps({"train": final.name, "eval": None}))
        scratch.rename(final)
    return str(final)


def fake_hall(directory: Path, eager: bool = True, held: bool = False) -> tuple[BackendFactory, list[FakeCluster], list[FakeIntake]]:
    """A hall, and what it has made so far."""
    clusters: list[FakeCluster] = []
    intakes: list[FakeIntake] = []

    def make(_: Mapping[str, str]) -> FakeCluster:
        clusters.append(FakeCluster(directory, eager))
        return clusters[-1]

    def intake(_: object, __: Path, on_answer: Callable[[dict[str, Any]], None]) -> FakeIntake:
        intakes.append(FakeIntake(on_answer, held))
        return intakes[-1]

    return BackendFactory(Devices("cpu", (0, 1)), make, intake), clusters, intakes
