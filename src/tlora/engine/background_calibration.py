"""Measures a base's speed while its worker trains: one micro-batch at a time, between those of the jobs.

Jobs do not wait for it: it begins after a job's first step, or when there is no job, takes a share of the time, and memory only if jobs
leave some. It touches no state of theirs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from tlora.engine.calibration import (
    MEMBERS,
    PROBES,
    Attempt,
    CalibrationError,
    MadeUpJobs,
    Timed,
    batch_tokens,
    device_name,
    find_deadly,
    fitted,
    keep,
    key_of,
    probe,
    recall,
    worth_trying,
)
from tlora.errors import TloraError
from tlora.group.job_run import JobRun
from tlora.link.log import note
from tlora.protocol import BaseSpeed
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import Load, Measured

SHARE = 0.25  # of the time that it takes at most while jobs train
ROOM_SECONDS = 5.0  # until it looks for memory again

HasRoom = Callable[[Sequence[JobRun], int], bool]
"""Whether these jobs fit next to all that are here, and a micro-batch of so many tokens in which no layer is recomputed."""


class BackgroundCalibration:
    """Call `turn` whenever `is_due`, until it is `over`. `resident`: the made-up jobs that are in the model now; `points`: what has been
    timed; `spent_seconds`: in turns.
    """

    def __init__(
        self,
        key: str,
        model: SuperModel,
        has_room: HasRoom,
        tell: Callable[[Measured], object],
        note: Callable[[str], object],
    ) -> None:
        """`key`: of `calibration.key_of`. `tell` gets the result, `note` a line about it, or why there is none."""
        self._key, self._model, self._has_room, self._tell, self._note = key, model, has_room, tell, note
        self._plan = [(1, tokens) for tokens in PROBES] + [(MEMBERS, PROBES[1] // MEMBERS)]  # jobs, and tokens of each
        self.points: list[Timed] = []
        self._probe: Generator[None, None, Timed] | None = None
        self._files = ExitStack()
        self._made: MadeUpJobs | None = None
        self._runs: tuple[JobRun, ...] = ()  # of the next probe
        self._attempt: Attempt | None = None
        self._not_before = self.spent_seconds = 0.0
        self._left_out_for_jobs = False
        self.resident: tuple[JobRun, ...] = ()
        self.over = False

    def is_due(self, *, beside_jobs: bool) -> bool:
        """Whether the next turn may run now: with `beside_jobs` it must leave them their share of the time."""
        return not self.over and (not beside_jobs or time.monotonic() >= self._not_before)

    def turn(self, begin: Callable[[tuple[str, ...]], object], *, beside_jobs: bool) -> None:
        """Compute one micro-batch. `begin` is called with its jobs first: these, and no user's, are blamed if it kills the process. The
        last turn reports the result.
        """
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)  # what is left of the jobs' micro-batch is their time
        began, recompute = time.monotonic(), self._model.recompute
        self._model.recomputed_layers = 0
        try:
            self._attempt = self._attempt or Attempt(self._key)
            with self._attempt.mark():
                self._advance(begin, beside_jobs)
        except (TloraError, RuntimeError, OSError, MemoryError) as error:  # a full disk among them: jobs are trained all the same
            self._note(f"the base's speed was not measured, and is taken to be that of the nearest base that is known: {error}")
            self.close()
        finally:
            self._model.recompute = recompute
            now = time.monotonic()
            self.spent_seconds += now - began
            self._not_before = max(self._not_before, now + (now - began) * (1 / SHARE - 1))

    def step_aside(self) -> None:
        """Free the memory for a job. The interrupted probe is timed again when there is room."""
        if self._probe is not None:
            self._probe.close()
            self._probe, self.resident = None, ()
            self._not_before = time.monotonic() + ROOM_SECONDS

    def close(self) -> None:
        """Remove the made-up jobs from the model and the disk."""
        self.step_aside()
        self._files.close()
        self.over = True

    def _advance(self, begin: Callable[[tuple[str, ...]], object], beside_jobs: bool) -> None:
        if self._probe is None:
            self._probe = self._next_probe(beside_jobs)
        if self._probe is None:
            return
        begin(tuple([run.spec.name for run in self.resident]))
        try:
            next(self._probe)
        except StopIteration as end:
            self.points.append(end.value)
            self._end_probe()
        except CalibrationError:  # it takes more memory than there is
            if not self.points or self._plan[0][0] > 1:
                raise
            self._end_probe()
            self._leave_larger_out()
        if not self._plan:
            self._finish(fitted(self.points))

    def _end_probe(self) -> None:
        del self._plan[0]
        self._probe, self.resident = None, ()

    def _leave_larger_out(self) -> None:
        """Skip larger probes; the rate is then that of the earlier ones."""
        self._plan, self._runs = [each for each in self._plan if each[0] > 1], ()

    def _next_probe(self, beside_jobs: bool) -> Generator[None, None, Timed] | None:
        """The next probe; None if memory does not suffice now. The largest probe can be skipped, the others wait for memory."""
        members, tokens = self._plan[0]
        if members == 1 and self.points and not worth_trying(tokens, self.points[-1], self._model.device.type):
            self._leave_larger_out()
            members, tokens = self._plan[0]
        runs = self._runs = self._runs or tuple([self._made_up().job(tokens) for _ in range(members)])
        if self._has_room(runs, batch_tokens(runs)):
            self.resident, self._runs = runs, ()
            return probe(self._model, runs)
        if members == 1 and self.points:
            self._left_out_for_jobs |= beside_jobs
            self._leave_larger_out()
        elif beside_jobs:
            self._not_before = time.monotonic() + ROOM_SECONDS
        else:
            raise CalibrationError(f"a micro-batch of {batch_tokens(runs)} tokens does not fit below memory_limit")
        return None

    def _made_up(self) -> MadeUpJobs:
        if self._made is None:
            directory = self._files.enter_context(tempfile.TemporaryDirectory(prefix="tlora-speed-"))
            self._made = MadeUpJobs(self._model, Path(directory))
        return self._made

    def _finish(self, speed: BaseSpeed) -> None:
        launch, floor, member = (1e3 * seconds for seconds in (speed.launch_seconds, speed.floor_seconds, speed.member_seconds))
        self._note(
            f"the base's speed was measured in {self.spent_seconds:.1f} s: {speed.tokens_per_second:,.0f} tokens/s, {launch:.1f} ms a "
            f"micro-batch, {floor:.1f} ms at least, {member:.1f} ms a further job"
        )
        self.close()
        measured = Measured(device_name(self._model.device), speed)
        try:
            if not self._left_out_for_jobs:  # else the next load may find room for all
                keep(self._key, measured)
        except (TloraError, OSError) as error:
            self._note(f"the base's speed is measured again at the next load: {error}")
        self._tell(measured)


def calibrate_in_background(load: Load, model: SuperModel, has_room: HasRoom, tell: Callable[[Measured], object]) -> BackgroundCalibration:
    """Over at once where `load` does not ask for the base's speed, it is known, which is told, or a worker that measured it was killed."""
    device = device_name(model.device)
    key = key_of(load, device) if load.calibrate else ""
    calibration = BackgroundCalibration(key, model, has_room, tell, note)
    if not load.calibrate:
        calibration.close()
    elif (measured := recall(key, device)) is not None:
        tell(measured)
        calibration.close()
    elif (deadly := find_deadly(key)) is not None:
        note(
            "an earlier worker was killed while this base's speed was measured, so that it is taken to be that of the nearest base "
            f"that is known. To measure it again, remove {deadly}"
        )
        calibration.close()
    return calibration
