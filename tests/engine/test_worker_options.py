"""A worker takes the run options of a jobs file."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore
from transformers import AutoModelForCausalLM, GptOssConfig

from tests.engine.test_worker import Orders, of, work
from tests.engine.test_worker import report_each_step as report_each_step
from tests.engine.tiny_runs import save_base, sha256
from tests.store.test_metrics import Client
from tests.tiny import SHAPE
from tlora.batching.recompute_plan import RecomputePlan
from tlora.engine.messages import SetPlan
from tlora.engine.trainer import load_base
from tlora.engine.worker import Worker
from tlora.errors import CapacityError, ConfigError
from tlora.group.engine import Engine
from tlora.group.stream import Stream
from tlora.job import JobSpec
from tlora.kernels.device import as_if_on
from tlora.planning.memory import measure
from tlora.planning.memory_bound import MemoryBound
from tlora.planning.planned_job import PlannedJob
from tlora.shape.memory import MemoryModel
from tlora.sharing.host_memory import Streaming
from tlora.sharing.peers import Sharing
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import DesiredState, Failed, Finished, Load, Memory, controller_line, parse_controller_line

NONE = RecomputePlan()


def test_options_travel() -> None:
    load = Load("b", "o", "cuda", 0.0, dtype="bfloat16", base_precision="fp8", layout="streamed", recompute=3, report_to=("trackio",))
    assert parse_controller_line(controller_line(DesiredState(1, 1, load))) == DesiredState(1, 1, load)


@pytest.mark.parametrize(
    ("field", "value"), [("dtype", "int8"), ("layout", "spread"), ("recompute", -1), ("memory_limit", 0), ("report_to", ["paper"])]
)
def test_options_that_no_jobs_file_may_have_are_rejected(field: str, value: Any) -> None:
    want = json.loads(controller_line(DesiredState(1, 1, Load("b", "o", "cpu", 0.0))))
    with pytest.raises(ValueError, match=field):
        parse_controller_line(json.dumps(want | {"load": want["load"] | {field: value}}).encode())


def test_what_the_first_jobs_launch_on_a_gpu_is_compiled_while_the_base_is_loaded(
    made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any, as in a rank of several, it is compiled when it is met."""
    said: list[Any] = []

    class Compiling:
        def wait(self) -> None:
            said.append("waited")

    def from_pretrained(*_: Any) -> SuperModel:
        said.append("loaded")
        return loaded

    loaded = SuperModel.from_pretrained(str(made.base))
    monkeypatch.setattr(SuperModel, "compile_ahead", lambda _, device, loras: said.append((device.type, loras)) or Compiling())
    monkeypatch.setattr(SuperModel, "from_pretrained", from_pretrained)
    monkeypatch.setattr(SuperModel, "expect", lambda _, loras: said.append(("expects", loras)))
    jobs = (made.join("stays").job,)
    load = replace(made.load(tmp_path), device="cuda", memory_limit=10**12)
    with as_if_on("H100", 90):
        model, bound = load_base(load, jobs, None, print)
    assert model is loaded and bound.limits == (10**12,)
    assert said == [("cuda", jobs), "loaded", ("expects", jobs), "waited"]
    said.clear()
    with as_if_on("H100", 90):
        load_base(load, (), None, print)
    load_base(made.load(tmp_path), jobs, None, print)
    assert said == ["loaded", ("expects", ()), "loaded", ("expects", jobs)]


def test_the_worker_tells_its_trainer_of_the_jobs_that_it_shall_have(made: Orders, tmp_path: Path) -> None:
    worker = Worker((0,), cast("Any", None))
    assert worker.expected == ()
    worker.hear(DesiredState(1, 1, made.load(tmp_path), None, (made.join("stays"),)))
    assert [spec.name for spec in worker.expected] == ["stays"]
    may_come = made.join("stays").job.model_copy(update={"name": "may-come"})
    worker.hear(DesiredState(1, 2, made.load(tmp_path), None, (made.join("stays"),), expected=(may_come,)))
    assert [spec.name for spec in worker.expected] == ["stays", "may-come"]


