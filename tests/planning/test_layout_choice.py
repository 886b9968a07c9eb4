"""`layout: auto` by what is predicted: one rule for `tlora plan`, `check` and a run, and which margins it has."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import in_every_run
from tests.engine.tiny_runs import job, run_spec, save_base
from tests.planning.test_layouts import devices_of, limited, sketched
from tlora.batching.replicas import ReplicaPlacement
from tlora.engine.check import check
from tlora.engine.ranks.kinds import Gpus, earlier_form
from tlora.job import RunSpec
from tlora.planning.job_work import counting_jobs
from tlora.planning.layout_choice import choose_form, predict_form
from tlora.planning.layout_units import UnitPlan
from tlora.planning.layouts import LEAST_GAIN, LayoutPlan, plan_layouts
from tlora.shape import GPU_SHARE
from tlora.shape.gpu_models import find_gpu
from tlora.shape.layout import FORMS, Form, Layout

H100 = find_gpu("h100")
UNIT = UnitPlan(1024, 0, 1.0, 1.0, 0.0, 1, 2)


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are large beside what a short micro-batch keeps."""
    return save_base(tmp_path_factory.mktemp("layered") / "base", num_hidden_layers=8, hidden_size=256, intermediate_size=1024)


@pytest.fixture
def run(layered: Path, data: Path, tmp_path: Path) -> RunSpec:
    jobs = [job(name, str(data / "a.jsonl"), r=rank) for name, rank in (("a", 4), ("b", 16), ("c", 8))]
    return run_spec(layered, tmp_path / "out", jobs, dtype="bfloat16")


def lasting(layout: Layout, seconds: float) -> LayoutPlan:
    return LayoutPlan(layout, ("gpu",) * layout.gpus, UNIT, seconds, 1 / seconds, ())


WHOLE, SHARED, STAGES = Layout("whole", 2), Layout("shared", 2), Layout("stages", 1, 2)


def test_another_form_is_taken_only_by_its_margin() -> None:
    def taken(stages: float, shared: float = 1.0, before: Form | None = None) -> str:
        found = [lasting(WHOLE, 1.0), lasting(SHARED, shared), lasting(STAGES, stages)]
        choice = choose_form(found, 2, before)
        assert choice is not None and bool(choice.why) == (choice.form != "whole" or before is not None)
        return choice.form

    just = 1 / LEAST_GAIN["stages"]
    assert (taken(just * 1.01), taken(just * 0.99)) == ("whole", "stages")
    assert taken(just * 0.99, shared=just * 0.98) == "shared", "the fastest of those that pay"
    assert taken(just * 1.01, shared=0.85) == "shared"
    for noise in (0.97, 1.03):  # what a resumed run has is kept on both sides of the margin
        assert taken(just * noise, before="stages") == "stages"
        assert taken(just * noise * 1.04, before="whole") == "whole"
    assert taken(1.2, before="stages") == "whole", "it would take 1.2 times as long as the simplest"


def test_layouts_that_no_run_has_are_not_taken() -> None:
    """Pipelines as replicas of one another, and one GPU of several."""
    fast = [lasting(Layout("stages", 2, 2), 0.1), lasting(Layout("streamed"), 0.1), lasting(Layout("stages", 1, 2), 0.1)]
    assert choose_form(fast, 4) is None
    choice = choose_form([lasting(Layout("whole", 4), 1.0), *fast], 4)
    assert choice is not None and choice.form == "whole" and not choice.why
    assert choose_form(fast, 1) is not None


def form_of(said: str) -> str:
    """Of `RunCheck.form`."""
    return "whole" if said.startswith("each GPU holds") else "stages" if ": layers 0 to " in said else "shared"


