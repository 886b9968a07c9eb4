"""A log of bounded size: it goes on in new files, each of which can be replayed by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.sim.small_clusters import even_cost, made_job
from tlora.cluster.event_log import KEPT, EventLog
from tlora.cluster.log_head import LogHead
from tlora.protocol import (
    BaseAdded,
    BaseMeasured,
    BaseSpeed,
    Event,
    GpusLost,
    GpusUnheard,
    JobFinished,
    JobSubmitted,
    KindsFound,
    MemoryFound,
    NodeAdded,
    NodeDraining,
)
from tlora.scheduler.policies import LIVE_POLICIES
from tlora.scheduler.scheduler import Scheduler
from tlora.sim.mapping import logged_jobs
from tlora.sim.trace import read_event_log

BASE = next(iter(even_cost().constants))
THERE = (NodeAdded("n", (0, 1)), BaseAdded("base", 10**9))


def test_each_file_begins_with_what_there_is_and_no_job_is_lost_until_the_oldest_goes(tmp_path: Path) -> None:
    path, most = tmp_path / "events.jsonl", 4000
    orders = [made_job(f"j{number}", 10, float(number)) for number in range(100)]
    files: list[Path] = [path, *(path.with_name(f"events.jsonl.{number}") for number in range(1, KEPT + 1))]
    with closing(EventLog(path, most_bytes=most)) as log:
        for item in THERE:
            log.write(0.0, item)
        for order in orders:
            log.write(order.submit_seconds, order.job)
    assert sorted(tmp_path.iterdir()) == files
    longest = max(len(line) for file in files for line in file.read_bytes().splitlines(keepends=True))
    assert all(file.stat().st_size < most + longest for file in files)
    seen: list[tuple[float, str]] = []
    for file in reversed(files):
        rows = read_event_log(file)
        assert tuple(item for _, item in rows[:2]) == THERE
        assert all(earlier <= later for (earlier, _), (later, _) in itertools.pairwise(rows))
        seen += [(seconds, item.job_id) for seconds, item in rows if isinstance(item, JobSubmitted)]
        assert len(logged_jobs(rows, even_cost())) == sum(isinstance(item, JobSubmitted) for _, item in rows)
    assert 0 < len(seen) < len(orders)
    assert seen == [(order.submit_seconds, order.job.job_id) for order in orders][-len(seen) :]


def test_a_restart_goes_on_in_the_last_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for name in "abc":
        with closing(EventLog(path, most_bytes=1000)) as log:
            log.write(1.0, THERE[0])
            log.write(5.0, made_job(name, 10).job)
    rows = [row for file in sorted(tmp_path.iterdir(), reverse=True) for row in read_event_log(file)]
    assert [(seconds, item.job_id) for seconds, item in rows if isinstance(item, JobSubmitted)] == [(5.0, "a"), (10.0, "b"), (15.0, "c")]


def gpus_of(host: int) -> tuple[int, ...]:
    return tuple(range(10 * host, 10 * host + 4))


def pool_after(events: Iterable[Event]) -> tuple[object, ...]:
    """What a fresh scheduler takes to be there."""
    scheduler = Scheduler(LIVE_POLICIES["fifo"](), even_cost(), on_wait=lambda *_: None)
    for event in events:
        scheduler.handle(event, 0.0)
    state = scheduler.state
    nodes = {name: (node.rack, node.gpus) for name, node in state.pool.nodes.items() if node.gpus}
    rooms = {gpu: state.memory.room_bytes.get(gpu) for gpu in state.pool.node_of}
    kinds = {gpu: state.kinds.kind_of.get(gpu) for gpu in state.pool.node_of}
    pool = state.pool
    return nodes, rooms, kinds, pool.draining & nodes.keys(), pool.unheard, pool.num_gpus, pool.most_gpus, state.cost.constants


def test_hosts_that_went_leave_nothing_behind(tmp_path: Path) -> None:
    """Of an engine that scales hosts come and go for months."""
    path = tmp_path / "events.jsonl"
    with closing(EventLog(path, most_bytes=4000)) as log:
        for host in range(200):
            log.write(float(host), MemoryFound(gpus_of(host), (10**9,) * 4))
            log.write(float(host), NodeAdded(f"host{host}", gpus_of(host)))
            log.write(host + 0.5, GpusLost(gpus_of(host), "given back"))
        for number in range(20):
            log.write(1000.0 + number, JobFinished(f"j{number}"))
    rows = [row for file in sorted(tmp_path.iterdir(), reverse=True) for row in read_event_log(file)]
    assert [item.job_id for _, item in rows if isinstance(item, JobFinished)] == [f"j{number}" for number in range(20)]
    assert len({item.node for _, item in rows if isinstance(item, NodeAdded)}) > 40, "most of the room is not for what went"


def test_a_file_that_begins_with_more_than_its_size_has_room_for_what_happens(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with closing(EventLog(path, most_bytes=1000)) as log:
        for host in range(30):
            log.write(0.0, NodeAdded(f"host{host}", gpus_of(host)))
        for number in range(20):
            log.write(1.0, JobFinished(f"j{number}"))
    rows = [row for file in sorted(tmp_path.iterdir(), reverse=True) for row in read_event_log(file)]
    assert [item.job_id for _, item in rows if isinstance(item, JobFinished)] == [f"j{number}" for number in range(20)]


KINDS = ["add", "add", "lose", "lose one", "drain", "measure", "silent", "heard"]
HOSTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 4)), max_size=25)


@given(moves=HOSTS)
def test_a_file_begins_with_the_gpus_that_there_are_and_what_is_known_of_them(moves: list[tuple[str, int]]) -> None:
    """A host that comes, or comes back, says what its GPUs are."""
    head, seen = LogHead(), list[Event]()
    for number, (kind, host) in enumerate(moves):
        gpus = gpus_of(host)
        events: dict[str, tuple[Event, ...]] = {
            "add": (
                MemoryFound(gpus, ((24 + 8 * host) * 10**9,) * 4),
                KindsFound(gpus, (f"kind{host}",) * 4, (1.0 + host,) * 4),
                NodeAdded(f"host{host}", gpus, f"rack{host % 2}"),
            ),
            "lose": (GpusLost(gpus),),
            "lose one": (GpusLost((gpus[number % 4],)),),
            "drain": (NodeDraining(f"host{host}", finish=number % 2 == 0),),
            "silent": (GpusUnheard(gpus[number % 2 :], f"the lease of host {host}"),),
            "heard": (GpusUnheard(gpus, ""),),
            "measure": (BaseMeasured(BASE, "CPU", BaseSpeed(1000.0 + number, 0.5, 0.1, 0.05)),),
        }
        for event in events[kind]:
            seen.append(event)
            head.see(event)
    again = LogHead()
    for event in head.events():
        again.see(event)
    assert list(again.events()) == list(head.events())
    *there, most, cost = pool_after(seen)
    *there_again, most_again, cost_again = pool_after(head.events())
    assert there_again == there and cost_again == cost
    assert most_again == most or any(isinstance(event, NodeDraining) for event in seen)
