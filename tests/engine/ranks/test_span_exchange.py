"""Jobs that span engines of one process, whose notes come late and in any interleaving: bytes of one engine that computes all replicas."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.group.test_engine_reports import of, spec
from tests.group.test_engine_reports import sets as sets
from tests.group.test_replicas import EVALUATED, Sets, assert_same, ended, spanning, trained
from tests.tiny import make_model
from tlora.batching.pack import MicroBatch
from tlora.batching.replica_weights import FIRST_STEPS
from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.messages import Faulty, Fetched, Note, Sent, addressees
from tlora.engine.ranks.spanning import Mailbox, SpanExchange
from tlora.errors import CapacityError, RankError
from tlora.group.engine import Engine
from tlora.group.exchange import RunningSums
from tlora.group.job_run import JobRun
from tlora.group.reports import Computed, Ended, Evaluated, Report, Reweighted, Stepped
from tlora.job import JobSpec
from tlora.sharing.regions import lay_out_regions
from tlora.sharing.relayed_memory import RelayedMemory
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel


class Memory:
    """Of rank `rank`, in a process that has all."""

    def __init__(self, all_ranks: list[Tensor], rank: int) -> None:
        self._all, self.own = all_ranks, all_ranks[rank]

    def read(self, peer: int, start: int, target: Tensor) -> None:
        target.copy_(self._all[peer][start : start + target.numel()])

    def pass_on(self, start: int, size: int, peer: int | None = None) -> None:
        """Nothing: peers read it here."""


Pace = Callable[[int, int], float]  # of a rank, after so many steps of the job that spans: seconds a token
Bytes = tuple[int, int, bytes]  # of a memory: whose, from where on, and what


class World:
    """Engines whose notes travel by way of `mail`, in the order of each pair of ranks, as late as `deliver` is called."""

    def __init__(
        self,
        jobs: list[JobSpec],
        spans: Mapping[str, ReplicaPlacement],
        sets: Sets,
        count: int,
        budgets: list[int],
        later: Sequence[JobSpec] = (),
        *,
        apart: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """`jobs` join, those of `later` do not. With `apart` each rank is of a host of its own. With a `pace` weights follow what the ranks
        measure, by clocks of which each goes on by so much a token that its rank computes.
        """
        model = SuperModel(make_base(make_model(), "tiny"), deterministic=True)
        sizes = {job.name: model.layout(job).numel for job in (*jobs, *later) if job.name in spans}
        regions, num_bytes = lay_out_regions(spans, sizes, 4)
        memory = [torch.full((num_bytes,), 0xFF, dtype=torch.uint8) for _ in range(count)]  # NaN
        self.spans, self.mail = spans, [deque[Note | Bytes]() for _ in range(count)]
        self.faults: list[Faulty] = []
        self.memories: list[RelayedMemory] = []
        self.heard: list[list[Report]] = [[] for _ in range(count)]
        self.seconds, self._pace = [0.0] * count, pace
        self.exchanges: list[SpanExchange] = []
        self.engines: list[Engine] = []
        for rank in range(count):
            there = self.relayed(num_bytes, rank, count) if apart else Memory(memory, rank)
            mailbox = Mailbox(there, regions, torch.float32, range(count))
            clock = partial(self.seconds.__getitem__, rank) if pace is not None else None
            self.exchanges.append(SpanExchange(rank, spans, self.route, mailbox, clock))
            model = SuperModel(make_base(make_model(), "tiny"), deterministic=True)
            self.engines.append(Engine(model, budgets[rank], partial(self.listen, rank), exchange=self.exchanges[rank]))
        for job in jobs:
            span = spans.get(job.name, ReplicaPlacement(1, (jobs.index(job) % count,)))
            for rank in span.ranks:
                evaluation = sets[1] if job.eval_steps and rank == span.lead_rank else None
                self.engines[rank].join(JobRun(job, sets[0], evaluation, span.replicas, span.weights, span.longest_of_each))

    def listen(self, rank: int, report: Report) -> None:
        self.heard[rank].append(report)
        if isinstance(report, Computed) and self._pace is not None:
            steps = max((run.progress.step for run in self.engines[rank].runs.values() if run.spans), default=0)
            self.seconds[rank] += report.packed.tokens * self._pace(rank, steps)

    def route(self, note: Note | Faulty) -> None:
        span = self.spans[note.job]
        if isinstance(note, Faulty):
            self.faults.append(note)
            return
        for to in addressees(note, span):
            self.mail[to].append(note)

    def relayed(self, num_bytes: int, rank: int, count: int) -> RelayedMemory:
        """Its bytes travel with the notes."""

        def send(to: int, start: int, content: bytes) -> None:
            self.mail[to].append((rank, start, content))

        self.memories.append(RelayedMemory(num_bytes, rank, range(count), torch.device("cpu"), send))
        return self.memories[-1]

    def deliver(self, rank: int) -> None:
        first = self.mail[rank].popleft()
        if isinstance(first, tuple):
            self.memories[rank].take(*first)
        else:
            self.exchanges[rank].hear(first)

    def run(self, rng: random.Random) -> None:
        """Until nobody has anything left but jobs that follow an ended one."""
        while True:
            can_hear = [rank for rank in range(len(self.engines)) if self.mail[rank]]
            can_compute = [rank for rank, engine in enumerate(self.engines) if not engine.idle]
            if not can_hear and not can_compute:
                return
            if can_hear and (not can_compute or rng.random() < 0.5):
                self.deliver(rng.choice(can_hear))
            else:
                self.engines[rng.choice(can_compute)].run_micro_batch()


def story() -> tuple[list[JobSpec], dict[str, ReplicaPlacement]]:
    jobs = [
        spec("alone", batch_size=2, max_steps=7, lora_dropout=0.1),
        spanning(gpus=3, data=EVALUATED, eval_steps=2),
        spec("second", gpus=4, batch_size=4, max_steps=5, r=8),
    ]
    return jobs, {"spanning": ReplicaPlacement(3, (1, 0, 2)), "second": ReplicaPlacement(4, (2, 1))}


@pytest.mark.parametrize("seed", [52, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(52))])
def test_any_interleaving_gives_the_bytes_of_replicas_in_turn(sets: Sets, seed: int) -> None:
    rng = random.Random(seed)
    jobs, spans = story()
    world = World(jobs, spans, sets, 3, [rng.choice([25, 60, 300]) for _ in range(3)])
    world.run(rng)
    for job in jobs:
        home = spans[job.name].lead_rank if job.name in spans else 0
        assert_same(ended(world.heard[home], job.name), trained(job, sets[0], sets[1] if job.eval_steps else None))
    elsewhere = [report for rank in (0, 2) for report in world.heard[rank] if not isinstance(report, Ended) or report.job_id == "spanning"]
    assert not [report for report in elsewhere if getattr(report, "job_id", "") == "spanning"], "only a home reports"


def test_ranks_that_are_apart_give_the_same_bytes(sets: Sets) -> None:
    """What they write travels in pieces, before the notes that announce it. A piece for no place is refused."""
    rng = random.Random(7)
    jobs, spans = story()
    world = World(jobs, spans, sets, 3, [rng.choice([25, 60, 300]) for _ in range(3)], apart=True)
    world.run(rng)
    for job in jobs[1:]:
        assert_same(ended(world.heard[spans[job.name].lead_rank], job.name), trained(job, sets[0], sets[1] if job.eval_steps else None))
    for wrong in ((0, 0, b"own"), (5, 0, b"a stranger's"), (1, len(world.memories[0].own) - 1, b"beyond"), (1, -1, b"before")):
        with pytest.raises(RankError, match="has no such"):
            world.memories[0].take(*wrong)


UNEQUAL = {"spanning": (0.6, 0.15, 0.25), "second": (0.1, 0.1, 0.4, 0.4)}


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3))])
def test_unequal_replicas_give_the_bytes_of_one_process_that_cuts_alike(sets: Sets, seed: int) -> None:
    """And no job beside them has others."""
    rng = random.Random(seed)
    jobs, spans = story()
    unequal = {name: replace(span, weights=UNEQUAL[name]) for name, span in spans.items()}
    world = World(jobs, unequal, sets, 3, [rng.choice([25, 60, 300]) for _ in range(3)])
    world.run(rng)
    for job in jobs:
        home = spans[job.name].lead_rank if job.name in spans else 0
        run = JobRun(job, sets[0], sets[1] if job.eval_steps else None, None, UNEQUAL.get(job.name, ()))
        heard: list[Report] = []
        engine = Engine(SuperModel(make_base(make_model(), "tiny"), deterministic=True), 60, heard.append)
        engine.join(run)
        while engine.run_micro_batch() is not None:
            pass
        assert_same(ended(world.heard[home], job.name), ended(heard, job.name))
    evenly = trained(jobs[2], sets[0], None)
    assert not torch.equal(ended(world.heard[2], "second").params, evenly.params), "the sums are those of other parts"


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(5))])
def test_ranks_that_hold_short_samples_give_the_bytes_of_one_process_that_cuts_alike(sets: Sets, seed: int) -> None:
    """And get no longer ones. A neighbour has its own bytes. A replica that is given a sample for which it has no memory stops."""
    rng, longest = random.Random(seed), int(sets[0].lengths.max())
    jobs, spans = story()
    short = sorted({int(tokens) for tokens in sets[0].lengths})[2]
    assert short < longest, "all samples are alike"
    bounded = {
        name: replace(span, longest=(0, *[short] * len(span.peers)), shares=(1.0,) * len(span.ranks)) for name, span in spans.items()
    }
    world = World(jobs, bounded, sets, 3, [rng.choice([25, 60, 300]) for _ in range(3)])
    world.run(rng)
    for name, span in bounded.items():
        for rank in span.ranks:
            rows = [row for each in world.heard[rank] if isinstance(each, Computed) for row in each.packed.rows if row.job_id == name]
            most = max(int(sets[0].lengths[row.sample]) for row in rows)
            assert most <= short if span.longest_on(rank) else most == longest, (name, rank)
    for job in jobs[1:]:
        heard, span = list[Report](), bounded[job.name]
        engine = Engine(SuperModel(make_base(make_model(), "tiny"), deterministic=True), 60, heard.append)
        engine.join(JobRun(job, sets[0], sets[1] if job.eval_steps else None, None, (), span.longest_of_each))
        while engine.run_micro_batch() is not None:
            pass
        assert_same(ended(world.heard[span.lead_rank], job.name), ended(heard, job.name))
        assert not torch.equal(ended(heard, job.name).params, trained(job, sets[0], sets[1] if job.eval_steps else None).params)
    assert_same(ended(world.heard[0], "alone"), trained(jobs[0], sets[0]))
    run = JobRun(jobs[1], sets[0], None, 3, (), (0, short, short))
    run.held = (short,) * 3
    with pytest.raises(CapacityError, match="fits on none of 3 ranks"):
        run.offer()
    run.here, run.held = (1,), (0, short, short)
    run.offer()
    run.held = (0, 1, 1)
    run._shares.append((1, [0]))  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match="a sample of more than 1 tokens"):
        run.offer_next_replica()


MEASURED = {"gpus": 2, "batch_size": 6, "max_steps": 20, "lora_dropout": 0.1, "eval_steps": 8, "data": EVALUATED}


@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(12))])
def test_weights_follow_measured_seconds_and_all_ranks_cut_alike(sets: Sets, seed: int) -> None:
    """A GPU slows down, and has a neighbour for a while. Bytes are those of one process whose cuts change at the same steps."""
    rng, jobs = random.Random(seed), [spec("alone", batch_size=2, max_steps=12), spec("measured", **MEASURED)]
    spans = {"measured": ReplicaPlacement(2, (1, 0))}
    world = World(jobs, spans, sets, 2, [60, 60], pace=lambda rank, steps: 3.0 if rank == 0 and steps >= 4 else 1.0)
    world.run(rng)
    changes = {each.progress.weights_since: each.progress.replica_weights for each in of(world.heard[1], Reweighted, "measured")}
    assert 1 <= len(changes) <= 2 and not of(world.heard[0], Reweighted, "measured"), "the lead rank reports"
    (end,) = of(world.heard[1], Ended, "measured")
    first, last = min(changes), max(changes)
    assert (end.progress.weights_since, end.progress.replica_weights) == (last, changes[last])
    assert FIRST_STEPS < first < 2 * FIRST_STEPS and changes[first][1] < 0.35, changes

    run, heard = JobRun(jobs[1], *sets), list[Report]()
    engine = Engine(SuperModel(make_base(make_model(), "tiny"), deterministic=True), 60, heard.append)
    engine.join(run)
    offer = run.offer

    def offer_as_then() -> None:
        run.weights = next((changes[since] for since in sorted(changes, reverse=True) if run.progress.step >= since), ())
        offer()

    run.offer = offer_as_then  # type: ignore[method-assign]
    while engine.run_micro_batch() is not None:
        pass
    assert_same(ended(world.heard[1], "measured"), ended(heard, "measured"))
    assert not torch.equal(end.state.params, trained(jobs[1], *sets).params), "the sums are those of other parts"
    assert_same(ended(world.heard[0], "alone"), trained(jobs[0], sets[0]))


def test_without_a_clock_no_weight_changes(sets: Sets) -> None:
    """As in a deterministic run: what a GPU takes changes no bit."""
    job = spec("measured", **MEASURED)
    world = World([job], {"measured": ReplicaPlacement(2, (1, 0))}, sets, 2, [60, 60])
    world.run(random.Random(1))
    assert not of(world.heard[1], Reweighted, "measured")
    assert_same(ended(world.heard[1], "measured"), trained(job, *sets))


def test_losses_and_tokens_are_those_of_replicas_in_turn(sets: Sets) -> None:
    jobs, spans = story()
    world = World(jobs, spans, sets, 3, [60] * 3)
    world.run(random.Random(0))
    heard: list[Report] = []
    engine = Engine(SuperModel(make_base(make_model(), "tiny"), deterministic=True), 60, heard.append)
    engine.join(JobRun(jobs[1], *sets))
    while engine.run_micro_batch() is not None:
        pass
    for kind in (Stepped, Evaluated):
        found, wanted = (of(reports, kind, "spanning") for reports in (world.heard[1], heard))
        assert [(r.loss, r.progress.num_tokens, r.progress.step) for r in found] == [
            (r.loss, r.progress.num_tokens, r.progress.step) for r in wanted
        ]


@pytest.mark.parametrize(
    ("rank", "call"),
    [pytest.param(rank, call, marks=[] if (rank, call) == (1, 3) else pytest.mark.soak) for rank in range(3) for call in (2, 3, 5, 8)],
)
def test_memory_that_runs_out_on_one_rank_starts_its_part_over(sets: Sets, rank: int, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, spans = story()
    world = World(jobs, spans, sets, 3, [60] * 3)
    engine, budgets = world.engines[rank], list[int]()
    compute = engine.stream.compute

    def raising(*args: object) -> object:
        budgets.append(engine.token_budget)
        if len(budgets) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(engine.stream, "compute", raising)
    world.run(random.Random(call))
    assert len(budgets) > call and min(budgets) < 60
    for job in jobs[1:]:
        assert_same(ended(world.heard[spans[job.name].lead_rank], job.name), trained(job, sets[0], sets[1] if job.eval_steps else None))


def test_a_part_is_read_when_it_comes_and_not_when_all_have(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,), spans = [job for job in story()[0] if job.name == "spanning"], {"spanning": ReplicaPlacement(3, (1, 0, 2))}
    world, read, reads = World([job], spans, sets, 3, [300] * 3), Mailbox.read, list[int]()

    def noted(mailbox: Mailbox, job_id: str, rank: int, slot: int, into_P: Tensor) -> None:
        reads.append(rank)
        read(mailbox, job_id, rank, slot, into_P)

    monkeypatch.setattr(Mailbox, "read", noted)
    for rank in (0, 2):
        while world.mail[rank]:  # what the job begins with
            world.deliver(rank)
    for rank in range(3):
        while not world.engines[rank].idle:
            world.engines[rank].run_micro_batch()
    assert [type(note) for note in world.mail[1]] == 2 * [Fetched, Sent] and set(reads) == {1}
    reads.clear()
    for expected in ([], [], [1, 0], [1, 0, 2]):  # while rank 2 may read the home's state, its gradient is not where the state is
        world.deliver(1)
        world.engines[1].run_micro_batch()
        assert reads == expected
    world.run(random.Random(0))
    assert_same(ended(world.heard[1], "spanning"), trained(job, *sets))


def test_a_part_that_fails_is_told_and_its_neighbours_go_on(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, spans = story()
    world = World(jobs, spans, sets, 3, [60] * 3)
    engine = world.engines[0]  # has a part of "spanning", and "alone"
    compute = engine.stream.compute

    def raising(packed: MicroBatch, *batch: object) -> object:
        if any(row.job_id == "spanning" for row in packed.rows):
            raise ValueError("a bad sample")
        return compute(packed, *batch)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(engine.stream, "compute", raising)
    world.run(random.Random(1))
    assert world.faults == [Faulty("spanning", "ValueError: a bad sample")]
    assert list(engine.runs) == []
    assert world.engines[1].runs["spanning"].awaiting, "its home waits until it is told otherwise"
    for job in (jobs[0], jobs[2]):
        assert_same(ended(world.heard[spans[job.name].lead_rank if job.name in spans else 0], job.name), trained(job, sets[0]))


@pytest.mark.slow
def test_a_job_that_is_taken_home_goes_on_from_its_last_step(sets: Sets) -> None:
    """As after the loss of a rank: the home lets it go, and computes all of it from there on."""
    jobs, spans = story()
    for steps in range(1, 30, 7):
        world = World(jobs, spans, sets, 3, [60] * 3)
        home, rng = world.engines[1], random.Random(steps)
        for _ in range(steps):
            ready = [rank for rank in range(3) if world.mail[rank]]
            if ready:
                world.deliver(rng.choice(ready))
            world.engines[rng.randrange(3)].run_micro_batch()
        if "spanning" not in home.runs:
            break
        home.leave("spanning")
        (left,) = of(world.heard[1], Ended, "spanning")
        for rank, exchange in enumerate(world.exchanges):
            exchange.dissolve("spanning")
            if rank != 1 and "spanning" in world.engines[rank].runs:
                world.engines[rank].leave("spanning")
        again = JobRun(jobs[1], *sets, 3)
        again.progress = left.progress
        world.heard[1].clear()
        home.join(again, left.state)
        world.run(rng)
        assert_same(ended(world.heard[1], "spanning"), trained(jobs[1], *sets))


def test_a_job_that_goes_on_brings_its_moments_to_all_ranks(sets: Sets) -> None:
    """As after a resume: the others begin with a fresh adapter, and have the home's before they compute."""
    (job,), spans = [job for job in story()[0] if job.name == "spanning"], {"spanning": ReplicaPlacement(3, (1, 0, 2))}
    heard: list[Report] = []
    engine = Engine(SuperModel(make_base(make_model(), "tiny"), deterministic=True), 60, heard.append)
    engine.join(JobRun(job, *sets))
    while len(of(heard, Stepped, "spanning")) < 3:
        engine.run_micro_batch()
    engine.leave("spanning")
    (left,) = of(heard, Ended, "spanning")
    assert left.state.updates >= 3 and left.state.exp_avg_sq.any()
    world = World([], spans, sets, 3, [60] * 3, [job])
    for rank in (2, 0, 1):
        again = JobRun(job, sets[0], sets[1] if rank == 1 else None, 3)
        again.progress = left.progress if rank == 1 else again.progress
        world.engines[rank].join(again, left.state if rank == 1 else None)
    world.run(random.Random(3))
    assert_same(ended(world.heard[1], "spanning"), trained(job, *sets))
    states = [engine.model.state("spanning") for engine in (world.engines[0], world.engines[2])]
    for state in states:
        assert torch.equal(state.exp_avg_sq, ended(world.heard[1], "spanning").exp_avg_sq), "all have stepped to the same bits"


