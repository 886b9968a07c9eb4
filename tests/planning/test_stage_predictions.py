"""What stages are predicted to reach, beside runs on two H200s: eight jobs over an 8B, hidden states through the host's memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning.test_micro_batches import EIGHT_B, real_jobs
from tlora.adapters.layout import AdapterLayout
from tlora.planning.layout_units import Device, Pipeline
from tlora.planning.layouts import LEAST_GAIN, plan_layouts
from tlora.planning.micro_batches import captured_graphs
from tlora.planning.planned_job import PlannedJob
from tlora.shape.base_parts import BaseParts, with_stages
from tlora.shape.cost import CostModel
from tlora.shape.gpu_models import find_gpu, link_rate
from tlora.shape.hardware import cost_model
from tlora.shape.layout import Form
from tlora.shape.memory import MOST_GPUS, base_memory
from tlora.shape.predicted_constants import predicted_constants
from tlora.shape.sharing import Member, group_step_seconds
from tlora.shape.token_cost import LAUNCH_SECONDS

RESULTS = Path(__file__).parents[2] / "bench" / "results"
H200 = find_gpu(str(RESULTS / "h200_f960408_calibrated.json"))  # as `tlora calibrate` measured one
PARTS = BaseParts(
    memory=EIGHT_B,
    layers=tuple(f"model.layers.{number}" for number in range(32)),
    layer_bytes=(436_224_000,) * 32,
    layer_weights=(218_103_808,) * 32,
    layer_features=(81_920,) * 32,
    embedding_bytes=1_050_673_152,
    head_bytes=1_050_673_152,
    head_weights=525_336_576,
    head_features=132_352,
    hidden_size=4096,
    in_8_bits=False,
    shared_bytes=(),
    streamed=None,
    precision_bytes={},
)
TWO = (Device(H200, PARTS, H200.limit_bytes),) * 2
WHOLE = "h200x2_0c9d8944_whole_8b.json", "plain"
STAGES = "stages-host"


def measured(file: str, case: str) -> tuple[int, float]:
    """Steps of each job, and tokens a second."""
    found: dict[str, Any] = json.loads((RESULTS / file).read_text())
    (launch,) = [launch for launch in found["launches"] if launch["case"] == case]
    return found["setup"]["steps"], launch["steady_tokens_per_second"]


def predicted(form: Form, times: int, steps: int, budget: int | str = "auto", devices: tuple[Device, ...] = TWO) -> float:
    """Tokens a second of the eight jobs with batches so many times as large."""
    run, jobs = real_jobs(times)
    specs = [job.spec.model_copy(update={"max_steps": steps}) for job in jobs]
    sketches = [PlannedJob(spec, job.data, job.longest, AdapterLayout(())) for spec, job in zip(specs, jobs, strict=True)]
    ordered = run.model_copy(update={"jobs": specs, "layout": form, "links": "host", "token_budget": budget})
    (found,) = plan_layouts(ordered, sketches, devices, (form,)).feasible
    return found.tokens_per_second


@pytest.mark.parametrize(
    ("file", "case", "times", "budget"),
    [
        (*WHOLE, 1, "auto"),
        ("h200x2_0c9d8944_stages_1536_8b.json", STAGES, 1, 1536),
        ("h200x2_b6cf6e2b_stages_8b_4x.json", "plain", 4, "auto"),
        ("h200x2_0c9d8944_stages_8b_4x.json", STAGES, 4, 7680),
    ],
)
def test_runs_on_two_gpus_are_predicted_within_a_twentieth(file: str, case: str, times: int, budget: int | str) -> None:
    steps, rate = measured(file, case)
    assert predicted("stages" if case == STAGES else "whole", times, steps, budget) == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("file", "whole", "times", "budget"),
    [
        ("h200x2_0c9d8944_stages_1536_8b.json", WHOLE, 1, 1536),
        ("h200x2_bd9f3d49_stages_1536_8b.json", ("h200x2_bd9f3d49_whole_8b.json", "plain"), 1, 1536),
        ("h200x2_0c9d8944_stages_8b_4x.json", ("h200x2_0c9d8944_stages_8b_4x.json", "plain"), 4, 7680),
    ],
)
def test_the_gain_of_stages_over_whole_bases_is_off_by_less_than_its_margin(
    file: str, whole: tuple[str, str], times: int, budget: int
) -> None:
    """By which one form is taken in place of the other; steps of both differ in the files, and what is captured is part of the gain."""
    steps, rate = measured(file, STAGES)
    gain = predicted("stages", times, steps, budget) / predicted("whole", times, steps)
    assert 1 / LEAST_GAIN["stages"] < gain / (rate / measured(*whole)[1]) < LEAST_GAIN["stages"]


def test_a_long_run_hardly_pays_for_its_graphs_and_a_short_one_does() -> None:
    """Of 120 steps it is a seventh at 1,536 tokens; where a micro-batch takes almost as long as its graph little is left to pay."""
    short, long, endless = (predicted("stages", 1, steps, 1536) for steps in (120, 3000, 300_000))
    assert 0.8 < short / endless < 0.9 and 0.98 < long / endless < 1
    assert predicted("stages", 4, 300, 7680) == pytest.approx(predicted("stages", 4, 3000, 7680), rel=0.01)
    assert captured_graphs(2, 12, 734) == 40 and captured_graphs(3, 12, 734) == 76
    assert captured_graphs(2, 13, 10) == 10, "a launch and a capture for each two micro-batches of a stage, at most"


def test_links_latency_and_launches_are_counted_in_tokens() -> None:
    """Through the host each end copies 8,192 bytes a token at the slower link; a fiftieth of its rate costs a quarter of all tokens."""
    cuts = (0, 17), (17, 32)
    slow = replace(H200, link_gb_per_second=1.1, link_back_gb_per_second=9.0)
    peers, apart = (Pipeline((Device(gpu, PARTS, 1),) * 2, cuts) for gpu in (slow, replace(slow, peer_gb_per_second=0.0)))
    token = 2 * max(2 * PARTS.timed_weights_of(*cut) for cut in cuts) / TWO[0].rate
    assert apart.overhead().per_token * token == pytest.approx(4096 * 2 / 1.1e9)
    assert peers.overhead().per_token * token == pytest.approx(4096 * 2 / 350e9)
    assert apart.overhead().launch * token == pytest.approx(17 * LAUNCH_SECONDS)
    assert apart.overhead().host_ahead and 0 < apart.overhead().latency * token < 0.001
    plain = replace(PARTS, memory=replace(EIGHT_B, num_layers=0))
    assert Pipeline((Device(H200, plain, 1),) * 2, cuts).overhead().launch == 0, "nothing is captured there"
    two = (Device(slow, PARTS, H200.limit_bytes),) * 2
    assert predicted("stages", 1, 3000, 1536, two) < 0.75 * predicted("stages", 1, 3000, 1536)


@pytest.mark.parametrize("picked", [(0,), (1,), (3,), (7,), (0, 1), (2, 3), (5, 6), (0, 1, 2, 3), tuple(range(8))])
def test_a_scheduler_and_a_simulator_count_the_seconds_of_stages_as_the_planner_does(picked: tuple[int, ...]) -> None:
    """Of jobs of the eight with batches of 228 to 7,696 tokens, by their mean alone, where the planner sends samples through a pipeline."""
    apart = replace(H200, peer_gb_per_second=0.0)
    constants = predicted_constants(PARTS, apart, cost_model("h200-from-128").constants["llama-3-8b"])
    cost = CostModel({"base": constants}, stage_rates=(link_rate(apart, apart),) * 2)
    cost.memory["base"] = with_stages(base_memory(PARTS.memory, [PARTS.memory.base_bytes] * MOST_GPUS, 0), PARTS, ordered=True)
    run, everyone = real_jobs(4)
    jobs = [everyone[number] for number in picked]
    specs = [job.spec.model_copy(update={"max_steps": 3000}) for job in jobs]
    sketches = [PlannedJob(spec, job.data, job.longest, AdapterLayout(())) for spec, job in zip(specs, jobs, strict=True)]
    ordered = run.model_copy(update={"jobs": specs, "layout": "stages", "links": "host"})
    (planned,) = plan_layouts(ordered, sketches, TWO, ("stages",)).feasible
    tokens = [float(sketch.data.train.lengths.mean()) * sketch.spec.batch_size for sketch in sketches if sketch.data is not None]
    seconds = group_step_seconds(cost, "base", 2 * cost.budgets[-1], 2, 1, [Member(own, own) for own in tokens])
    found = sum(own / each for own, each in zip(tokens, seconds, strict=True))
    assert found == pytest.approx(planned.tokens_per_second, rel=0.06)
