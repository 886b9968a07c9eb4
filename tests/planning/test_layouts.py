"""`tlora plan`'s layouts: the numbers of `tlora check` where both tell them, stages, two kinds of GPU, and why others are not feasible."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

from tests.cases import in_every_run
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.tiny_runs import job, run_spec, save_base
from tests.tiny import SHAPE
from tlora.data.prepare import prepare
from tlora.data.request import prepare_requests
from tlora.engine.check import check
from tlora.errors import CapacityError
from tlora.job import RunSpec
from tlora.kernels.device import as_if_on
from tlora.planning.base_outline import describe_base
from tlora.planning.base_parts import memory_in_parts, memory_of_last_stage
from tlora.planning.job_sketch import sketch_jobs
from tlora.planning.layout_units import Device, Pipeline, cut_pipeline, within
from tlora.planning.layouts import LayoutPlan, LayoutPlans, no_layout, plan_layouts
from tlora.planning.planned_job import PlannedJob
from tlora.shape.base_shape import BaseShape
from tlora.shape.gpu_models import GpuModel, find_gpu, link_rate
from tlora.shape.layout import Layout
from tlora.shape.memory import MemoryModel, StreamedBytes
from tlora.shape.stages import LayerRange
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel

H100, RTX_4090, RTX_3090 = find_gpu("h100"), find_gpu("rtx4090"), find_gpu("rtx3090")


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("layered") / "base", num_hidden_layers=8)


@pytest.fixture
def run(layered: Path, data: Path, tmp_path: Path) -> RunSpec:
    jobs = [job(name, str(data / "a.jsonl"), r=rank) for name, rank in (("a", 4), ("b", 16), ("c", 8))]
    return run_spec(layered, tmp_path / "out", jobs, dtype="bfloat16")


def shape_of(run: RunSpec, gpu: GpuModel) -> BaseShape:
    return counted(run.base_model, run.dtype, gpu, max(spec.largest_rank for spec in run.jobs))


@cache
def counted(base_model: str, dtype: str, gpu: GpuModel, rank: int) -> BaseShape:
    """Once for this file's tests."""
    with as_if_on(gpu.name, gpu.capability):
        return describe_base(base_model, dtype, None, "cuda", rank=rank)


def devices_of(run: RunSpec, *gpus: GpuModel) -> list[Device]:
    shapes = {gpu: shape_of(run, gpu) for gpu in dict.fromkeys(gpus)}
    return [Device(gpu, shapes[gpu].parts, gpu.limit_bytes) for gpu in gpus]


def sketched(run: RunSpec) -> tuple[PlannedJob, ...]:
    shape = shape_of(run, H100)
    return sketch_jobs(run, shape, prepare(prepare_requests(run, shape.vocab_size)))


def limited(devices: list[Device], limit_bytes: int) -> list[Device]:
    return [replace(device, limit_bytes=limit_bytes) for device in devices]


def large(devices: list[Device]) -> list[Device]:
    """With layers of 1 GiB and as many weights as an 8B's: what is fixed is little beside what grows with tokens."""

    def one(device: Device) -> Device:
        parts, layers = device.parts, len(device.parts.layers)
        memory = replace(parts.memory, base_bytes=parts.memory.base_bytes + (layers << 30), layer_weights=218_000_000)
        streamed = StreamedBytes(layers << 30, 1 << 30, layers, parts.memory.base_bytes)
        cut = replace(parts, layer_bytes=(1 << 30,) * layers, layer_weights=(218_000_000,) * layers, streamed=streamed, memory=memory)
        return replace(device, parts=replace(cut, head_weights=525_000_000))

    return list(map(one, devices))


def found_of(plans: LayoutPlans, form: str, stages: int = 1) -> LayoutPlan:
    (found,) = [each for each in plans.feasible if (each.layout.form, each.layout.stages) == (form, stages)]
    return found