def test_numbers_go_to_the_clients_of_report_to(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[int] = []

    class Noting(Client):
        def log(self, values: dict[str, float], step: int) -> None:
            logged.append(step)

    client = Noting({"project", "name", "group", "config"})
    module = ModuleType("trackio")
    module.__spec__, module.init = ModuleSpec("trackio", None), client.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    work(replace(made.load(tmp_path), report_to=("trackio",)), [made.join("short")])
    assert [options["name"] for options in client.opened] == ["short"] and logged == [1, 2, 3]


def test_fp8_needs_a_device_that_has_it(made: Orders, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="base_precision fp8 needs a GPU"):
        work(replace(made.load(tmp_path), base_precision="fp8"), [])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_worker_streams_its_base_where_a_run_would(tmp_path: Path, is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tests/planning/test_streamed_plan.py looks at it."""
    held: list[Any] = []

    def from_pretrained(*arguments: Any) -> SuperModel:
        held.append(arguments[-1])
        return loaded

    deep = save_base(tmp_path / "deep", num_hidden_layers=12)
    loaded, whole = SuperModel.from_pretrained(str(deep)), outline(str(deep), "bfloat16").num_bytes
    monkeypatch.setattr(SuperModel, "from_pretrained", from_pretrained)
    monkeypatch.setattr("tlora.planning.streaming.measure_link", lambda *_: 1e9)
    limit, notes = whole - 1 if is_streamed else 10**12, list[str]()
    with as_if_on("H100", 90):
        load_base(Load(str(deep), str(tmp_path), "cuda", 0.0, dtype="bfloat16", memory_limit=limit), (), None, notes.append)
    assert held == [Streaming(2) if is_streamed else None]
    assert any("are on the device; the base has " in line for line in notes) == is_streamed


def test_gpus_say_why_a_mixture_that_leaves_little_room_lies_whole_on_each(tmp_path: Path) -> None:
    """Parts of it are fetched by order alone, as layers with experts are compiled no more then."""
    shape = SHAPE | {"intermediate_size": 32}
    config = GptOssConfig(**shape, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    needed = SuperModel(outline(str(tmp_path))).base.num_bytes
    for limit, is_said in ((needed + 100, True), (2 * needed, False)):
        notes: list[str] = []
        load = Load(str(tmp_path), str(tmp_path), "cpu", 0.0, memory_limit=limit)
        model, _ = load_base(load, (), Sharing(HashStore(), 0, 2), notes.append)
        assert model.base.layers is None
        assert any("a mixture of experts is held in parts by `layout: shared` of `tlora train` alone" in note for note in notes) == is_said


def bound_of(base: Path, limit_bytes: int) -> MemoryBound:
    model = SuperModel(outline(str(base)))
    return MemoryBound(model, sum(p.numel() * p.element_size() for p in model.model.parameters()), torch.device("cpu"), [limit_bytes])


def needed(base: Path, specs: list[JobSpec], budget: int) -> int:
    """Bytes that `specs` take with that token budget."""
    model = SuperModel(outline(str(base)))
    jobs = [PlannedJob(spec, layout=model.layout(spec)) for spec in specs]
    return bound_of(base, 10**12)._at(budget, NONE, jobs).total_bytes([job.layout for job in jobs if job.layout is not None])


def test_a_memory_limit_counts_the_replicas_of_a_job(base: Path) -> None:
    """Room for the job without replicas at 256 tokens is no room for it with two."""
    one = JobSpec.model_validate({"name": "a", "data": "d", "r": 64})
    two = one.model_copy(update={"gpus": 2})
    layout = SuperModel(outline(str(base))).layout(one)
    bound = bound_of(base, needed(base, [one], 256))
    assert bound.lower(256, 2, NONE, [PlannedJob(one, layout=layout)]) == 256 > bound.lower(256, 2, NONE, [PlannedJob(two, layout=layout)])
    alone = bound_of(base, needed(base, [one], 1))
    fits, does_not = PlannedJob(one, layout=layout), PlannedJob(two, layout=layout)
    for job in (fits, does_not):
        alone.check(job, NONE)
    assert not fits.problems and "needs" in does_not.problems[0]


def test_jobs_that_are_opened_at_the_same_time_are_counted_in_turn(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each count joins an adapter to the same outline of the base."""
    together, both = list[int](), threading.Barrier(2)

    def count(*arguments: Any) -> MemoryModel:
        together.append(1)
        time.sleep(0.05)
        found = measure(*arguments)
        assert sum(together) == 1, "two threads count at the same time"
        together.clear()
        return found

    monkeypatch.setattr("tlora.planning.memory_bound.measure", count)
    bound, layout_of = bound_of(base, 10**12), SuperModel(outline(str(base))).layout
    specs = [JobSpec.model_validate({"name": f"r{rank}", "data": "d", "r": rank}) for rank in (96, 128)]
    jobs = [PlannedJob(spec, layout=layout_of(spec)) for spec in specs]

    def check(job: PlannedJob) -> None:
        both.wait(60)
        bound.check(job, NONE)

    with ThreadPoolExecutor(2) as threads:
        for checked in [threads.submit(check, job) for job in jobs]:
            checked.result(60)
    assert not any(job.problems for job in jobs)


def test_a_memory_limit_lowers_the_budget(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two jobs at a quarter of what the Share says; no result changes."""
    used: list[int] = []
    compute = Stream.compute
    monkeypatch.setattr(Stream, "compute", lambda self, *what: (used.append(what[0].budget), compute(self, *what))[1])
    specs = [spec for spec in made.run.jobs if spec.name in ("stays", "short")]
    limit = needed(made.base, specs, 256)
    told = work(replace(made.load(tmp_path), memory_limit=limit), [SetPlan(1024), *(made.join(spec.name) for spec in specs)])
    assert {report.job_id for report in told if isinstance(report, Finished)} == {"stays", "short"}
    assert (
        used[-1] == 256
        and set(used) <= {256, 512, 1024}
        and {sha256(tmp_path / s.name) for s in specs} == {made.shas[s.name] for s in specs}
    )


def test_a_job_that_cannot_fit_below_the_limit_fails_with_what_would_fit(made: Orders, tmp_path: Path) -> None:
    small = next(spec for spec in made.run.jobs if spec.name == "short")
    large = small.model_copy(update={"name": "large", "r": 256})
    limit = needed(made.base, [small], 512)
    told = work(replace(made.load(tmp_path), memory_limit=limit), [SetPlan(64), replace(made.join("short"), job=large), made.join("short")])
    (failed,) = of(told, Failed, "large")
    assert "'large' needs" in failed.reason and "raise memory_limit" in failed.reason and of(told, Finished, "short")


def test_a_base_larger_than_the_limit_is_refused_before_it_is_loaded(made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuperModel, "from_pretrained", lambda *_, **__: pytest.fail("the base was loaded"))
    with pytest.raises(CapacityError, match="raise memory_limit"):
        work(replace(made.load(tmp_path), memory_limit=1000), [])


@pytest.mark.parametrize(("recompute", "layers"), [("auto", 0), ("none", 0), (1, 1), ("all", 3)])
def test_what_is_recomputed_is_as_ordered(
    made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: Any, layers: int
) -> None:
    told: list[int] = []

    def share(_: Engine, token_budget: int, recompute: RecomputePlan, weights: Mapping[str, float]) -> None:
        told.append(recompute.layers(1))

    monkeypatch.setattr(Engine, "share", share)
    for counted in (SuperModel, MemoryBound):  # as on a GPU, whose layers can be recomputed
        monkeypatch.setattr(counted, "num_layers", property(lambda _: 3))
    work(replace(made.load(tmp_path), recompute=recompute), [SetPlan(64), made.join("short")])
    assert set(told) == {layers}


def test_without_a_memory_limit_what_is_free_bounds_a_worker_and_its_controller_hears_it(
    made: Orders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs do not fit at the Share's budget, and would be halved by running out of memory; none of their bits changes."""
    used: list[int] = []
    compute = Stream.compute
    monkeypatch.setattr(Stream, "compute", lambda self, *what: (used.append(what[0].budget), compute(self, *what))[1])
    specs = [spec for spec in made.run.jobs if spec.name in ("stays", "short")]
    free = needed(made.base, specs, 256)
    monkeypatch.setattr("tlora.engine.worker_base.memory_limit", lambda device, ordered: free if ordered == "auto" else ordered)
    told = work(made.load(tmp_path), [SetPlan(1024), *(made.join(spec.name) for spec in specs)])
    assert [report for report in told if isinstance(report, Memory)] == [Memory((free,))]
    assert {report.job_id for report in told if isinstance(report, Finished)} == {"stays", "short"} and used[-1] == 256
