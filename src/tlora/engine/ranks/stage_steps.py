"""On the last stage: optimizer steps of adapters of which every stage has its own layers' part.

Each stage measures its part when a global batch has gone back through it. Here the measures of all are put together in the order of the
whole adapter and judged as one process judges its own, so that norm, clipping and skipped steps are those of one process, to the bit.
Where the verdict is open, every stage looks at its part of the update. Then all step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tlora.adapters.adamw import StepStats
from tlora.adapters.layout import AdapterLayout
from tlora.engine.messages import StageChange
from tlora.engine.ranks.stage_links import StageLinks
from tlora.group.isolation import Failure, try_call
from tlora.kernels.device import ToHost, own_stream
from tlora.supermodel.optimizer_steps import OPEN, REFUSED, PartStep, QueuedSteps
from tlora.supermodel.stage import AdapterCut
from tlora.supermodel.supermodel import SuperModel


@dataclass
class _Due:
    """Measures that the stages before will send of a job's global batch; not `wanted` where the job has left."""

    job_id: str
    cut: AdapterCut
    wanted: bool = True


@dataclass
class _Step:
    """A job's step: its part here; then the verdict; where that is open, the checks that have come. `error`: why it is not taken."""

    cut: AdapterCut
    part: PartStep | None
    error: BaseException | None = None
    norm: float = 0.0
    clip: float = 1.0
    verdict: float | None = None
    checks: list[ToHost] = field(default_factory=list[ToHost])

    @property
    def is_due(self) -> bool:
        """Whether nothing more is to come of other stages."""
        if self.error is not None or self.verdict != OPEN:
            return self.error is not None or self.verdict is not None
        return len(self.checks) == 1 + sum(bool(layout.shapes) for layout in self.cut.parts[:-1])


@dataclass
class _Group:
    """Steps of jobs that were measured together, when the device has come to `measured`."""

    steps: dict[str, _Step]
    measured: torch.Event | None


