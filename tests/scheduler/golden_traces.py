"""What three policies do to one small story, action by action, as files in golden/: what a change of policy changes is there to be read.

Where a change is meant, `python -m tests.scheduler.golden_traces`, from the repository's root, writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.scheduler.invariants import check
from tests.scheduler.mirror import made_cost, made_spec
from tlora.protocol import (
    Event,
    GpusLost,
    GroupReady,
    JobCancelled,
    JobFailed,
    JobFinished,
    NodeAdded,
    StepsDone,
    Tick,
    to_json,
)
from tlora.scheduler.policies import POLICIES
from tlora.scheduler.scheduler import Scheduler

FOLDER = Path(__file__).parent / "golden"
WRITTEN_DOWN = ("backfill", "tlora", "residual_capacity")  # one job a GPU, the published rule, ours

STORY: list[tuple[float, Event]] = [
    (0.0, NodeAdded("n0", (0, 1, 2, 3), "r0")),
    (0.0, NodeAdded("n1", (4, 5, 6, 7), "r0")),
    (0.0, made_spec("four", 4, tokens=4000.0, steps=3000, max_slowdown=2.0)),
    (10.0, made_spec("three", 3, tokens=3000.0, steps=1000)),
    (20.0, made_spec("pair", 2, tokens=1000.0, steps=200, max_slowdown=3.0)),
    (30.0, made_spec("one", 1, tokens=500.0, steps=900, max_slowdown=3.0)),
    (40.0, made_spec("small", 1, tokens=200.0, steps=100, max_slowdown=4.0)),
    (50.0, made_spec("urgent", 1, tokens=800.0, steps=100, priority=1.0)),
    (55.0, made_spec("south", 1, base_model="south", steps=50)),
    (60.0, GroupReady("g0")),
    (60.0, StepsDone("four", "g0", 35.0, 1.6)),
    (60.0, Tick()),
    (150.0, JobFinished("three")),
    (200.0, GpusLost((5,), "out of luck")),
    (260.0, NodeAdded("n1", (4, 5, 6, 7), "r0")),
    (300.0, Tick()),
    (400.0, made_spec("eight", 8, tokens=8000.0, steps=20)),
    (410.0, made_spec("eight", 8, tokens=8000.0, steps=20)),
    (3600.0, Tick()),
    (3700.0, JobFinished("one")),
    (3800.0, JobFinished("four")),
    (4000.0, JobCancelled("urgent")),
    (4100.0, JobFailed("pair", "out of luck")),
    (5000.0, Tick()),
    (5100.0, JobFinished("small")),
    (5200.0, JobFinished("south")),
    (5300.0, JobFinished("eight")),
]


def told(policy: str) -> list[dict[str, Any]]:
    """The story under a policy: each event and what is done about it, as JSON's types."""
    scheduler = Scheduler(POLICIES[policy](), made_cost())
    lines: list[dict[str, Any]] = []
    for now, event in STORY:
        actions = scheduler.handle(event, now)
        check(scheduler.state)
        lines.append({"now": now, "event": to_json(event), "actions": [to_json(action) for action in actions]})
    return json.loads(json.dumps(lines))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for policy in WRITTEN_DOWN:
        text = ",\n".join(json.dumps(line) for line in told(policy))
        (FOLDER / f"{policy}.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