def test_a_rank_that_joins_late_begins_with_what_has_come_before(sets: Sets) -> None:
    """As one that has no room yet."""
    (job,), spans = [job for job in story()[0] if job.name == "spanning"], {"spanning": ReplicaPlacement(3, (1, 0, 2))}
    world = World([], spans, sets, 3, [60] * 3, [job])
    for rank in (0, 1):
        world.engines[rank].join(JobRun(job, sets[0], sets[1] if rank == 1 else None, 3))
    world.run(random.Random(3))
    assert not any(world.mail) and world.engines[2].idle
    world.engines[2].join(JobRun(job, sets[0], None, 3))
    world.run(random.Random(3))
    assert_same(ended(world.heard[1], "spanning"), trained(job, *sets))


def test_the_order_of_additions_is_seen_here(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    give = RunningSums.give

    def twice(sums: RunningSums, job_id: str, step: int, replica: int, gradient_P: Tensor) -> None:
        give(sums, job_id, step, replica, gradient_P if replica != 2 else gradient_P.roll(1))

    jobs, spans = story()
    alone = trained(jobs[1], *sets)
    monkeypatch.setattr(RunningSums, "give", twice)
    world = World(jobs, spans, sets, 3, [60] * 3)
    world.run(random.Random(0))
    assert not torch.equal(ended(world.heard[1], "spanning").params, alone.params)


@pytest.mark.parametrize("replicas", range(1, 9))
def test_a_span_gives_each_rank_a_stretch(replicas: int) -> None:
    for count in range(1, replicas + 1):
        span = ReplicaPlacement(replicas, tuple(range(10, 10 + count)))
        assert [replica for rank in span.ranks for replica in span.at(rank)] == list(range(replicas))
        assert all(span.at(rank) for rank in span.ranks) and sum(map(span.part, span.ranks)) == pytest.approx(1)
        assert span.lead_rank == span.rank_of(0) == 10 and span.peers == span.ranks[1:]