@pytest.mark.parametrize("name", in_every_run(["h100", "rtx4090", "t4"], 2))
def test_one_gpu_is_planned_as_check_plans_it(run: RunSpec, name: str) -> None:
    gpu = find_gpu(name)
    checked = check(run, gpu=name)
    whole = found_of(plan_layouts(run, sketched(run), devices_of(run, gpu)), "whole")
    assert (whole.unit.token_budget, whole.unit.recomputed_layers) == (checked.token_budget, checked.layers_of_budget)
    assert (whole.unit.predicted_bytes, whole.unit.limit_bytes) == (checked.predicted_bytes, checked.limit_bytes)
    assert whole.tokens_per_second == pytest.approx(checked.tokens_per_second, rel=1e-9) and checked.tokens_per_second


@pytest.mark.parametrize("ordered", [False, True])
def test_a_streamed_base_is_planned_as_check_plans_it(run: RunSpec, ordered: bool) -> None:
    run = run.model_copy(update={"jobs": run.jobs[:1], "layout": "streamed" if ordered else "auto"})
    checked = check(run.model_copy(update={"layout": "auto"}), gpu="rtx4090")
    small = checked.predicted_bytes + (1 if ordered else -checked.base_bytes // 3)
    tight = run.model_copy(update={"memory_limit": small, "recompute": "none", "token_budget": checked.token_budget})
    streamed = check(tight, gpu="rtx4090")
    assert streamed.streamed and streamed.stream_cost is not None
    (device,) = limited(devices_of(tight, RTX_4090), small)
    found = found_of(plan_layouts(tight, sketched(tight), [device]), "streamed")
    assert (found.unit.token_budget, found.unit.predicted_bytes) == (streamed.token_budget, streamed.predicted_bytes)
    assert found.unit.exposed_seconds == pytest.approx(streamed.stream_cost.exposed_seconds)
    assert found.unit.micro_batch_seconds == pytest.approx(streamed.stream_cost.seconds)
    assert found.tokens_per_second == pytest.approx(streamed.tokens_per_second, rel=1e-9)


def test_no_layout_is_feasible_that_would_refuse_base_or_jobs(run: RunSpec) -> None:
    """Stages of a job that trains rows of the embedding; a mixture in parts or streamed, and in stages where its files do not allow it."""
    devices = devices_of(run, H100, H100)
    rows = run.model_copy(update={"jobs": [run.jobs[0].model_copy(update={"trainable_token_indices": [3, 9]}), *run.jobs[1:]]})
    plans = plan_layouts(rows, sketched(rows), devices)
    assert {each.layout.form for each in plans.feasible} == {"whole", "shared"}
    of_rows = "a trains rows of the embedding, which needs embedding and head in one place"
    assert {each.why for each in plans.refused if each.name.startswith("stages")} == {of_rows}
    mixture = [
        replace(device, parts=replace(device.parts, shared_bytes=(), streamed=None, no_stages="its files have each expert by itself"))
        for device in devices
    ]
    plans = plan_layouts(run, sketched(run), mixture)
    assert {each.layout.form for each in plans.feasible} == {"whole"}
    assert {each.why for each in plans.refused} == {
        "its layers cannot be cut into rows", "its files have each expert by itself"
    }  # fmt: skip
    plain = [replace(device, parts=replace(device.parts, takes_plain_path=True)) for device in devices]
    (refused,) = [each for each in plan_layouts(run, sketched(run), plain).refused if not each.name.startswith("streamed")]
    assert refused.name.startswith("stages on 2 GPUs") and refused.why.startswith("it takes the plain path on these GPUs")
    fixed = run.model_copy(update={"deterministic": True})
    assert "stages" in {each.layout.form for each in plan_layouts(fixed, sketched(fixed), plain).feasible}
    cuttable = [replace(device, parts=replace(device.parts, no_stages="")) for device in mixture]
    assert {each.layout.form for each in plan_layouts(run, sketched(run), cuttable).feasible} == {"whole", "stages"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose files have the experts of a layer in one tensor."""
    directory, tokenizer = tmp_path_factory.mktemp("mixture"), make_tokenizer(CHATML)
    tokenizer.save_pretrained(directory)
    shape: dict[str, Any] = SHAPE | {"vocab_size": len(tokenizer) + 3, "num_hidden_layers": 4, "intermediate_size": 32}
    shape |= {"max_position_embeddings": 2048}
    config = GptOssConfig(**shape, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("parameters", [None, ["gate_up_proj", "down_proj"]], ids=["attention", "experts"])
def test_a_mixture_in_parts_is_planned_as_check_plans_it(parameters: list[str] | None, mixture: Path, data: Path, tmp_path: Path) -> None:
    """By order alone, without compiled layers."""
    own = job("a", str(data / "a.jsonl"), target_modules=["q_proj", "o_proj"], target_parameters=parameters)
    run = run_spec(mixture, tmp_path / "out", [own], dtype="bfloat16")
    with as_if_on(H100.name, H100.capability):
        shape = describe_base(run.base_model, run.dtype, None, "cuda", rank=4, adapts_experts=parameters is not None)
    jobs = sketch_jobs(run, shape, prepare(prepare_requests(run, shape.vocab_size)))
    devices = [Device(H100, shape.parts, H100.limit_bytes)] * 2
    by_itself = plan_layouts(run, jobs, devices)
    assert {each.layout.form for each in by_itself.feasible} == {"whole", "stages"}
    assert {each.why.partition(",")[0] for each in by_itself.refused} == {"a mixture's layers are not compiled there"}
    for form, count in (("shared", 2), ("streamed", 1)):
        ordered = run.model_copy(update={"layout": form})
        checked = check(ordered, gpu="h100", gpus=count)
        found = found_of(plan_layouts(ordered, jobs, devices[:count]), form)
        assert (found.unit.token_budget, found.unit.recomputed_layers) == (checked.token_budget, 0) and checked.num_layers == 0
        assert found.unit.predicted_bytes == checked.predicted_bytes and not checked.problems
        whole = check(run, gpu="h100", gpus=count)
        assert whole.num_layers == 4 and whole.activation_bytes != checked.activation_bytes


def test_several_gpus_are_planned_as_check_plans_them(run: RunSpec) -> None:
    checked = check(run, gpu="rtx4090", gpus=2)
    whole = found_of(plan_layouts(run, sketched(run), devices_of(run, RTX_4090, RTX_4090)), "whole")
    assert "each GPU holds the whole base" in checked.form
    assert max(gpu.seconds for gpu in checked.gpus) <= whole.seconds, "micro-batches of finite size take longer than ideal products"
    assert whole.layout == Layout("whole", 2)


def test_stages_are_planned_as_check_plans_them(run: RunSpec) -> None:
    """Over so small a base what stages take besides products decides how large micro-batches are: without it they have other budgets."""
    ordered = run.model_copy(update={"layout": "stages", "links": "host", "dtype": "bfloat16"})
    found = found_of(plan_layouts(ordered, sketched(ordered), devices_of(ordered, H100, H100)), "stages", 2)
    assert found.unit.token_budget == check(ordered, gpu="h100", gpus=2).token_budget


def test_a_stage_holds_its_layers_and_what_micro_batches_in_flight_keep(run: RunSpec) -> None:
    parts = shape_of(run, H100).parts
    count = len(parts.layers)
    assert parts.stage_bytes(0, count) == parts.memory.base_bytes
    halves = parts.stage_memory(0, 4, 0, 2), parts.stage_memory(4, count, 1, 2)
    assert sum(half.base_bytes for half in halves) >= parts.memory.base_bytes
    assert [half.num_layers for half in halves] == [4, 4]
    kept = parts.memory.phases[-1].kept_per_layer
    first, last = (half.phases[-1].bytes_per_token for half in halves)
    assert first - last == pytest.approx(8 * kept), "as many layers, two more micro-batches in flight"
    whole = parts.stage_memory(0, count, 0, 1)
    buffers = whole.phases[-1].bytes_per_token - parts.memory.phases[-1].bytes_per_token
    assert buffers == pytest.approx(4 * parts.hidden_size * 2)
    assert len(halves[0].phases) == 1 and halves[1].phases[0].fixed_bytes > 0, "the head is the last stage's"


def test_each_linear_of_an_adapter_is_in_one_stage(run: RunSpec) -> None:
    parts = shape_of(run, H100).parts
    (one, *_) = sketched(run)
    assert one.layout is not None
    halves = parts.memories([(0, 3), (3, 8)])
    for count in ("job_bytes", "step_bytes"):
        assert sum(getattr(half, count)(one.layout) for half in halves) == getattr(parts.memory, count)(one.layout), count
    cut = [within(one, parts, first, end).layout for first, end in ((0, 3), (3, 5), (5, 8))]
    assert [shape for layout in cut if layout is not None for shape in layout.shapes] == list(one.layout.shapes)


def test_stages_are_cut_by_seconds_and_run_at_the_speed_of_the_slowest(run: RunSpec) -> None:
    jobs = sketched(run)
    (device,) = large(devices_of(run, H100))
    pipeline = cut_pipeline((device, device), jobs)
    (_, middle), (_, end) = pipeline.cuts
    assert end == 8 and middle > 4, "the head makes the last stage heavier"
    whole = sum(cut_pipeline((device,), jobs).seconds(each) for each in jobs)
    assert whole / 2 <= sum(pipeline.seconds(each) for each in jobs) < whole


def test_a_fast_gpu_gets_no_more_layers_than_it_has_memory_for(run: RunSpec) -> None:
    """By speed alone an RTX 4090 would have five or six of eight layers, for which there is no room here. A run cuts the base so too."""
    jobs = sketched(run)
    fast, slow = large(devices_of(run, RTX_4090, RTX_3090))
    assert cut_pipeline((fast, slow), jobs).cuts[0][1] > 4
    limit, roomy = fast.parts.stage_bytes(0, 4), slow.limit_bytes
    found = cut_pipeline((replace(fast, limit_bytes=limit), slow), jobs)
    asks = max(job.layout.numel for job in jobs if job.layout is not None), max(job.longest for job in jobs)
    assert found.cuts == ((0, 3), (3, 8)) == fast.parts.cut([fast.rate, slow.rate], [limit, roomy], *asks), "jobs need room beside"
    tight = slow.parts.stage_bytes(4, 8)
    assert fast.parts.cut([fast.rate, slow.rate], [limit, tight], *asks) == ((0, 4), (4, 8)), "it lies there if it must"


def test_boundaries_take_the_link_that_both_gpus_have(run: RunSpec) -> None:
    assert link_rate(H100, H100) == 350e9 and link_rate(RTX_4090, RTX_4090) == 25e9 == link_rate(H100, RTX_4090)
    (device,) = devices_of(run, RTX_4090)
    cut = Pipeline((device,) * 2, ((0, 4), (4, 8)))
    token = 2 * max(2 * device.parts.timed_weights_of(*each) for each in cut.cuts) / device.rate
    assert cut.overhead().per_token * token == pytest.approx(64 * 2 / 25e9)


def test_of_gpus_of_two_kinds_each_has_its_share(run: RunSpec) -> None:
    jobs = sketched(run)
    plans = plan_layouts(run, jobs, large(devices_of(run, RTX_4090, RTX_3090)))
    whole = found_of(plans, "whole")
    assert whole.gpus == ("RTX 4090", "RTX 3090") and not whole.layout.is_even
    assert whole.layout.weights[0] / whole.layout.weights[1] == pytest.approx(165.2 / 71)
    slower = plan_layouts(run, jobs, large(devices_of(run, RTX_3090, RTX_3090)))
    assert whole.seconds < found_of(slower, "whole").seconds
    (shared,) = [each for each in plans.refused if each.name.startswith("shared")]
    assert shared.why == "RTX 4090s cannot read each other's memory"
    assert found_of(plan_layouts(run, jobs, devices_of(run, H100, H100)), "shared").layout == Layout("shared", 2)


def test_the_fastest_comes_first_and_each_says_what_it_loses(run: RunSpec) -> None:
    plans = plan_layouts(run, sketched(run), devices_of(run, *[H100] * 3))
    rates = [each.tokens_per_second for each in plans.feasible]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0
    assert {str(each.layout) for each in plans.feasible} | {each.name for each in plans.refused} == {
        "whole on 3 GPUs",
        "shared on 3 GPUs",
        "streamed on 1 GPU",
        "stages on 2 GPUs: 1 replica of 2 stages",
        "stages on 3 GPUs: 1 replica of 3 stages",
    }
    assert "2 of 3 GPUs are used" in found_of(plans, "stages", 2).why


def test_a_base_that_has_room_enough_is_streamed_by_order_alone(run: RunSpec) -> None:
    """As a run decides (`streaming.choose_layout`); the larger micro-batches of a streamed base had it planned first, as the fastest."""
    devices = devices_of(run, RTX_4090)
    plans = plan_layouts(run, sketched(run), devices)
    (refused,) = plans.refused
    assert [each.layout.form for each in plans.feasible] == ["whole"] and not check(run, gpu="rtx4090").streamed
    assert str(Layout("streamed")) == refused.name and "the whole base leaves room for as large micro-batches" in refused.why
    ordered = run.model_copy(update={"layout": "streamed"})
    assert [each.layout.form for each in plan_layouts(ordered, sketched(ordered), devices).feasible] == ["streamed"]
    tight = limited(large(devices_of(run, *[RTX_4090] * 3)), 6 << 30)  # where the base does not fit whole
    assert "1 of 3 GPUs is used" in found_of(plan_layouts(run, sketched(run), tight), "streamed").why


def test_a_lone_job_waits_in_a_pipeline_and_says_so(run: RunSpec) -> None:
    alone = run.model_copy(update={"jobs": run.jobs[:1], "token_budget": 64})
    (job_alone,) = sketched(alone)
    (device,) = large(devices_of(alone, H100))  # with layers so large that the way between two stages is nothing beside them
    slow = replace(device, parts=replace(device.parts, layer_weights=(21_800_000_000,) * 8))
    found = found_of(plan_layouts(alone, [job_alone], [slow, slow]), "stages", 2)
    assert 1 / 5 < found.unit.bubble < 1 / 3  # its batches of 143 tokens on average take three micro-batches of 64, or four
    assert any(why.startswith("stages wait") for why in found.why)
    assert found.unit.exposed_seconds >= found.unit.bubble * found.unit.micro_batch_seconds * 0.999


def test_a_jobs_file_may_pin_the_form(run: RunSpec) -> None:
    pinned = run.model_copy(update={"layout": "streamed"})
    plans = plan_layouts(pinned, sketched(pinned), devices_of(pinned, RTX_4090, RTX_4090))
    assert [each.layout.form for each in plans.feasible] == ["streamed"]
    assert all("orders layout: streamed" in each.why or "cannot read" in each.why for each in plans.refused)


def test_a_base_that_fits_on_no_gpu_fits_in_stages(run: RunSpec) -> None:
    jobs, gpus = sketched(run), limited(large(devices_of(run, *[RTX_4090] * 4)), 6 << 30)
    plans = plan_layouts(run, jobs, gpus)
    assert {(each.layout.form, each.layout.stages) for each in plans.feasible} == {
        ("streamed", 1),
        ("stages", 2),
        ("stages", 3),
        ("stages", 4),
    }
    (whole,) = [each for each in plans.refused if each.name.startswith("whole")]
    assert whole.least_bytes > 8 << 30 and "of the base, and the limit is 6.00 GiB" in whole.why
    least = plan_layouts(run, jobs, limited(gpus, whole.least_bytes * 11 // 10))
    assert "whole" in [each.layout.form for each in least.feasible], "the remedy"


def test_too_little_for_one_layer_says_what_would_fit(run: RunSpec) -> None:
    jobs, tiny = sketched(run), limited(devices_of(run, RTX_4090), 1 << 20)
    error = no_layout(run, jobs, tiny, plan_layouts(run, jobs, tiny))
    assert isinstance(error, CapacityError)
    assert str(error).startswith("no layout fits. whole on 1 GPU: ") and "streamed on 1 GPU: " in str(error)
    assert "Would fit: " in str(error) and "GPUs on which a run may take" in str(error)


@pytest.mark.parametrize(("gib", "is_remedy"), [(5, False), (7, True)])
def test_fewer_bits_are_a_remedy_only_where_they_fit(gib: int, is_remedy: bool, run: RunSpec) -> None:
    """Of a mixture they save little: experts stay as they are."""
    (device,) = large(devices_of(run, RTX_4090))
    why = "its files have each expert by itself"
    parts = replace(device.parts, shared_bytes=(), streamed=None, no_stages=why, precision_bytes={"nf4": 6 << 30})
    jobs, tight = sketched(run), [replace(device, parts=parts, limit_bytes=gib << 30)] * 2
    assert ("base_precision: nf4" in str(no_layout(run, jobs, tight, plan_layouts(run, jobs, tight)))) is is_remedy


def test_an_ordered_layout_that_one_gpu_cannot_have_is_told_of_another(run: RunSpec) -> None:
    """Memory is not why, so that fewer bits and larger GPUs are no remedies."""
    ordered, jobs, one = run.model_copy(update={"layout": "stages"}), sketched(run), devices_of(run, H100)
    told = str(no_layout(ordered, jobs, one, plan_layouts(ordered, jobs, one)))
    assert told.endswith("Would fit: layout: auto, or --gpus 2"), told
    assert plan_layouts(run, jobs, one).feasible and plan_layouts(ordered, jobs, one * 2).feasible, "the remedies"


def test_a_mixture_that_is_too_large_is_told_of_a_form_that_it_gets_by_order(run: RunSpec) -> None:
    (device,) = large(devices_of(run, RTX_4090))
    parts = replace(device.parts, in_parts=device.parts.memory, no_stages="its files have each expert by itself", precision_bytes={})
    jobs, tight = sketched(run), [replace(device, parts=parts, limit_bytes=6 << 30)]
    told = str(no_layout(run, jobs, tight, plan_layouts(run, jobs, tight)))
    assert "Would fit: layout: streamed, or GPUs on which" in told, told
    assert plan_layouts(run.model_copy(update={"layout": "streamed"}), jobs, tight).feasible, "the remedy"


def test_one_small_gpu_is_told_of_more(run: RunSpec) -> None:
    jobs, one = sketched(run), devices_of(run, RTX_4090)
    least = min(each.least_bytes for each in plan_layouts(run, jobs, limited(one, 1)).refused)
    remedies: list[int] = []
    for limit in (round(least * 40 / 1.1**step) for step in range(40)):  # from more than it needs to less than any count helps
        tight = limited(one, limit)
        plans = plan_layouts(run, jobs, tight)
        if plans.feasible:
            continue
        told = str(no_layout(run, jobs, tight, plans))
        if "--gpus" not in told:
            break
        remedies.append(int(told.split("--gpus ")[1].split(",")[0]))
        assert plan_layouts(run, jobs, tight * remedies[-1]).feasible, "the remedy"
    assert len(remedies) >= 3 and remedies == sorted(remedies) and limit > least, remedies
    assert "--gpus" not in str(no_layout(run, jobs, limited(one, least), plan_layouts(run, jobs, limited(one, least))))


def test_a_job_counts_as_the_adapter_that_it_goes_on_from(mixture: Path, tmp_path: Path) -> None:
    """Before its data are read: that one's rank, and experts that it adapts. What cannot be read is refused in its turn; of a job that goes
    on from a checkpoint, and whose first adapter is gone, the order has the shape.
    """
    shape: dict[str, Any] = {"r": 32, "target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | shape))
    bad, small = job("bad", "-", adapter_path=str(tmp_path)), job("small", "-", target_modules=["q_proj"])
    gone = job("a", "-", adapter_path=str(tmp_path / "gone"), **shape)
    model, device, stages = SuperModel(outline(str(mixture))), torch.device("cuda"), [LayerRange(0, 2, 4), LayerRange(2, 4, 4)]
    found: list[list[MemoryModel]] = []
    with as_if_on(H100.name, H100.capability):
        for own in ([job("a", "-", adapter_path=str(adapter)), bad], [gone, bad], [job("a", "-", **shape)], [bad]):
            run = run_spec(mixture, tmp_path / "out", [*own, small])
            found.append([memory_in_parts(run, model, device, 1000), memory_of_last_stage(run, model, device, stages)])
    going_on, resumed, ordered, without = found
    assert going_on == resumed == ordered
    assert all(each.phases[-1].bytes_per_token > less.phases[-1].bytes_per_token for each, less in zip(ordered, without, strict=True))