@pytest.mark.parametrize(("gpu", "forms"), in_every_run([("h100", {2: "stages", 3: "shared"}), ("rtx4090", {6: "whole"})], 0))
def test_plan_and_run_choose_alike(layered: Path, tmp_path: Path, gpu: str, forms: dict[int, str]) -> None:
    """The less memory there is, the less of the base lies on each GPU. `check` lays it out as a run does."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": "red green blue small " * (20 + 5 * row)}) + "\n" for row in range(16)))
    jobs = [job(name, str(data), r=2, batch_size=8, max_length=512) for name in "abcd"]
    run = run_spec(layered, tmp_path / "out", jobs, dtype="bfloat16", deterministic=True)
    model, sketches = find_gpu(gpu), sketched(run)
    devices = devices_of(run, model, model)
    for times, form in forms.items():
        limit = times * devices[0].parts.memory.base_bytes
        plans = plan_layouts(run, sketches, limited(devices, limit)).feasible
        choice = choose_form(plans, 2)
        assert choice is not None and choice.form == form, [(str(each.layout), each.seconds) for each in plans]
        assert choice.form == form_of(check(run.model_copy(update={"memory_limit": limit}), gpu=gpu, gpus=2).form)


@pytest.mark.parametrize("deterministic", in_every_run([False, True], 0))
def test_plan_and_run_agree_where_the_larger_gpu_alone_holds_a_job(layered: Path, data: Path, tmp_path: Path, deterministic: bool) -> None:
    """Whole is feasible to both, with that job kept off the smaller one; stages by order are no longer answered with whole."""
    jobs = [job("a", str(data / "a.jsonl"), r=2), job("wide", str(data / "a.jsonl"), r=256), job("c", str(data / "a.jsonl"), r=2)]
    run = run_spec(layered, tmp_path / "out", jobs, dtype="bfloat16", deterministic=deterministic, token_budget=64)
    sketches, roomy = sketched(run), devices_of(run, H100)
    least = [plan_layouts(run, [one], limited(roomy, 1 << 40), ("whole",)).feasible[0].unit.predicted_bytes for one in sketches]
    room = (max(least[0], least[2]) + least[1]) // 2
    gpus = []
    for name, limit in (("small", room), ("large", 1 << 40)):
        described = {"name": name, "memory": int(limit / GPU_SHARE) + 1, "compute_capability": 9.0, "tflops": 989}
        (tmp_path / f"{name}.json").write_text(json.dumps(described))
        gpus.append(str(tmp_path / f"{name}.json"))
    devices = devices_of(run, *map(find_gpu, gpus))
    for ordered in ("whole", "auto"):
        asked = run.model_copy(update={"layout": ordered})
        choice = predict_form(asked, sketches, devices)
        assert choice is not None and choice.form == "whole", plan_layouts(asked, sketches, devices).refused
        checked = check(asked, gpu=",".join(gpus))
        assert not checked.problems and form_of(checked.form) == "whole" and checked.form.endswith("wide fits on GPU 1 alone")
        assert "wide" in checked.gpus[1].jobs
    both_small = [devices[0], devices[0]]
    (refused,) = plan_layouts(run, sketches, both_small, ("whole",)).refused
    assert refused.why.startswith("job 'wide' needs "), "it fits on none"
    stages = check(run.model_copy(update={"layout": "stages", "deterministic": False}), gpu=",".join(gpus))
    assert form_of(stages.form) == "stages"


@pytest.mark.parametrize("deterministic", in_every_run([False, True], 0))
def test_plan_and_check_give_a_small_gpu_the_short_samples(layered: Path, tmp_path: Path, deterministic: bool) -> None:
    """A deterministic run does not, as bits must not depend on memory."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": "red green blue small " * (300 if row % 4 == 0 else 30)}) + "\n" for row in range(16)))
    jobs = [
        job("mixed", str(rows), gpus=2, batch_size=8, max_length=1536, max_steps=100_000),
        job("short", str(rows), r=2, max_length=256, max_steps=100_000),
    ]
    run = run_spec(layered, tmp_path / "out", jobs, dtype="bfloat16", deterministic=deterministic, layout="whole")
    mixed, short = sketched(run)
    assert mixed.data is not None and mixed.layout is not None and short.longest <= 512 < mixed.longest
    memory = counting_jobs(devices_of(run, H100)[0].parts.memory, [replace(mixed, span=ReplicaPlacement(2, (0, 1)))], deterministic)
    room, gpus = memory.total_bytes([mixed.layout], 512, memory.most_recomputed), list[str]()
    for name, limit in (("small", room), ("large", 1 << 40)):
        described = {"name": name, "memory": int(limit / GPU_SHARE) + 1, "compute_capability": 9.0, "tflops": 989}
        (tmp_path / f"{name}.json").write_text(json.dumps(described))
        gpus.append(str(tmp_path / f"{name}.json"))
    checked, (planned,) = (
        check(run, gpu=",".join(gpus)),
        plan_layouts(run, [mixed, short], devices_of(run, *map(find_gpu, gpus)), ("whole",)).feasible,
    )
    on_small, told = checked.gpus[0], "GPU 0 has a part of mixed (samples of up to 512 tokens)"
    assert not checked.problems and checked.form.endswith("mixed fits on GPU 1 alone") and "mixed" in checked.gpus[1].jobs
    assert on_small.predicted_bytes <= on_small.limit_bytes
    if deterministic:
        assert not on_small.parts and told not in planned.why
        return
    assert on_small.parts == ("mixed",) and on_small.longest_samples == {"mixed": 512} and told in planned.why
    share = float(mixed.data.train.lengths[mixed.data.train.lengths <= 512].sum() / mixed.data.train.lengths.sum())
    each = check(run.model_copy(update={"jobs": [run.jobs[1]]}), gpu=gpus[1], gpus=2).gpus
    both = sum(gpu.seconds for gpu in checked.gpus)
    assert on_small.seconds == pytest.approx(share * (both - each[0].seconds) + each[0].seconds, rel=0.01), "the other job is there"


