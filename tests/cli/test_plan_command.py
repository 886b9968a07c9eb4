"""`tlora plan`: what it prints and refuses, and that it loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_cli_commands import call
from tests.engine.tiny_runs import save_base
from tlora.cli import plan_gpus
from tlora.cli.plan_gpus import asked_gpus
from tlora.cli.plan_view import described_choice
from tlora.cluster.gpus import Gpu
from tlora.errors import ConfigError
from tlora.planning.layout_choice import choose_form
from tlora.planning.layout_units import UnitPlan
from tlora.planning.layouts import LayoutPlan, LayoutPlans
from tlora.shape.gpu_files import calibration_path, versions
from tlora.shape.layout import Layout
from tlora.shape.work import WITH_FEATURES

LIMITS = "base_model: {base}\ndtype: bfloat16\njobs:\n  - {{name: a, data: {data}, r: 4}}\n  - {{name: b, data: {data}, r: 8}}\n"


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("layered") / "base", num_hidden_layers=4)


@pytest.fixture(scope="module", autouse=True)
def _one_cache(tmp_path_factory: pytest.TempPathFactory, forked_children: None) -> Iterator[None]:
    """The base is counted once for this file's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TLORA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def jobs_file(layered: Path, data: Path, tmp_path: Path) -> Path:
    file = tmp_path / "jobs.yaml"
    file.write_text(LIMITS.format(base=layered, data=data / "a.jsonl"))
    return file


def spec(path: Path, **changed: object) -> Path:
    fields = {"name": "RTX 9999", "memory": "24GiB", "compute_capability": 8.9, "tflops": 165, "peer_gb_per_second": 50}
    path.write_text(json.dumps(fields | changed))
    return path


@pytest.mark.parametrize("counted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_loads_no_torch(jobs_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
    """The base is counted by a process of its own, once; not even that is needed for the second plan."""
    if counted:
        assert call("plan", jobs_file, "--gpu", "rtx4090", "--gpus", 2)[0] == 0
    else:
        monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "empty"))
    code = (
        "import sys\nsys.modules['torch'] = None\nfrom tlora.cli import main\n"
        f"sys.argv = ['tlora', 'plan', {str(jobs_file)!r}, '--gpu', 'rtx4090', '--gpus', '2', '--explain']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'triton', 'transformers', 'safetensors', 'peft'} & set(sys.modules)\nassert not heavy, heavy\n"
        "assert sys.modules['torch'] is None\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "2 jobs, 2 x RTX 4090" in lines[0] and "tokens/s" in done.stdout and "recomputed" in done.stdout
    assert "not feasible: RTX 4090s cannot read each other's memory" in done.stdout
    assert any(line.startswith("whole on 2 GPUs: ") for line in lines) and any("head and loss on the last stage" in line for line in lines)


def test_json_has_each_layout_and_why(jobs_file: Path, tmp_path: Path) -> None:
    code, out, _ = call("plan", jobs_file, "--device-spec", spec(tmp_path / "gpu.json"), "--gpus", 2, "--json")
    found = json.loads(out)
    assert code == 0 and found["gpus"] == ["RTX 9999"] * 2 and found["jobs"] == ["a", "b"]
    rates = [each["tokens_per_second"] for each in found["layouts"]]
    assert rates == sorted(rates, reverse=True) and {each["form"] for each in found["layouts"]} == {"whole", "shared", "stages"}
    for each in found["layouts"]:
        assert 0 < each["predicted_bytes"] <= each["limit_bytes"] and 0 <= each["exposed_seconds"] < each["micro_batch_seconds"]
        assert sum(each["weights"]) == pytest.approx(1) and each["why"]
    assert [each["layout"] for each in found["refused"]] == ["streamed on 1 GPU"]


def test_no_layout_fits(jobs_file: Path, tmp_path: Path) -> None:
    code, out, told = call("plan", jobs_file, "--device-spec", spec(tmp_path / "gpu.json", memory="1MiB"), "--json")
    assert code == 2 and json.loads(out)["layouts"] == []
    assert told.splitlines()[-1].startswith("error: no layout fits. whole on 1 GPU: ") and "Would fit: " in told


def test_two_kinds_in_one_plan(jobs_file: Path) -> None:
    code, out, _ = call("plan", jobs_file, "--gpu", "rtx4090,rtx3090", "--gpus", 4)
    assert code == 0 and "2 x RTX 4090 and 2 x RTX 3090" in out and "weights 0." in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "rtx9999"], "--gpu rtx9999: is not known; name one of t4, "),
        (["--gpu", "rtx4090", "--gpus", 0], "--gpus 0: must be from 1 to 16"),
        (["--gpu", "rtx4090", "--gpus", 17], "--gpus 17: must be from 1 to 16"),
        (["--gpu", "rtx4090", "--device-spec", "gpu.json"], "--gpu and --device-spec both say which GPUs to plan for; give one of the two"),
        (["--device-spec", "nowhere.json"], "--device-spec nowhere.json: "),
        (["--gpu", "rtx4090,rtx3090", "--gpus", 3], "--gpus 3: is no multiple of the 2 models in --gpu rtx4090,rtx3090"),
        (["--gpu", "rtx4090,,rtx3090"], "a name is empty"),
        (["--gpu", "rtx4090", "--set", "recompute=some"], "recompute"),
    ],
)
def test_bad_input_is_one_error(jobs_file: Path, options: list[object], said: str) -> None:
    code, out, told = call("plan", jobs_file, *options)
    assert (code, out) == (2, "") and said in told and told.count("error: ") == 1


