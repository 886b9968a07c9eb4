"""Stories of ranks that train, fill up, run dry and die at random: each job ends once, and never has two homes."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from tlora.batching.placement import best_move, place
from tlora.engine.ranks.dispatcher import Dispatcher


class FakeRank:
    """Holds so many jobs at a time; reports come out in order, and with delay."""

    def __init__(self, number: int, jobs: tuple[str, ...], capacity: int) -> None:
        self.number, self.waiting, self.running, self.capacity = number, list(jobs), list[str](), capacity
        self.commands: deque[tuple[str, str]] = deque()
        self.reports: deque[tuple[str, str]] = deque()
        self._changed = True

    def obey(self) -> None:
        what, job = self.commands.popleft()
        if what == "join":
            self.waiting.append(job)
            self._changed = True
        elif job in self.waiting:
            self.waiting.remove(job)
            self._changed = False
            self.reports.append(("left", job))
        elif job in self.running:
            self.running.remove(job)
            self._changed = True
            self.reports.append(("left", job))

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.capacity:
            self.running.append(self.waiting.pop(0))
            self._changed = True
            self.reports.append(("began", self.running[-1]))
        if self._changed and self.waiting:
            self.reports.append(("refused", self.waiting[0]))
        self._changed = False

    def end(self, job: str) -> None:
        self.running.remove(job)
        self._changed = True
        self.reports.append(("end", job))


class Story:
    def __init__(self, seed: int, gpus: int, jobs: int, wide: float = 0.0, unequal: bool = False) -> None:
        """`wide`: part of the jobs that span several ranks. `unequal`: ranks have other speeds, and some jobs may go to some only."""
        self.rng = random.Random(seed)
        self.seconds = {f"j{i}": self.rng.choice([5.0, 20.0, 100.0, 400.0]) for i in range(jobs)}
        replicas = {job: self.rng.randint(2, 5) for job in self.seconds if self.rng.random() < wide}
        speeds = [self.rng.choice([0.3, 1.0, 2.0]) for _ in range(gpus)] if unequal else []
        some = {job: self.rng.sample(range(gpus), self.rng.randint(1, gpus)) for job in self.seconds if unequal and self.rng.random() < 0.4}
        placement = place(self.seconds, gpus, replicas, speeds, some)
        self.spans, self.some = placement.spans, some
        self.dispatcher = Dispatcher(self.seconds, placement, speeds=speeds, may_have=some)
        self.lost: set[int] = set()
        self.ranks = {g: FakeRank(g, placement.jobs[g], self.rng.randint(1, 3)) for g in range(gpus)}
        self.ended: Counter[str] = Counter()

    def deliver(self, number: int) -> None:
        kind, job = self.ranks[number].reports.popleft()
        if kind == "end":
            self.ended[job] += 1
        if kind == "refused":
            self.dispatcher.refused(number)
        else:
            getattr(self.dispatcher, kind)(number, job)
        self.send()

    def send(self) -> None:
        for number, what, job in self.dispatcher.commands:
            span = self.spans.get(job)
            if span is not None and (what == "join" or number == span.lead_rank):
                assert self.lost & set(span.ranks), f"{what} {job}: only a lost rank moves what spans"
            if what == "join" and (left := set(self.some.get(job, ())) - self.lost):
                assert number in left, f"{job} comes to a rank that may not have it"
            self.ranks[number].commands.append((what, job))
        self.dispatcher.commands.clear()

    def lose(self, number: int) -> None:
        del self.ranks[number]  # with what it had not told
        self.lost.add(number)
        self.dispatcher.lose(number)
        self.send()

    def check(self) -> None:
        """No job is on two ranks, nor about to be taken by one while another has it."""
        held = [job for rank in self.ranks.values() for job in (*rank.waiting, *rank.running)]
        held += [job for rank in self.ranks.values() for what, job in rank.commands if what == "join"]
        assert max(Counter(held).values(), default=0) <= 1, held

    def step(self) -> None:
        rank = self.rng.choice(list(self.ranks.values()))
        choices = [rank.admit]
        if rank.commands:
            choices += [rank.obey] * 3
        if rank.reports:
            choices += [lambda: self.deliver(rank.number)] * 3
        if rank.running and self.rng.random() < 0.3:
            choices += [lambda: rank.end(self.rng.choice(rank.running))]
        self.rng.choice(choices)()
        if self.rng.random() < 0.2:
            for number in self.ranks:
                for job in self.ranks[number].running:
                    self.dispatcher.stands(number, job, self.seconds[job] * self.rng.random())
            self.dispatcher.balance()
            self.send()
        self.check()


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("wide", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(60))
def test_every_job_ends_once_whatever_happens(seed: int, wide: float, unequal: bool) -> None:
    rng = random.Random(seed)
    story = Story(seed, rng.randint(1, 4), rng.randint(1, 12), wide, unequal)
    deaths = rng.sample(range(400), rng.randint(0, 3))
    for moment in range(20_000):
        if moment in deaths and len(story.ranks) > 1:
            story.lose(rng.choice(list(story.ranks)))
        if not story.dispatcher.open:
            break
        story.step()
    assert not story.dispatcher.open, f"never ended: {story.dispatcher.open}"
    assert set(story.ended) == set(story.seconds)
    assert set(story.ended.values()) == {1}
    assert not story.dispatcher.spans and not any(held.following for held in story.dispatcher._ranks.values())


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_rank_that_is_throttled_computes_less(factor: float) -> None:
    """Ranks that train one job at a time, the second `factor` times as slow as the first, told so: it gets about its share of the work, and
    all are through about when none could be earlier. Told nothing, it gets half at first, and what it has begun stays.
    """
    seconds, speeds = {f"j{i}": 10.0 for i in range(30)}, [1.0, 1 / factor]
    ends = {told: _played(seconds, speeds, speeds if told else [], factor) for told in (True, False)}
    (end, computed), (late, _) = ends[True], ends[False]
    assert computed[1] / computed[0] == pytest.approx(1 / factor, rel=0.25)
    assert sum(computed) == 300.0 and end <= 1.1 * 300 / sum(speeds) and end <= late


def _played(seconds: dict[str, float], speeds: list[float], told: list[float], factor: float) -> tuple[float, list[float]]:
    """When the last job ends, and the seconds (on a GPU of speed 1) that each rank has computed."""
    placement = place(seconds, 2, speeds=told)
    dispatcher, waiting = Dispatcher(seconds, placement, speeds=told), [list(jobs) for jobs in placement.jobs]
    free_at, running, computed = [0.0, 0.0], [None, None], [0.0, 0.0]
    while dispatcher.open:
        for rank in (0, 1):
            if running[rank] is None and waiting[rank]:
                running[rank] = waiting[rank].pop(0)
                free_at[rank] += seconds[running[rank]] / speeds[rank]
                dispatcher.began(rank, running[rank])
                if waiting[rank]:
                    dispatcher.refused(rank)
        rank = min((rank for rank in (0, 1) if running[rank]), key=free_at.__getitem__)
        job, now = running[rank], free_at[rank]
        running[rank], computed[rank] = None, computed[rank] + seconds[job]
        free_at = [max(at, now) if running[other] is None else at for other, at in enumerate(free_at)]
        dispatcher.end(rank, job)
        while dispatcher.commands:
            number, what, moved = dispatcher.commands.pop(0)
            if what == "join":
                waiting[number].append(moved)
            elif moved in waiting[number]:
                waiting[number].remove(moved)
                dispatcher.left(number, moved)
    return max(free_at), computed


def test_a_job_that_moves_to_a_slower_rank_takes_longer_there() -> None:
    assert best_move([{"a": 50.0, "b": 60.0}, {}], 1, 10.0) == (0, "a")
    assert best_move([{"a": 50.0, "b": 60.0}, {}], 1, 10.0, speeds=[1.0, 0.4]) is None, "125 seconds there"
    assert best_move([{"a": 50.0, "b": 60.0}, {}], 1, 10.0, speeds=[0.5, 1.0]) == (0, "b"), "50 s stay, 30 s go"


def test_with_no_rank_left_jobs_stay_open() -> None:
    dispatcher = Dispatcher({"a": 1.0, "b": 2.0}, place({"a": 1.0, "b": 2.0}, 2))
    assert [dispatcher.lose(0), dispatcher.lose(1)] == [["b"], ["a", "b"]]
    assert dispatcher.open == {"a", "b"}
    assert dispatcher.ranks == []


def test_a_rank_that_is_not_full_keeps_what_it_is_about_to_let_in() -> None:
    seconds = dict.fromkeys("abcd", 10.0)
    dispatcher = Dispatcher(seconds, place(seconds, 2))
    dispatcher.began(1, "b")
    dispatcher.began(1, "d")
    assert dispatcher.commands == []  # rank 0 has not looked yet
    dispatcher.began(0, "a")
    dispatcher.refused(0)
    assert dispatcher.commands == [(0, "leave", "c")]


def test_the_only_job_of_a_rank_is_not_taken_before_it_begins() -> None:
    seconds = {"a": 10.0, "b": 9.0}
    alone = Dispatcher({"a": 10.0}, place({"a": 10.0}, 2))
    alone.balance()
    assert alone.commands == []
    lighter = Dispatcher(seconds, place(seconds, 1))
    lighter._ranks[1] = type(lighter._ranks[0])(has_room=True)  # pyright: ignore[reportPrivateUsage]
    lighter.balance()
    assert lighter.commands == [(0, "leave", "b")]  # a is left to rank 0


def test_a_job_that_ends_while_it_is_let_go_goes_nowhere() -> None:
    seconds = {"a": 100.0, "b": 90.0, "c": 1.0}
    dispatcher = Dispatcher(seconds, place(seconds, 2))  # a on one, b and c on the other
    dispatcher.began(0, "a")
    dispatcher.began(1, "b")
    dispatcher.began(1, "c")
    dispatcher.stands(1, "c", 80.0)
    dispatcher.end(0, "a")
    assert dispatcher.commands == [(1, "leave", "c")]
    dispatcher.commands.clear()
    dispatcher.end(1, "c")
    assert dispatcher.open == {"b"}
    assert dispatcher.commands == []  # b alone would only change its place


def test_a_rank_that_computes_a_part_is_not_dry_and_what_spans_stays() -> None:
    seconds = {"wide": 400.0, "a": 100.0, "b": 90.0}
    dispatcher = Dispatcher(seconds, place(seconds, 2, {"wide": 2}))
    for rank, job in ((0, "wide"), (0, "a"), (1, "b")):
        dispatcher.began(rank, job)
    dispatcher.end(1, "b")
    assert dispatcher.commands == []  # it has half of wide to compute
    dispatcher.stands(0, "wide", 0.0)
    dispatcher.end(0, "wide")
    assert dispatcher.commands == [(1, "leave", "wide")]


def test_after_the_loss_of_a_part_the_home_is_told_to_begin_again() -> None:
    seconds = {"wide": 300.0, "a": 1.0}
    dispatcher = Dispatcher(seconds, place(seconds, 3, {"wide": 3}))
    dispatcher.began(0, "wide")
    assert dispatcher.lose(2) == ["wide"]
    assert dispatcher.commands == [(1, "leave", "wide"), (0, "leave", "wide")]
    dispatcher.commands.clear()
    dispatcher.left(0, "wide")
    ((_, *command),) = dispatcher.commands
    assert command == ["join", "wide"]
