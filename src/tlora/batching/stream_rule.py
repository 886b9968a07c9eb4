"""What must hold of every stream of micro-batches, checked as it flows: a job's global batch g + 1 enters when all of its batch g has left.

Several micro-batches of one global batch are in flight at a time, where a base has stages. Pure; each event costs microseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tlora.batching.pack import MicroBatch


@dataclass
class _Job:
    step: int = -1  # of the global batch that is in the stream, or was the last
    samples: set[int] = field(default_factory=set[int])  # of it, as far as they were announced
    in_flight: int = 0  # micro-batches with its samples, announced and not computed
    has_left: bool = True  # its optimizer step is taken


class StreamRule:
    """Each method is an event; it raises AssertionError where the stream breaks the rule. `depth`: micro-batches announced at most."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._jobs: dict[str, _Job] = {}
        self._flight: deque[MicroBatch] = deque()

    def enter(self, job_id: str) -> None:
        assert job_id not in self._jobs, f"{job_id} enters twice"
        assert not self._flight, f"{job_id} enters while {len(self._flight)} micro-batches are in flight"
        self._jobs[job_id] = _Job()

    def announce(self, packed: MicroBatch, steps: Mapping[str, int]) -> None:
        """`steps`: of each of its jobs, how many optimizer steps came before."""
        assert len(self._flight) < self._depth, f"more than {self._depth} micro-batches are in flight"
        for row in packed.rows:
            assert row.job_id in self._jobs, f"samples of {row.job_id}, which is not here"
            if packed.kind == "train":
                self._add(row.job_id, row.sample, steps[row.job_id])
        for job_id in {row.job_id for row in packed.rows}:
            self._jobs[job_id].in_flight += 1
        self._flight.append(packed)

    def _add(self, job_id: str, sample: int, step: int) -> None:
        job = self._jobs[job_id]
        if step != job.step or job.has_left:
            assert step > job.step, f"{job_id}: samples of batch {step} after batch {job.step} has left"
            assert job.has_left, f"{job_id}: batch {step} enters before batch {job.step} has left"
            assert not job.in_flight, f"{job_id}: batch {step} enters beside other work of the job"
            job.step, job.has_left, job.samples = step, False, set()
        assert sample not in job.samples, f"{job_id}: sample {sample} twice in batch {step}"
        job.samples.add(sample)

    def compute(self, packed: MicroBatch) -> None:
        """In the order in which they were announced."""
        assert self._flight and self._flight[0] is packed, "a micro-batch is computed out of its turn"
        self._flight.popleft()
        for job_id in {row.job_id for row in packed.rows}:
            if job_id in self._jobs:
                self._jobs[job_id].in_flight -= 1

    def leaves(self, job_id: str, step: int, samples: int) -> None:
        """The gradient of the job's batch is whole, and its optimizer step is taken. `samples`: of it that this process computes."""
        job = self._jobs[job_id]
        assert not job.in_flight, f"{job_id}: batch {step} leaves with {job.in_flight} micro-batches in flight"
        if job.has_left:  # of a batch of which this process computes nothing
            assert step > job.step, f"{job_id}: a second step for batch {step}"
            job.step, job.samples = step, set()
        assert step == job.step, f"{job_id}: a step for batch {step}, and batch {job.step} is in the stream"
        assert len(job.samples) == samples, f"{job_id}: batch {step} leaves after {len(job.samples)} of {samples} samples"
        job.has_left = True

    def leave(self, job_id: str) -> None:
        """The job is taken out."""
        job = self._jobs.pop(job_id, None)
        assert job is None or not job.in_flight, f"{job_id} is taken out with {job.in_flight if job else 0} micro-batches in flight"

    def begin_anew(self, job_ids: Collection[str]) -> None:
        """Nothing is in flight any more, and the batches of these jobs start over where they have not left."""
        self._flight.clear()
        for job_id, job in self._jobs.items():
            job.in_flight = 0
            if job_id in job_ids and not job.has_left:
                job.step, job.has_left = job.step - 1, True