class StageSteps:
    """`cuts`: of the jobs that are here. `order` sends a change to the stages before."""

    def __init__(self, model: SuperModel, links: StageLinks, cuts: Mapping[str, AdapterCut], order: Callable[[StageChange], None]) -> None:
        self._model, self._links, self._cuts, self._order = model, links, cuts, order
        self._rule = model.optimizer.part_rule
        self._due: deque[_Due] = deque()
        self._come: dict[str, list[Tensor]] = {}  # measures of the stages before
        self._groups: deque[_Group] = deque()
        self._checks: deque[tuple[_Step, int]] = deque()  # that stages will send: of a step, by a rank
        # What is judged must not wait for products that are queued: the stages before wait for it.
        self._beside = own_stream(links.device, "steps", priority=-1) if links.device.type == "cuda" else None

    def announced(self, job_ids: Sequence[str]) -> None:
        """A micro-batch ends the global batches of these jobs."""
        self._due += [_Due(job_id, self._cuts[job_id]) for job_id in job_ids]

    def measure(self, job_ids: Sequence[str]) -> None:
        """Their batches are through here."""
        steps: dict[str, _Step] = {}
        for job_id in job_ids:
            part = try_call(self._model.begin_step, job_id)
            failed = isinstance(part, Failure)
            steps[job_id] = _Step(self._cuts[job_id], None if failed else part, part.error if failed else None)
        event = torch.cuda.current_stream(self._links.device).record_event() if self._beside is not None else None
        self._groups.append(_Group(steps, event))

    @property
    def awaits(self) -> bool:
        return bool(self._due or self._groups)

    @property
    def ready(self) -> bool:
        """Whether the jobs that were measured first can step. Reads what has come, and judges what is whole."""
        while self._due and self._has_come(self._due[0]):
            self._take(self._due.popleft())
        if not self._groups:
            return False
        group = self._groups[0]
        open_steps = {job_id: step for job_id, step in group.steps.items() if step.verdict is None and step.error is None}
        if not open_steps.keys() <= self._come.keys():
            return False
        if open_steps:
            self._judge(open_steps, group.measured)
        while self._checks and self._links.checks[self._checks[0][1]].has_next:
            self._take_check(*self._checks.popleft())
        return all(step.is_due for step in group.steps.values())

    def update(self) -> QueuedSteps:
        """Of those jobs, at all stages. What comes of them is known here already."""
        stats: dict[str, StepStats] = {}
        errors: dict[str, Exception] = {}
        for job_id, step in self._groups.popleft().steps.items():
            if step.part is None or step.error is not None:
                errors[job_id] = step.error  # type: ignore[assignment]
                continue
            applied = step.verdict != REFUSED and not any(check.read()[0] for check in step.checks)
            self._order(StageChange("step", job_id, clip=step.clip, applied=applied))
            stats[job_id] = step.part.apply(step.norm, step.clip, applied=applied)
        return QueuedSteps(lambda: stats, errors, done=self._beside is None)

    def drop(self, job_id: str) -> None:
        """The job has left: what is on its way of it is not wanted."""
        self._come.pop(job_id, None)
        for group in self._groups:
            group.steps.pop(job_id, None)
        for due in self._due:
            due.wanted &= due.job_id != job_id

    def collect(self) -> None:
        """Take all that is on its way; every stage has sent it, or will without another order."""
        while self._due:
            self._take(self._due.popleft())
        while self._checks:
            self._take_check(*self._checks.popleft())

    def begin_anew(self) -> None:
        for forgotten in (self._due, self._come, self._groups, self._checks):
            forgotten.clear()

    def _judge(self, steps: Mapping[str, _Step], measured: torch.Event | None) -> None:
        """Read the verdicts, and have the open ones checked everywhere."""
        judged: dict[str, ToHost] = {}
        with self._stream():
            if self._beside is not None and measured is not None:
                self._beside.wait_event(measured)
            for job_id, step in steps.items():
                assert step.part is not None
                measured_RE = step.cut.put_together([*self._come.pop(job_id), step.part.measured_RE], self._rule.columns)
                judged[job_id] = ToHost(step.part.judge(measured_RE))
        for job_id, step in steps.items():
            step.norm, step.clip, step.verdict = judged[job_id].read()
            if step.verdict == OPEN:
                self._check(job_id, step)

    def _check(self, job_id: str, step: _Step) -> None:
        assert step.part is not None
        own = try_call(step.part.check, step.clip)
        if isinstance(own, Failure):
            step.error = own.error
            return
        step.checks.append(ToHost(own))
        self._order(StageChange("check", job_id, clip=step.clip))
        self._checks += [(step, rank) for rank, layout in enumerate(step.cut.parts[:-1]) if layout.shapes]

    # -- what the stages before send -----------------------------------------------------------------------------------

    def _has_come(self, due: _Due) -> bool:
        return all(self._links.measures[rank].has_next for rank, layout in enumerate(due.cut.parts[:-1]) if layout.shapes)

    def _take(self, due: _Due) -> None:
        with self._stream():
            come = [self._receive(rank, layout) for rank, layout in enumerate(due.cut.parts[:-1])]
        if due.wanted:
            self._come[due.job_id] = come

    def _receive(self, rank: int, layout: AdapterLayout) -> Tensor:
        """The measures of a part; nothing is sent of one without modules."""
        shape, device = (self._rule.rows, sum(map(self._rule.columns, layout.shapes))), self._links.device
        if not layout.shapes:
            return torch.empty(shape, dtype=torch.float64, device=device)
        return self._links.measures[rank].receive(shape, torch.float64, device)

    def _take_check(self, step: _Step, rank: int) -> None:
        with self._stream():
            step.checks.append(ToHost(self._links.checks[rank].receive((1,), torch.float64, self._links.device)))

    def _stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)
