"""What a trace's rows count for: rejected ones not in the load, unknown states not in the completion times, and all of it said."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tlora.errors import ConfigError
from tlora.sim.metrics import metrics
from tlora.sim.run import run_scenario
from tlora.sim.scenario import Scenario, scene_of
from tlora.sim.trace import end_of

HEAD = "job_id,submit_s,gpus,duration_s,user,vc,type,state\n"


def scenario_of(directory: Path, *rows: str, **settings: object) -> Scenario:
    path = directory / "odd.csv"
    path.write_text(HEAD + "".join(f"{row}\n" for row in rows))
    return replace(Scenario(trace=str(path), policy="fifo", nodes=1), **settings)


MIXED = ("a,0,8,400,u,v,sft,COMPLETED", "b,500,4,300,u,v,sft,COMPLETED", "wide,600,64,500000,u,v,sft,COMPLETED", "d,1000,1,200,u,v,sft,")


def test_the_load_is_that_of_the_jobs_that_can_run(tmp_path: Path) -> None:
    scenario = scenario_of(tmp_path, *MIXED)
    scene = scene_of(scenario)
    assert scene.load == pytest.approx((8 * 400 + 4 * 300 + 200) / 1000 / 8)
    assert len(scene.jobs) == 4
    (warning,) = scene.warnings
    assert warning.startswith("1 of 4 jobs, 100.0% of the GPU time asked for, can never run on this cluster and are rejected; load counts")
    assert warning.endswith("'wide', the first: it asks for 64 GPUs and the cluster has 8. Ask for fewer")
    dense = scene_of(replace(scenario, load=0.9))
    assert dense.load == pytest.approx(0.9)
    first, *_, last = (job.submit_seconds for job in dense.jobs)
    assert last - first == pytest.approx((8 * 400 + 4 * 300 + 200) / 8 / 0.9)
    assert scene_of(replace(scenario, nodes=8)).warnings == []


def test_a_dense_load_keeps_the_cluster_busy_though_rows_are_rejected(tmp_path: Path) -> None:
    """Counting the rejected row too, load 0.9 was 4.5 % allocated."""
    rows = [f"j{at},{600 * at},4,1000,u,v,sft,COMPLETED" for at in range(60)]
    scenario = scenario_of(tmp_path, *rows[:30], "wide,18000,64,500000,u,v,sft,COMPLETED", *rows[31:], load=0.9)
    result = run_scenario(scenario).result
    assert metrics(result)["allocated_utilisation"] > 0.7 and result.warnings


def test_a_trace_of_which_no_job_can_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no job .*'a', .*64 GPUs"):
        scene_of(scenario_of(tmp_path, "a,0,64,10,u,v,sft,COMPLETED", "b,5,32,10,u,v,sft,COMPLETED"))


@pytest.mark.parametrize(
    "state, ends",
    [
        *((word, "done") for word in ("COMPLETED", "Pass", "done", "", "UNKNOWN", "Unknown", "Succeeded", "Complete", "Terminated")),
        *((word, "cancelled") for word in ("CANCELLED", "Killed", "CANCELLED by 7", "CANCELLED+", "Canceled", "PREEMPTED", "Evicted")),
        *((word, "failed") for word in ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "Failed", "OOMKilled", "DEADLINE", "BOOT_FAIL")),
        *((word, "unknown") for word in ("Vanished", "CANCELLED BYE", "0")),
    ],
)
def test_words_for_states(state: str, ends: str) -> None:
    assert end_of(state) == ends


def test_a_state_that_is_not_listed_is_named_and_left_out_of_jct(tmp_path: Path) -> None:
    rows = ("a,0,1,400,u,v,sft,COMPLETED", "b,1,1,90000,u,v,sft,Vanished", "c,2,1,90000,u,v,sft,Vanished", "d,3,1,5,u,v,sft,Odd")
    result = run_scenario(scenario_of(tmp_path, *rows)).result
    assert [job.state for job in result.jobs] == ["done", "unknown", "unknown", "unknown"]
    assert all(math.isfinite(job.finished_seconds) for job in result.jobs)
    found = metrics(result)
    assert found["mean_jct_seconds"] < 1000 and found["jobs_unknown"] == 3 and found["jobs_done"] == 1
    (warning,) = result.warnings
    assert warning.startswith("3 jobs ended in a state that is not known ('Vanished' (2), 'Odd' (1)); they run")


def test_a_kubernetes_trace_counts_what_succeeded_and_leaves_out_what_had_not_ended(tmp_path: Path) -> None:
    ended = ("a,0,1,400,u,v,sft,Succeeded", "b,1,1,300,u,v,sft,Failed", "c,2,1,200,u,v,sft,Unknown")
    open_ = ("d,3,8,90000,u,v,sft,Running", "e,4,1,,u,v,sft,Pending", "f,5,1,0,u,v,sft,SUSPENDED")
    found = run_scenario(scenario_of(tmp_path, *ended, *open_)).result
    assert [job.state for job in found.jobs] == ["done", "failed", "done"]
    assert found.warnings == []
    scene = scene_of(scenario_of(tmp_path, *ended, *open_))
    assert scene.notes["rows left out: never started, or not ended when the log was taken"] == 3
    assert scene.load == pytest.approx((400 + 300 + 200) / 2 / 8)  # nothing of what has run so far