def test_a_job_that_cannot_run_is_told(jobs_file: Path) -> None:
    code, out, told = call("plan", jobs_file, "--gpu", "rtx4090", "--set", "defaults.target_modules=[nope]")
    assert (code, out) == (2, "") and told.count("error: ") == 2 and "a: target module 'nope' is not in this base model" in told


def test_fp8_needs_a_card_that_has_it(jobs_file: Path) -> None:
    code, _, told = call("plan", jobs_file, "--gpu", "a100-40", "--set", "base_precision=fp8")
    assert code == 2 and "fp8 needs a GPU of compute capability 8.9 or above" in told


def test_gpus_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there = {0: Gpu(24564 << 20, "GPU-a", "NVIDIA GeForce RTX 4090"), 1: Gpu(24576 << 20, "GPU-b", "NVIDIA GeForce RTX 3090")}
    monkeypatch.setattr(plan_gpus, "list_gpus", lambda: there)
    lines: list[str] = []
    assert [model.name for model in asked_gpus(None, None, None, lines.append)] == ["RTX 4090", "RTX 3090"]
    assert [model.name for model in asked_gpus(1, None, None, lines.append)] == ["RTX 4090"] and not lines
    own = calibration_path("NVIDIA GeForce RTX 4090")
    own.parent.mkdir(parents=True)
    spec(own, name="NVIDIA GeForce RTX 4090", memory="24564MiB", training_tflops=90, measured={"at": "2026-11-28", **versions()})
    (measured,) = asked_gpus(1, None, None, lines.append)
    assert measured.flops == 90e12 * WITH_FEATURES and lines == [
        f"speeds of NVIDIA GeForce RTX 4090 are those that `tlora calibrate` measured on 2026-11-28 ({own})"
    ]
    spec(own, name="NVIDIA GeForce RTX 4090", memory="24564MiB", training_tflops=90)
    (by_table,) = asked_gpus(1, None, None, lines.append)
    assert by_table.name == "RTX 4090" and lines[1].startswith(f"{own} is ignored, it was measured with torch unknown, and here is ")
    with pytest.raises(ConfigError, match="--gpus 3: 2 are here. Give --gpus 2, or name GPUs with --gpu"):
        asked_gpus(3, None, None, lines.append)
    there[1] = Gpu(1 << 30, "GPU-b", "Voodoo 2")
    with pytest.raises(ConfigError, match="the GPU 'Voodoo 2' is not in the table of GPUs: measure it with `tlora calibrate`"):
        asked_gpus(None, None, None, lines.append)
    there.clear()
    with pytest.raises(ConfigError, match="no GPU is here to plan for: name GPUs with --gpu"):
        asked_gpus(None, None, None, lines.append)


def test_a_faster_layout_that_no_run_on_all_gpus_has_is_told_of() -> None:
    """On one GPU, or in several pipelines: why the first of the table is not taken."""
    unit = UnitPlan(128, 0, 1.0, 0.01, 0.0, 1 << 30, 2 << 30)

    def told(*listed: tuple[Layout, float]) -> str:
        plans = [LayoutPlan(layout, ("gpu",) * layout.gpus, unit, seconds, 1 / seconds, ()) for layout, seconds in listed]
        choice = choose_form(plans, 4)
        assert choice is not None
        return described_choice(choice, LayoutPlans(tuple(plans), ()), 4)

    whole, shared = (Layout("whole", 4), 1.0), (Layout("shared", 4), 0.95)
    assert told(whole) == "tlora train takes whole on 4 GPUs"
    taken = "tlora train takes whole on 4 GPUs: no other on all of these GPUs is 1.1 times as fast, by prediction"
    assert told(shared, whole) == taken
    rule = "a run on 4 GPUs uses all of them, stages in one pipeline, and streams to one GPU alone"
    passed_over = f"streamed on 1 GPU is listed before it, but not for such a run: {rule}"
    assert told((Layout("streamed"), 0.5), shared, whole) == f"{taken}. {passed_over}"
    faster = told((Layout("shared", 4), 0.8), whole)
    assert "1.25 times as fast" in faster and "listed before" not in faster
