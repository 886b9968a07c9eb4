"""A log of bounded size: it goes on in new files, each of which can be replayed by itself."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

from tests.sim.small_clusters import even_cost, made_job
from tlora.cluster.event_log import KEPT, EventLog
from tlora.protocol import BaseAdded, JobSubmitted, NodeAdded
from tlora.sim.mapping import logged_jobs
from tlora.sim.trace import read_event_log

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
