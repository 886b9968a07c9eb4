"""An event log as it was written is read back; a torn end is forgiven, anything else is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.answers import answered
from tlora.errors import DataError
from tlora.protocol import (
    Action,
    Event,
    GpusLost,
    JobGroup,
    JobProfile,
    JobSubmitted,
    NodeAdded,
    ParallelPlan,
    RejectJob,
    StartGroup,
    StepsDone,
    Tick,
    to_json,
)
from tlora.scheduler.residual_capacity import residual_capacity
from tlora.scheduler.scheduler import Scheduler
from tlora.scheduler.settings import Settings
from tlora.shape.cost import CostModel
from tlora.shape.hardware import cost_model
from tlora.sim.mapping import BASES
from tlora.sim.trace import is_event_log, read_event_log

GROUP = JobGroup("g0", "llama-3-8b", (0, 1), ParallelPlan(2, 4096), ("a",), (1.5,))
LOG: list[tuple[float, Event | Action]] = [
    (0.0, NodeAdded("n0", (0, 1), "r0")),
    (1.5, JobSubmitted("a", "llama-3-8b", 2, JobProfile(2048.0, 10, 512, 1000, (0, 1)), max_slowdown=2.0)),
    (1.5, StartGroup(GROUP)),
    (9.0, StepsDone("a", "g0", 3.5, 0.25)),
    (9.5, Tick()),
    (10.0, GpusLost((1,), "Xid 79")),
    (10.0, RejectJob("b", "too big")),
]


def line(seconds: float, entry: Event | Action) -> str:
    return json.dumps({"seconds": seconds, **to_json(entry)})


def test_a_log_is_read_as_it_was_written_without_its_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    text = "".join(line(*entry) + "\n" for entry in LOG)
    path.write_text(text)
    assert is_event_log(path) and not is_event_log("ee9e8c")
    assert read_event_log(path) == LOG
    path.write_text(text + '{"seconds": 11.0, "ty')
    assert read_event_log(str(path)) == LOG


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ('{"seconds": 1.0, "ty', "is not JSON"),
        ('{"seconds": 6, "type": "Tick", "seconds": 7}', "the key 'seconds' stands twice in one object; keep one of the two"),
        ("[1, 2]", "'[1, 2]' is no JSON object"),
        ('{"type": "Tick"}', '"seconds" is None, and must be a number of at most 100,000,000,000'),
        ('{"seconds": true, "type": "Tick"}', '"seconds" is True'),
        ('{"seconds": NaN, "type": "Tick"}', '"seconds" is nan'),
        (
            '{"seconds": 4, "type": "Tick"}',
            '"seconds" is 4, and the line before has 5.0; time goes on. If another run begins here, give it a file of its own; '
            "else sort the lines",
        ),
        (f'{{"seconds": {10**400}, "type": "Tick"}}', f'"seconds" is 1{79 * "0"}, and must be a number'),
        ('{"seconds": 6, "type": "Tock"}', "'Tock'"),
        ('{"seconds": 6, "type": "JobCancelled", "job_id": 7}', "JobRequest.job_id is 7"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, second: str, says: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{line(5.0, Tick())}\n{second}\n")
    with pytest.raises(DataError) as error:
        read_event_log(path)
    assert str(error.value).startswith(f"{path}, line 2: ") and says in str(error.value)


def test_a_json_document_is_told_what_a_trace_is(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"jobs": []}, indent=2))
    with pytest.raises(DataError, match="line 1: '{' is not JSON .*An event log has one JSON object a line, and any other trace is CSV"):
        read_event_log(path)


def test_a_log_of_an_older_version_is_read_and_gives_the_same_decisions() -> None:
    """Written at commit 509d442: 12 jobs of ee9e8c on two nodes, with a group that changes, under our policy, which then cut any step and
    did not know widths, with what an exchange was taken to cost then.
    """
    rows = read_event_log(Path(__file__).with_name("event_log_509d442.jsonl"))
    assert len(rows) == 150
    then = {"exchange_seconds": 0.0081, "exchange_gpu_seconds": 0.0, "exchange_between_nodes_seconds": 0.0165}
    constants = cost_model("h200", "tlora", BASES).constants
    cost = CostModel({base: replace(found, **then) if base.startswith("llama") else found for base, found in constants.items()})
    scheduler = Scheduler(residual_capacity(Settings(least_replica_tokens=1, width_exponent=0.0)), cost)
    assert answered(scheduler, rows) == rows
