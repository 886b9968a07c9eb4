"""What a scenario stands for: names, nodes, jobs at a load, constants that were changed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sim.small_traces import LINES, write_trace
from tlora.errors import ConfigError, DataError
from tlora.protocol import JobProfile, JobSubmitted, to_json
from tlora.sim.mapping import BASES, RULES
from tlora.sim.scenario import Scenario, check_names, contender, cost_of, inputs_digest, num_nodes, read_nodes, scene_of


def test_a_policy_and_its_kernels() -> None:
    assert contender("fifo", "tlora") == ("fifo", "tlora") and contender("fifo", "peft") == ("fifo", "peft")
    assert contender("fifo/peft", "tlora") == ("fifo", "peft")
    with pytest.raises(ConfigError, match="policy 'ffo'.*did you mean 'fifo'"):
        contender("ffo", "tlora")
    with pytest.raises(ConfigError, match="policy 'fifo/pft'.*did you mean 'peft'"):
        contender("fifo/pft", "tlora")


def test_names_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    check_names(Scenario())
    check_names(Scenario(trace=str(write_trace(tmp_path))))
    with pytest.raises(ConfigError, match="trace 'ee9e8d': .*; did you mean 'ee9e8c'"):
        check_names(Scenario(trace="ee9e8d"))
    with pytest.raises(ConfigError, match="gpu 'h20': .*; did you mean 'h200'"):
        check_names(Scenario(gpu="h20"))
    with pytest.raises(ConfigError, match="kernels 'Peft': .*; did you mean 'peft'"):
        check_names(Scenario(kernels="Peft"))


def test_nodes() -> None:
    assert read_nodes("16x8") == (16, 8) and read_nodes(" 2X4 ") == (2, 4) and num_nodes(24, 8) == 3
    for text in ("16", "x8", "0x8", "16x", "16x8x2", "-1x8", "1001x1000", "9" * 5000 + "x1"):
        with pytest.raises(ConfigError, match="write their number, an x"):
            read_nodes(text)
    with pytest.raises(ConfigError, match="12 GPUs are no whole number of nodes of 8"):
        num_nodes(12, 8)
    assert num_nodes(1_000_000, 8) == 125_000 and read_nodes("1000x1000") == (1000, 1000)
    with pytest.raises(ConfigError, match="1,000,008 GPUs.*at most 1,000,000"):
        num_nodes(1_000_008, 8)


def test_jobs_are_the_first_at_the_load(tmp_path: Path) -> None:
    scenario = Scenario(trace=str(write_trace(tmp_path)), nodes=1)
    scene = scene_of(scenario)
    assert scene.trace == "small" and [job.job.job_id for job in scene.jobs] == ["a", "b", "c", "d"]
    asked, span = sum(int(gpus) * float(duration) for _, _, gpus, duration in LINES), float(LINES[-1][1])
    assert scene.load == pytest.approx(asked / span / 8) and scene.notes == {"arrivals": "as recorded"}
    dense = scene_of(replace(scenario, load=2 * scene.load))
    assert dense.load == pytest.approx(2 * scene.load) and dense.notes == {"arrivals": "compressed 2 times"}
    assert [job.submit_seconds for job in dense.jobs] == pytest.approx([job.submit_seconds / 2 for job in scene.jobs])
    assert scene_of(replace(scenario, load=scene.load / 4)).notes == {"arrivals": "stretched 4 times"}
    two = scene_of(replace(scenario, jobs=2))
    assert [job.job.job_id for job in two.jobs] == ["a", "b"] and two.notes["filters"] == "first 2 jobs"
    assert scene_of(replace(scenario, jobs=1)).load == math.inf  # one moment has no load, and can be replayed all the same
    with pytest.raises(ConfigError, match="has no load"):
        scene_of(replace(scenario, jobs=1, load=0.5))


def test_what_is_drawn_depends_on_seed_and_mode() -> None:
    few = Scenario(jobs=40)
    jobs = scene_of(few).jobs
    assert jobs == scene_of(few).jobs != scene_of(replace(few, seed=1)).jobs
    ranks = {job.job.profile.adapter_parameters for job in scene_of(replace(few, paper=True)).jobs}
    assert max(ranks) < max(job.job.profile.adapter_parameters for job in jobs)  # 16 at most, not 64


def test_mixed_jobs_lie_over_four_bases_with_adapters_of_their_shapes() -> None:
    mixed = Scenario(gpu="h200-from-128", mixed=True, jobs=300)
    jobs = [job.job for job in scene_of(mixed).jobs]
    by_base = {base: [job for job in jobs if job.base_model == base] for base, _ in RULES["mixed"].bases}
    assert all(by_base.values()) and sum(map(len, by_base.values())) == len(jobs)
    largest = [max(job.profile.adapter_parameters for job in own) for own in by_base.values()]
    assert largest == sorted(largest)
    for kernels in ("tlora", "peft"):
        assert set(by_base) <= set(cost_of(mixed, kernels).constants)


def test_mixed_jobs_need_constants_of_all_their_bases_and_one_way_to_draw() -> None:
    with pytest.raises(ConfigError, match="gpu 'h200' has no constants of qwen3-1.7b, which --mixed draws. Add --gpu h200-from-128"):
        scene_of(Scenario(mixed=True, jobs=3))
    with pytest.raises(ConfigError, match="--paper and --mixed both say what is drawn"):
        scene_of(Scenario(gpu="h200-from-128", mixed=True, paper=True, jobs=3))


def test_constants_are_scaled_for_all_kernels_and_kappa_for_ours() -> None:
    plain, scaled = Scenario(), Scenario(scale=(("launch_seconds", 1.3),))
    for kernels in ("tlora", "peft"):
        before, after = cost_of(plain, kernels).constants, cost_of(scaled, kernels).constants
        assert set(BASES) <= set(before)
        for base in BASES:
            assert after[base].launch_seconds == pytest.approx(1.3 * before[base].launch_seconds)
            assert after[base].tokens_per_second == before[base].tokens_per_second
    faster, peft = cost_of(Scenario(kappa=2.0), "tlora").constants, cost_of(plain, "peft").constants
    for base in BASES:
        assert faster[base].tokens_per_second == 2 * peft[base].tokens_per_second
        assert faster[base].launch_seconds == cost_of(plain, "tlora").constants[base].launch_seconds
        assert faster[base].source["tokens_per_second"] == "assumed: 2 times that of PEFT"
    assert cost_of(Scenario(kappa=2.0), "peft").constants == peft


def test_an_event_log_is_replayed_as_it_happened(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    job = JobSubmitted("a", "llama-3-8b", 2, JobProfile(4096.0, 100, 512, 1000), max_slowdown=1.5)
    rows = [(0.0, job), (50.0, replace(job, job_id="b"))]
    path.write_text("".join(json.dumps({"seconds": seconds, **to_json(item)}) + "\n" for seconds, item in rows))
    scene = scene_of(Scenario(trace=str(path), nodes=1))
    assert [(each.submit_seconds, each.job.job_id) for each in scene.jobs] == [(0.0, "a"), (50.0, "b")]
    assert scene.load == pytest.approx(sum(2 * each.replayed_seconds for each in scene.jobs) / 50 / 8)
    assert len(scene_of(Scenario(trace=str(path), nodes=1, jobs=1)).jobs) == 1
    with pytest.raises(ConfigError, match="is an event log"):
        scene_of(Scenario(trace=str(path), load=0.5))
    path.write_text(json.dumps({"seconds": 0.0, "type": "Tick"}) + "\n")
    with pytest.raises(ConfigError, match="no job was submitted"):
        scene_of(Scenario(trace=str(path)))


def test_the_digest_tells_other_inputs(tmp_path: Path) -> None:
    path = write_trace(tmp_path)
    before = inputs_digest(Scenario(trace=str(path)))
    assert before == inputs_digest(Scenario(trace=str(path), seed=5, load=0.5))
    path.write_text(path.read_text().replace("4,300", "4,301"))
    assert inputs_digest(Scenario(trace=str(path))) != before
    with pytest.raises(DataError):
        inputs_digest(Scenario(trace="nowhere.csv"))
