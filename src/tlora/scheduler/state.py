"""What the scheduler believes of a cluster: its GPUs, jobs, groups. All changes go through the methods here and of `GpuPool`.

A group here is what was last asked for: asking and having differ until `GroupReady`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from tlora.protocol import BaseSpeed, GpusAsked, JobGroup, JobSubmitted, StepsDone
from tlora.scheduler.gpu_kinds import GpuKinds
from tlora.scheduler.gpu_memory import GpuMemory
from tlora.scheduler.gpu_pool import GpuPool
from tlora.scheduler.job import RECENT_SECONDS, Job, Lack
from tlora.scheduler.rooms import Rooms
from tlora.scheduler.tenants import Tenants
from tlora.shape.cost import CostModel
from tlora.shape.sharing import group_step_seconds

REMEMBERED_SECONDS = 3 * RECENT_SECONDS  # for so long a job that has ended is among `ended_late`
LONG_WAIT_SECONDS = 3600.0


@dataclass(slots=True)
class Group:
    """`need` is the sum over its members; `step_seconds` the time between their optimizer steps, in their order."""

    group: JobGroup
    num_nodes: int
    need: float
    step_seconds: list[float]
    changed_at: float
    ready: bool = False


@dataclass(slots=True)
class ClusterState:
    """See the module. `now` is the time of the event in hand."""

    cost: CostModel
    now: float = 0.0
    pool: GpuPool = field(default_factory=GpuPool)
    node_size: int = 1  # GPUs of the largest node that is there, or was last
    jobs: dict[str, Job] = field(default_factory=dict[str, Job])  # that have not ended
    asked: Counter[int] = field(default_factory=Counter[int])  # of those of them that are not held, by the GPUs that each asks for
    pending: dict[str, None] = field(default_factory=dict[str, None])  # in order of arrival; those that lost their group, behind
    held: set[str] = field(default_factory=set[str])
    parked: dict[str, Lack] = field(default_factory=dict[str, Lack])  # those of `held` that wait for hosts
    hosts_may_come: bool = False
    asked_later: dict[str, GpusAsked] = field(default_factory=dict[str, GpusAsked])  # of jobs in groups: for when they wait again
    waiting_anew: list[str] = field(default_factory=list[str])  # jobs that may have begun to wait since the last decision
    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    groups_of_base: defaultdict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    latest: dict[str, None] = field(default_factory=dict[str, None])  # groups, the last to change or end behind; some that have ended
    memory: GpuMemory = field(default_factory=GpuMemory)
    kinds: GpuKinds = field(default_factory=GpuKinds)
    tenants: Tenants = field(default_factory=Tenants)
    groups_opened: int = 0  # the next group's number: names are g0, g1, ...
    jobs_submitted: int = 0
    jobs_begun: int = 0  # as their group was ready: the steps that were predicted of them before are dropped
    newly_measured: dict[str, None] = field(default_factory=dict[str, None])  # bases that were measured since the last decision
    emptied: list[str] = field(default_factory=list[str])  # groups that may have lost their last member
    ended_late: deque[Job] = field(default_factory=deque[Job])  # in the last three days, after waiting for an hour or more in all

    # -- GPUs ----------------------------------------------------------------------------------------------------------

    def drain_node(self, name: str, *, finish: bool) -> list[str]:
        """Take the node's GPUs out: all, or with `finish` those that are free now, and the others when their groups give them back. Returns
        the groups that have ended.
        """
        node = self.pool.nodes.get(name)
        if node is None:
            return []
        self.pool.drain(name)
        return self.lose_gpus([gpu for gpu in node.gpus if gpu not in self.pool.group_on] if finish else node.gpus)

    def add_node(self, name: str, rack: str, gpus: tuple[int, ...]) -> None:
        self.pool.add_node(name, rack, gpus)
        self._follow_node_size()

    def lose_gpus(self, gpus: Iterable[int]) -> list[str]:
        """Take GPUs out; the groups on them end, and their jobs wait again. Returns these groups' names."""
        lost = {gpu for gpu in gpus if gpu in self.pool.node_of}
        ended = sorted({self.pool.group_on[gpu] for gpu in lost if gpu in self.pool.group_on}, key=lambda name: int(name[1:]))
        for name in ended:
            self.end_group(name)
        self.pool.remove(lost & self.pool.node_of.keys())
        self._follow_node_size()
        return ended

    def _follow_node_size(self) -> None:
        """T0 of a wide job is counted on the fewest nodes that hold its GPUs, which another largest node may change."""
        if self.pool.node_size in (0, self.node_size):
            return
        self.node_size = self.pool.node_size
        if any(job.alone_nodes != self._least_nodes(job.spec.gpus) for job in self.jobs.values()):
            self._predict_all()

    def find_memory(self, gpus: Sequence[int], memory_bytes: Sequence[int]) -> bool:
        """As `GpuMemory.find`; what was predicted with other memory is forgotten. Of one more GPU that has what others have, that is
        only which jobs of several GPUs there are enough of them for.
        """
        rooms, before = self.memory.rooms, {gpu: self.memory.room_bytes.get(gpu) for gpu in gpus}
        enough = not rooms or self.memory.num_roomy(rooms[-1]) >= max(self.asked, default=0)
        if not self.memory.find(gpus, memory_bytes):
            return False
        before = {gpu: rooms[0] if room is None and rooms else room for gpu, room in before.items()}  # as an unknown one counts
        if self.memory.rooms != rooms or any(self.memory.room_bytes[gpu] != room for gpu, room in before.items()):
            return self._predict_all()
        if enough:
            return False
        changed = False
        for job in self.jobs.values():
            if job.spec.gpus > 1 and (room := self.rooms.least(job.spec)) != job.least_room:
                job.least_room, changed = room, True
        return changed and self._predict_all()

    def find_kinds(self, gpus: Sequence[int], kinds: Sequence[str], speeds: Sequence[float]) -> bool:
        """As `GpuKinds.find`."""
        return self.kinds.find(gpus, kinds, speeds) and self._predict_all()

    def _predict_all(self) -> bool:
        self.cost.times_corrected += 1
        for base in {job.spec.base_model for job in self.jobs.values()}:
            self._predict_anew(base)
        return True

    def cost_on(self, gpus: Iterable[int]) -> CostModel:
        """Of a group on these GPUs."""
        return self.kinds.cost(self.kinds.slowest(gpus), self.cost)

    @property
    def rooms(self) -> Rooms:
        return Rooms(self.cost, self.memory, self.kinds, self.pool)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def submit(self, spec: JobSubmitted) -> None:
        at = spec.submitted_at
        submitted_at = at if at is not None and -math.inf < at <= self.now else self.now  # nor a NaN
        job = Job(spec, submitted_at, seen_at=self.now)
        job.number = self.jobs_submitted
        self._measure_alone(job)
        self.jobs[spec.job_id] = job
        self.jobs_submitted += 1
        self._count(job, 1)
        self.pending[spec.job_id] = None
        self.waiting_anew.append(spec.job_id)

    def _measure_alone(self, job: Job) -> None:
        spec, tokens = job.spec, job.spec.profile.tokens_per_step
        job.alone_nodes = self._least_nodes(spec.gpus)
        cost = self.kinds.cost(self.kinds.reference(), self.cost)
        job.alone_step_seconds = cost.alone_step_seconds(spec.base_model, tokens, spec.gpus, job.alone_nodes)
        job.need = tokens / (spec.max_slowdown * job.alone_step_seconds)
        job.least_room = self.rooms.least(spec)

    def _least_nodes(self, gpus: int) -> int:
        return -(-gpus // self.node_size)

    def _count(self, job: Job, by: int) -> None:
        """It is one more, or one less, that is not held."""
        self.asked[job.spec.gpus] += by
        if not self.asked[job.spec.gpus]:
            del self.asked[job.spec.gpus]
        (self.tenants.add_job if by > 0 else self.tenants.drop_job)(job.spec.tenant)

    def ask_for(self, event: GpusAsked) -> bool:
        """A job that has no group asks for other GPUs; its predictions are forgotten. Whether that is another number, and can be."""
        job, waits = self.jobs[event.job_id], event.job_id in self.pending
        spec = event.change(job.spec)
        if spec == job.spec or not 1 <= spec.least_gpus <= spec.gpus:
            return False
        if waits:
            self._unqueue(job)
            self._count(job, -1)
        job.spec = spec
        self.cost.times_corrected += 1
        self._measure_alone(job)
        if waits:
            self._count(job, 1)
            self._wait(event.job_id)
        return True

    def end_job(self, job_id: str) -> None:
        """It is finished, failed or cancelled. Its group goes on without it; the caller looks after an empty one."""
        job = self.jobs.pop(job_id)
        self.pending.pop(job_id, None)
        self.asked_later.pop(job_id, None)
        if job_id in self.held:
            self.held.discard(job_id)
            self.parked.pop(job_id, None)
        else:
            self._count(job, -1)
        if job.group_id is not None:
            group = self.groups[job.group_id]
            self._leave(group, job_id)
            self._begin_stretch(group)
            self.emptied.append(job.group_id)
            job.settle(self.now)
            self._run(job, 0.0, 0.0)
            self._remember(job)
        job.status = "ended"

    def _remember(self, job: Job) -> None:
        """One that ended while it was in a group."""
        while self.ended_late and self.ended_late[0].seen_at < self.now - REMEMBERED_SECONDS:
            self.ended_late.popleft()
        if job.waited_seconds >= LONG_WAIT_SECONDS:
            self.ended_late.append(job)

    def hold(self, job_id: str) -> None:
        """Take a job that waits out of the queue, until `release`."""
        job = self.jobs[job_id]
        self._unqueue(job)
        self._count(job, -1)
        self.held.add(job_id)
        job.status = "held"

    def release(self, job_id: str) -> None:
        self.held.remove(job_id)
        job = self.jobs[job_id]
        job.least_room = self.rooms.least(job.spec)
        self._count(job, 1)
        self._wait(job_id)

    def park(self, job_id: str, lack: Lack) -> None:
        """As `hold`, until hosts have come with what it needs."""
        self.hold(job_id)
        self.parked[job_id] = lack

    def unpark(self, job_id: str) -> None:
        del self.parked[job_id]
        self.release(job_id)

    def see_steps(self, event: StepsDone) -> None:
        """What a back end reports of a job. Reports of a group that it has left are late, and steps never go back: infinitely many would
        hide all reports that follow. Finitely many beyond the job's are all of its steps, as its order may have given too few. Step times
        correct the cost model where the group is ready. A report is of the time since the one before: the first after `GroupReady`, or
        after another member's end, is left out, as it has in it what was before (joins, loading, other company).
        """
        job = self.jobs[event.job_id]
        if job.group_id != event.group_id or not job.steps_reported <= event.steps < math.inf:  # nor a NaN
            return
        known, is_new = self.groups[event.group_id], event.steps > job.steps_reported  # else it comes twice, or of no step
        job.settle(self.now)
        job.steps_reported, job.steps_done = event.steps, min(event.steps, float(job.spec.profile.steps))
        if known.ready and is_new:
            if job.steady and 0 < event.step_seconds < math.inf:  # nor a NaN
                self._learn(known, event.step_seconds / job.step_seconds)
            job.steady = True

    def _learn(self, known: Group, ratio: float) -> None:
        """A step took `ratio` times what was predicted. T0 changes with predictions: a slowdown is a ratio of times on one machine. Of GPUs
        of several kinds a step says nothing of any of them: their shares of a job follow measured seconds.
        """
        if self.kinds.are_mixed(known.group.gpus):
            return
        base, cost = known.group.base_model, self.cost_on(known.group.gpus)
        if cost.observe(base, len(known.group.gpus), known.num_nodes, ratio, self.now):
            self._predict_anew(base, cost)

    def measure(self, base: str, device: str, speed: BaseSpeed) -> None:
        """The base's speed was measured on a GPU of this cluster: as `CostModel.measure`."""
        (cost := self.kinds.measured_on(device, self.cost)).measure(base, device, speed)
        self.newly_measured[base] = None
        self._predict_anew(base, cost)

    def _predict_anew(self, base: str, corrected: CostModel | None = None) -> None:
        self.cost.times_corrected += corrected not in (None, self.cost)
        for job in self.jobs.values():
            if job.spec.base_model == base:
                self._measure_alone(job)
        for name in self.groups_of_base[base]:
            known = self.groups[name]
            self._set_members(known, replace(known.group))  # another object: what was worked out of the group is forgotten

    # -- groups --------------------------------------------------------------------------------------------------------

    def place(self, wanted: JobGroup) -> None:
        """Make `wanted` what is asked for: open the group, or change its GPUs, plan and members. Without jobs it ends."""
        if not wanted.job_ids:
            self.end_group(wanted.group_id)
            return
        known = self.groups.get(wanted.group_id)
        if known is None:
            self.pool.take(wanted.gpus, wanted.group_id)
            self.groups_opened = max(self.groups_opened, int(wanted.group_id[1:]) + 1)
            known = self.groups[wanted.group_id] = Group(wanted, self.pool.num_nodes(wanted.gpus), 0.0, [], self.now)
            self.groups_of_base[wanted.base_model][wanted.group_id] = None
            before: tuple[str, ...] = ()
        else:
            self._set_gpus(known, wanted.gpus)
            before = known.group.job_ids
        for name in before:
            if name not in wanted.job_ids:
                self._wait(name)
        for name in wanted.job_ids:
            if name not in before:
                self._admit(name, wanted.group_id)
        known.ready, known.changed_at = False, self.now
        self._set_members(known, wanted)

    def make_ready(self, group_id: str) -> None:
        """It runs as was asked for last."""
        known = self.groups[group_id]
        known.ready = True
        for name in known.group.job_ids:
            self.jobs_begun += self.jobs[name].begin(self.now)
        self._begin_stretch(known)

    def _begin_stretch(self, known: Group) -> None:
        for name in known.group.job_ids:
            self.jobs[name].steady = False

    def _set_gpus(self, known: Group, gpus: tuple[int, ...]) -> None:
        if gpus != known.group.gpus:
            held = set(known.group.gpus)
            self.pool.give_back([gpu for gpu in held if gpu not in gpus])
            self.pool.take([gpu for gpu in gpus if gpu not in held], known.group.group_id)
            known.num_nodes = self.pool.num_nodes(gpus)

    def end_group(self, group_id: str) -> None:
        """Free its GPUs; members that are left wait again."""
        known = self.groups.pop(group_id)
        for name in known.group.job_ids:
            self._wait(name)
        self.pool.give_back(known.group.gpus)
        del self.groups_of_base[known.group.base_model][group_id]
        self._has_changed(group_id)

    def _admit(self, job_id: str, group_id: str) -> None:
        job = self.jobs[job_id]
        assert job.group_id is None, f"{job_id} is in {job.group_id} and cannot join {group_id}"
        self._unqueue(job)
        job.status, job.group_id, job.steps_reported, job.steps_before = "placed", group_id, 0.0, job.steps_done

    def _unqueue(self, job: Job) -> None:
        del self.pending[job.spec.job_id]
        job.waited_seconds += self.now - job.seen_at
        job.settle(self.now)
        job.times_unqueued += 1

    def _wait(self, job_id: str) -> None:
        job = self.jobs.get(job_id)
        if job is None:
            return
        job.settle(self.now)
        self._run(job, 0.0, 0.0)
        job.status, job.group_id = "pending", None
        self.pending[job_id] = None
        self.waiting_anew.append(job_id)

    def _leave(self, known: Group, job_id: str) -> None:
        group = known.group.without(job_id)
        if group.job_ids:
            self._set_members(known, group)
        else:
            known.group, known.need, known.step_seconds = group, 0.0, []

    def _set_members(self, known: Group, group: JobGroup) -> None:
        """Set which jobs share the group from now on, and what each then takes for a step."""
        self._has_changed(group.group_id)
        known.group = group
        jobs = [self.jobs[name] for name in group.job_ids]
        known.need = sum([job.need for job in jobs])
        known.step_seconds = self.step_seconds_of(group, known.num_nodes)
        share = len(group.gpus) / len(jobs)
        for job, seconds in zip(jobs, known.step_seconds, strict=True):
            job.settle(self.now)
            self._run(job, seconds, share)

    def _run(self, job: Job, step_seconds: float, gpu_share: float) -> None:
        """From now on; its tenant is charged for no more GPUs than it asked for: what it has beyond that is lent, and taken back."""
        asked = job.spec.gpus
        self.tenants.hold_gpus(job.spec.tenant, min(gpu_share, asked) - min(job.gpu_share, asked), self.now)
        job.step_seconds, job.gpu_share = step_seconds, gpu_share

    def _has_changed(self, group_id: str) -> None:
        self.latest.pop(group_id, None)
        self.latest[group_id] = None
        if len(self.latest) > 2 * len(self.groups) + 64:
            self.latest = {name: None for name in self.latest if name in self.groups}

    def step_seconds_of(self, group: JobGroup, num_nodes: int) -> list[float]:
        """Seconds between the optimizer steps of each member."""
        cost, base, budget, gpus = self.cost_on(group.gpus), group.base_model, group.plan.token_budget, len(group.gpus)
        jobs = [self.jobs[name] for name in group.job_ids]
        if not jobs:
            return []
        slower = cost.recompute_factor(base, group.plan.recomputed_layers)
        if len(jobs) == 1:
            return [slower * cost.lone_step_seconds(base, budget, gpus, num_nodes, jobs[0].spec.profile.tokens_per_step)]
        members = [job.as_member(weight) for job, weight in zip(jobs, group.weights, strict=True)]
        return [slower * seconds for seconds in group_step_seconds(cost, base, budget, gpus, num_nodes, members)]
