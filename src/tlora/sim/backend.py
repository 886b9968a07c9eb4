"""A cluster that is computed: one more back end of the controller, with a clock that jumps from event to event.

Owns the clock, the GPUs and what becomes of actions. Speeds are `flow.py`'s, windows of steps `simulated_job.py`'s, and what differs from
the scheduler's belief `conditions.py`'s. Decides nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from tlora.protocol import (
    Action,
    ChangeGroup,
    Event,
    GpusLost,
    GroupReady,
    JobFailed,
    JobFinished,
    JobGroup,
    JobRequest,
    RejectJob,
    StartGroup,
    StepsDone,
    StopGroup,
    Tick,
)
from tlora.shape.cost import CostModel
from tlora.shape.sharing import fastest_step_seconds
from tlora.sim.conditions import Conditions
from tlora.sim.flow import GroupFlow, begin, change_gpus, enter, leave, plan_ahead, settle, use_new_gpus
from tlora.sim.machines import ClusterShape, Machines
from tlora.sim.mapping import MappedJob
from tlora.sim.records import FinalState, GroupSpan, Sample
from tlora.sim.simulated_job import SimulatedJob
from tlora.sim.stages import memory_found

SETTLED_SECONDS = 900.0  # ticks continue this long after the last change if no job waits
MOST_TICKS = 16  # the most that the time between ticks grows to while they change nothing, in times of its own
CHECK_SECONDS = 1800.0  # between a group's reports of its own accord, where its speed is not as believed


class SimulatedCluster:
    """Users may `submit`, `cancel`, `hold` and `release` jobs at any time, now or for a later time. `poll` is empty when nothing is left
    to happen, and goes on when more is asked. `jobs` are those that have come, `spans` and `samples` what there was to see until now.
    """

    def __init__(self, shape: ClusterShape, cost: CostModel, conditions: Conditions) -> None:
        """`cost` is what the cluster follows, without the errors of `conditions`."""
        self.jobs: dict[str, SimulatedJob] = {}
        self.spans: list[GroupSpan] = []
        self.samples: list[Sample] = []
        self._shape, self._cost, self._conditions = shape, cost, conditions
        self._exact = conditions.exact
        self._saturated = conditions.saturated or {base: constants.tokens_per_second for base, constants in cost.constants.items()}
        self._now, self._serial, self._alive, self._waiting = 0.0, 0, 0, 0
        self._arrives: dict[str, float] = {}  # job -> its submission
        self._asked: list[tuple[float, int, MappedJob | JobRequest]] = []  # a heap: seconds, serial, what users ask
        self._asked_at = math.inf  # of the first of them
        self._groups: dict[str, GroupFlow] = {}
        self._touched: dict[str, GroupFlow] = {}  # whose next event is to be worked out anew
        self._upcoming: list[tuple[float, int, GroupFlow, int]] = []  # a heap: seconds, serial, group, its version
        self._changed_at, self._tick_at, self._tick_gap = 0.0, shape.tick_seconds, shape.tick_seconds
        self._machines = Machines(shape, conditions)
        self._outbox: list[Event] = [*self._machines.added()]
        if (told := memory_found(cost, shape.num_gpus)) is not None:
            self._outbox.append(told)
        self._unsampled = False
        self._tokens_per_second = self._useful_gpus = 0.0  # for the next sample

    # -- what users ask ------------------------------------------------------------------------------------------------

    def submit(self, job: MappedJob) -> None:
        """It comes at its `submit_seconds`, or now if these are over."""
        self._arrives[job.job.job_id] = job.submit_seconds
        self._ask(job, job.submit_seconds)

    def ask(self, request: JobRequest, at_seconds: float = 0.0) -> None:
        """At that time or now, but not before the job has come. One that is cancelled ends as far as it is; one that is held leaves its
        group with a checkpoint, as soon as the scheduler hears of it. A job that has ended is left alone.
        """
        self._ask(request, max(at_seconds, self._arrives[request.job_id]))

    def _ask(self, request: MappedJob | JobRequest, at_seconds: float) -> None:
        self._serial += 1
        heapq.heappush(self._asked, (max(at_seconds, self._now), self._serial, request))
        self._asked_at = self._asked[0][0]

    # -- the three verbs of a back end ---------------------------------------------------------------------------------

    def now(self) -> float:
        return self._now

    def poll(self) -> list[Event]:
        while True:
            if self._touched:
                self._plan_touched()
            if self._outbox:
                events, self._outbox = self._outbox, []
                return events
            if not self._step():
                if self._unsampled:
                    self._sample()
                return []

    def execute(self, action: Action) -> None:
        """Takes actions on groups and jobs that are no longer there: the scheduler may know it late."""
        self._changes()
        match action:
            case StartGroup():
                self._start(action.group)
            case ChangeGroup():
                flow = self._groups.get(action.group.group_id)
                if flow is not None:
                    self._change(flow, action.group)
            case StopGroup():
                flow = self._groups.get(action.group_id)
                if flow is not None:
                    self._end(flow, lost=False)
            case RejectJob():
                self._end_job(self.jobs[action.job_id], "rejected")

    # -- time ----------------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Go on to the next thing that happens. False if nothing ever will."""
        heap = self._upcoming
        while heap and heap[0][2].version != heap[0][3]:
            heapq.heappop(heap)
        group_at = heap[0][0] if heap else math.inf
        asked_at, failure_at, tick_at = self._asked_at, self._machines.next_at, self._tick_at
        if (not self._alive and asked_at == math.inf) or (tick_at == math.inf and not self._is_coming()):
            return False
        at = min(group_at, asked_at, failure_at, tick_at)
        if at > self._now:
            if self._unsampled:
                self._sample()
            self._now = at
        if at == group_at:
            self._advance(heapq.heappop(heap)[2])
        elif at == failure_at:
            self._fail_or_repair()
        elif at == asked_at:
            self._take_request()
        else:
            self._tick()
        return True

    def _is_coming(self) -> bool:
        """Whether something happens that is neither a failure nor a tick."""
        return bool(self._upcoming) or self._asked_at < math.inf or self._machines.repairs

    def _tick(self) -> None:
        """Ticks come while a job waits, and for a while after each change, as policies have times of rest; otherwise there is nothing to
        decide.

        The first comes so long after the last change or action; each that is answered by no action doubles the time to the next.
        """
        self._tick_gap = min(2 * self._tick_gap, MOST_TICKS * self._shape.tick_seconds)
        settled = self._now - self._changed_at >= SETTLED_SECONDS
        self._tick_at = math.inf if settled and not (self._waiting and self._is_coming()) else self._now + self._tick_gap
        self._outbox.append(Tick())

    def _changes(self) -> None:
        self._changed_at, self._tick_gap = self._now, self._shape.tick_seconds
        self._tick_at = self._now + self._tick_gap

    def _take_request(self) -> None:
        _, _, request = heapq.heappop(self._asked)
        self._asked_at = self._asked[0][0] if self._asked else math.inf
        if isinstance(request, MappedJob):
            self._arrive(request)
            return
        job = self.jobs[request.job_id]
        if job.state == "unfinished":
            if request.verb == "cancel":
                self._end_job(job, "cancelled")
            self._happened(request)

    def _arrive(self, arrival: MappedJob) -> None:
        spec = arrival.job
        tokens, speed, alone, most, fastest = spec.profile.tokens_per_step, 1.0, math.nan, 1, 0.0
        if not self._exact:
            tokens *= self._conditions.length_of(spec.job_id)
            speed = self._conditions.speed_of(spec.job_id)
        if spec.base_model in self._cost.constants and spec.gpus > 0 and tokens > 0:
            nodes = math.ceil(spec.gpus / self._shape.gpus_per_node)
            alone = self._cost.alone_step_seconds(spec.base_model, tokens, spec.gpus, nodes)
            most = min(arrival.most_gpus, self._shape.num_gpus)
            fastest = fastest_step_seconds(self._cost, spec.base_model, tokens, most, self._shape.gpus_per_node)
            if not self._exact:
                alone *= speed * self._conditions.drift_at(self._now, spec.base_model)
        assert spec.job_id not in self.jobs, f"{spec.job_id} comes twice"
        self.jobs[spec.job_id] = SimulatedJob(spec, arrival.ends, self._now, tokens, alone, speed, most, fastest)
        self._alive, self._waiting = self._alive + 1, self._waiting + 1
        self._happened(spec)

    def _happened(self, event: Event) -> None:
        self._outbox.append(event)
        self._unsampled = True
        self._changes()

    def _advance(self, flow: GroupFlow) -> None:
        """What was planned in a group happens now."""
        settle(flow, self._now)
        if flow.finishing is not None:
            self._finish(flow.finishing)
        elif self._now >= flow.loaded_at:
            begin(flow, self._machines.num_nodes(flow.wanted.gpus))
        elif self._now >= flow.ranks_at:
            use_new_gpus(flow, self._now, self._machines, self._conditions)
        elif not self._exact:
            flow.stale = True
            self._report(flow.members.values())
        if flow.members:  # else nothing more happens in it until it is stopped
            self._touched[flow.wanted.group_id] = flow

    def _finish(self, job: SimulatedJob) -> None:
        self._end_job(job, job.ends, job.total_steps)
        name = job.spec.job_id
        if job.ends in ("done", "unknown"):
            self._happened(JobFinished(name))
        else:
            self._happened(JobRequest(name, "cancel") if job.ends == "cancelled" else JobFailed(name, "it failed in the trace"))

    def _end_job(self, job: SimulatedJob, state: FinalState, steps: float | None = None) -> None:
        """With `steps` done, or as many as it has by now, in a group or none."""
        name = job.group_id
        if name is None:
            self._waiting -= 1
        else:
            flow = self._groups[name]
            settle(flow, self._now)
            self._close_span(flow)
            leave(flow, job, self._now, job.steps if steps is None else steps)
            flow.version += 1  # what was planned with it does not happen
            if flow.members:
                self._touched[name] = flow
        job.state, job.finished_seconds = state, self._now
        self._alive -= 1
        self._unsampled = True

    def _fail_or_repair(self) -> None:
        event = self._machines.fail_or_repair()
        if isinstance(event, GpusLost):
            owner = self._machines.owner
            for name in dict.fromkeys(owner[gpu] for gpu in event.gpus if gpu in owner):
                self._end(self._groups[name], lost=True)
        self._happened(event)

    def _plan_touched(self) -> None:
        """The next event of each group in which something has changed."""
        now, groups = self._now, self._groups
        for name, flow in self._touched.items():
            if groups.get(name) is not flow:
                continue
            before = flow.tokens_per_second
            at = plan_ahead(flow, now, self._cost, self._conditions)
            if flow.tokens_per_second != before:
                self._count_tokens(flow.wanted.base_model, flow.tokens_per_second - before)
            if not self._exact and flow.members and at > now + CHECK_SECONDS:
                at, flow.finishing = now + CHECK_SECONDS, None
            self._plan(flow, at)
            if flow.announce and not flow.stands:
                flow.announce = False
                self._report([job for job in flow.came if job.group_id == name and job.joined_steps])
                flow.came.clear()
                self._outbox.append(GroupReady(name))
        self._touched.clear()

    def _plan(self, flow: GroupFlow, at: float) -> None:
        """Its next event, in place of the one that it had."""
        flow.version += 1
        if at < math.inf:
            self._serial += 1
            heapq.heappush(self._upcoming, (at, self._serial, flow, flow.version))

    def _report(self, jobs: Iterable[SimulatedJob]) -> None:
        for job in jobs:
            if job.runs and job.group_id is not None:
                self._outbox.append(StepsDone(job.spec.job_id, job.group_id, job.steps, job.step_seconds))

    # -- groups --------------------------------------------------------------------------------------------------------

    def _start(self, group: JobGroup) -> None:
        name = group.group_id
        if not self._machines.take(name, group.gpus):
            return
        assert name not in self._groups, f"{name} is started twice"
        start_seconds = self._machines.start_seconds(group.base_model, group.gpus, f"{name}|{self._now}")
        flow = self._groups[name] = GroupFlow(group, self._now + start_seconds, self._now, self._now, {}, [], group.gpus)
        if flow.loaded_at == self._now:
            begin(flow, self._machines.num_nodes(group.gpus))
            self._touched[name] = flow
        self._enter_new(flow, group)
        self._plan(flow, flow.loaded_at)
        self._unsampled = True

    def _change(self, flow: GroupFlow, group: JobGroup) -> None:
        settle(flow, self._now)
        self._close_span(flow)
        before = flow.wanted
        for job in [job for name, job in flow.members.items() if name not in group.job_ids]:
            self._let_go(flow, job)
        self._report(flow.members.values())
        weights = dict(zip(group.job_ids, group.weights, strict=True))
        for name, job in flow.members.items():
            job.weight = weights[name]
        flow.wanted, flow.stale, flow.announce = group, True, True
        self._touched[group.group_id] = flow
        if set(group.gpus) != set(before.gpus):
            self._unsampled, whole = True, self._cost.is_whole(group.base_model)
            if not change_gpus(flow, before.gpus, whole, self._now, self._machines, self._conditions):
                self._end(flow, lost=True)
                return
        if self._enter_new(flow, group):
            flow.pauses = self._conditions.moves.join_micro_batches

    def _enter_new(self, flow: GroupFlow, group: JobGroup) -> bool:
        """The members that it shall have and has not. Whether there are any."""
        moves, any_new = self._conditions.moves, False
        for name, weight in zip(group.job_ids, group.weights, strict=True):
            job = self.jobs[name]
            if name in flow.members or job.state != "unfinished":
                continue
            moved = job.left_at == self._now and not math.isnan(job.started_seconds)
            seconds = 0.0 if not flow.loaded else moves.join_seconds * self._conditions.delay_of(f"{name}|{self._now}")
            enter(flow, job, weight, self._now, seconds + moved * moves.checkpoint_seconds)
            self._waiting -= 1
            any_new = True
        return any_new

    def _let_go(self, flow: GroupFlow, job: SimulatedJob) -> None:
        """It checkpoints and leaves; of an optimizer step that is under way nothing is kept."""
        job.regroupings += not math.isnan(job.started_seconds)
        leave(flow, job, self._now, job.whole_steps)
        self._waiting += 1

    def _end(self, flow: GroupFlow, lost: bool) -> None:
        """Without `lost` its members checkpoint first; with it they go back to their last checkpoint."""
        settle(flow, self._now)
        self._close_span(flow)
        for job in list(flow.members.values()):
            if lost:
                leave(flow, job, self._now, job.checkpointed_steps(self._now, self._conditions.moves.checkpoint_interval_seconds))
                job.left_at = -math.inf  # wherever it goes on, that is no move
                self._waiting += 1
            else:
                self._let_go(flow, job)
        del self._groups[flow.wanted.group_id]
        self._machines.release(flow.wanted.gpus)
        flow.version += 1
        self._count_tokens(flow.wanted.base_model, -flow.tokens_per_second)
        self._unsampled = True

    def _close_span(self, flow: GroupFlow) -> None:
        """Its members or GPUs are about to change."""
        if flow.members and self._now > flow.changed_at:
            wanted = flow.wanted
            self.spans.append(GroupSpan(wanted.group_id, wanted.base_model, wanted.gpus, flow.changed_at, self._now, tuple(flow.members)))
        flow.changed_at = self._now

    # -- what there is to see ------------------------------------------------------------------------------------------

    def _count_tokens(self, base: str, more_per_second: float) -> None:
        self._tokens_per_second += more_per_second
        self._useful_gpus += more_per_second / self._saturated[base]
        self._unsampled = True

    def _sample(self) -> None:
        """How things stand from the last change until now; called before the clock goes on."""
        self._unsampled = False
        waiting, machines = self._waiting, self._machines
        running, gpus = self._alive - waiting, machines.num_gpus
        if not running:
            self._tokens_per_second = self._useful_gpus = 0.0  # rid of what rounding has left
        tokens = self._tokens_per_second if self._tokens_per_second > 0 else 0.0
        share = self._useful_gpus / gpus if gpus and tokens else 0.0
        self.samples.append(Sample(self._now, waiting, running, len(machines.owner), share, tokens, gpus))