def test_stages_of_micro_batches_too_small_to_be_predicted_are_not_taken() -> None:
    found = [lasting(WHOLE, 1.0), replace(lasting(STAGES, 0.5), unit=replace(UNIT, token_budget=1000))]
    choice = choose_form(found, 2)
    assert choice is not None and choice.form == "whole"
    only = choose_form(found[1:], 2)
    assert only is not None and only.form == "stages", "where nothing else is feasible"


def test_the_form_of_an_earlier_run_is_read(run: RunSpec) -> None:
    out = Path(run.output_dir)
    out.mkdir(parents=True)
    assert earlier_form(run) is None
    for facts, form in (({}, None), ({"base_shared": False}, "whole"), ({"base_shared": True}, "shared")):
        (out / "run.json").write_text(json.dumps(facts))
        assert earlier_form(run) == form
    (out / "run.json").write_text(json.dumps({"base_shared": False, "stages": [[0, 4], [4, 8]]}))
    assert earlier_form(run) == "stages"


def test_nothing_is_chosen_by_speeds_that_are_not_known() -> None:
    assert Gpus(("NVIDIA H100 80GB HBM3",) * 2, (1.0, 1.0), (1, 1)).models == (H100, H100)
    assert Gpus(("cpu", "cpu"), (1.0, 1.0), (1, 1)).models == ()
    assert Gpus(("NVIDIA H100 80GB HBM3", "GPU of tomorrow"), (1.0, 1.0), (1, 1)).models == ()


def test_links_through_the_host_share_no_base(run: RunSpec) -> None:
    hosted = run.model_copy(update={"links": "host"})
    plans = plan_layouts(hosted, sketched(run), devices_of(run, H100, H100))
    assert [each.why for each in plans.refused if each.name.startswith("shared")] == ["the jobs file orders links: host"]
    assert all(each.layout.form in FORMS and each.layout.form != "shared" for each in plans.feasible)
    two_kinds = run.model_copy(update={"deterministic": True})
    refused = plan_layouts(two_kinds, sketched(run), [*devices_of(run, H100), *devices_of(run, replace(H100, name="other"))]).refused
    assert any("give other last bits" in each.why for each in refused)
