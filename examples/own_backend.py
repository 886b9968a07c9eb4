"""A cluster of your own under the scheduler: `python examples/own_backend.py`

A back end has three verbs: `now`, `poll` (what has happened) and `execute` (an action of the scheduler). This one runs each group as a
thread that counts optimizer steps; put your launcher in its place. A user submits two jobs, holds one and releases it again.
"""

import queue
import threading
import time
from collections.abc import Callable

from tlora.cluster.controller import run
from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GroupReady,
    JobFinished,
    JobGroup,
    JobProfile,
    JobRequest,
    JobSubmitted,
    NodeAdded,
    RejectJob,
    StartGroup,
    StopGroup,
)
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.shape.hardware import cost_model

STEPS, STEP_SECONDS = 20, 0.01


class ThreadCluster:
    """One node of `gpus` GPUs. `steps` are the optimizer steps that each job has done."""

    def __init__(self, gpus: int) -> None:
        self.steps: dict[str, int] = {}
        self._start, self._open = time.monotonic(), set[str]()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._stops: dict[str, Callable[[], None]] = {}  # group -> what ends its thread
        self._events.put(NodeAdded("node", tuple(range(gpus))))

    def ask(self, event: JobSubmitted | JobRequest) -> None:
        if isinstance(event, JobSubmitted):
            self._open.add(event.job_id)
        self._events.put(event)

    def now(self) -> float:
        return time.monotonic() - self._start

    def poll(self) -> list[Event]:
        if not self._open:
            return []  # nothing will happen any more
        event = self._events.get()
        if isinstance(event, JobFinished):
            self._open.discard(event.job_id)
        return [event]

    def execute(self, action: Action) -> None:
        match action:
            case StartGroup(group):
                self._run(group)
            case ChangeGroup(group):
                self._stops.pop(group.group_id)()
                self._run(group)
            case StopGroup(group_id):
                self._stops.pop(group_id)()
            case RejectJob(job_id):
                self._open.discard(job_id)

    def _run(self, group: JobGroup) -> None:
        ended = threading.Event()
        thread = threading.Thread(target=self._train, args=(group, ended), daemon=True)

        def stop() -> None:
            ended.set()
            thread.join()

        self._stops[group.group_id] = stop
        thread.start()

    def _train(self, group: JobGroup, ended: threading.Event) -> None:
        self._events.put(GroupReady(group.group_id))
        left = [name for name in group.job_ids if self.steps.get(name, 0) < STEPS]
        while left and not ended.wait(STEP_SECONDS):
            for name in left:
                self.steps[name] = self.steps.get(name, 0) + 1
                if self.steps[name] == STEPS:
                    self._events.put(JobFinished(name))
            left = [name for name in left if self.steps[name] < STEPS]


def main() -> list[Event | Action]:
    """All that has happened and was done about it, in order."""
    cluster, told = ThreadCluster(gpus=2), list[Event | Action]()
    for name in ("first", "second"):
        cluster.ask(JobSubmitted(name, "llama-3-8b", 1, JobProfile(2048.0, STEPS, 512, 10_000_000)))
    cluster.ask(JobRequest("second", "hold"))
    cluster.ask(JobRequest("second", "release"))

    def record(seconds: float, item: Event | Action) -> None:
        told.append(item)
        print(f"{seconds:6.2f} s  {item}")  # noqa: T201

    run(Scheduler(POLICIES["residual_capacity-no-growth"](), cost_model()), cluster, record)
    return told


if __name__ == "__main__":
    main()
