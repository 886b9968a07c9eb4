"""`tlora calibrate`: a tiny machine measured on a CPU, the file that plans read, and what it says where it cannot measure."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.tiny_runs import job, run_spec
from tlora.engine import calibrate as calibrating
from tlora.engine import layer_speed
from tlora.engine.calibrate import Measurements, ProductSpeed, calibrate, measure, spec_of
from tlora.engine.calibration import SAMPLE_TOKENS, CalibrationError, Timed
from tlora.engine.check import check
from tlora.engine.layer_speed import LayerSpeed, MadeUpBase, measure_layers, speed_of
from tlora.errors import ConfigError
from tlora.group.job_run import JobRun
from tlora.kernels.cards import HOPPER
from tlora.shape.gpu_models import find_gpu, link_rate, speeds_of
from tlora.shape.memory import MemoryModel
from tlora.shape.token_cost import token_cost_on
from tlora.shape.work import FP8_GAIN, LAYER_OF_8B, WITH_FEATURES
from tlora.sharing import link_speed
from tlora.sharing.link_speed import LinkSpeed, Repeated, measure_both_ways, measure_copies, measure_peers, repeat
from tlora.supermodel.supermodel import SuperModel

CPU = torch.device("cpu")
TINY = MadeUpBase(hidden_size=64, intermediate_size=96, heads=4, key_value_heads=2, vocab_size=512, depths=(1, 5), samples=(1, 2))
LAYERS = MadeUpBase()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes are trained; their seconds are counted by layers and tokens, as a busy machine may take longer for fewer."""

    def probe_and_count(model: SuperModel, runs: Sequence[JobRun]) -> Generator[None, None, Timed]:
        timed = yield from probe(model, runs)
        return replace(timed, seconds=1e-6 * timed.tokens * (1 + model.base.model.config.num_hidden_layers))

    probe = layer_speed.probe
    monkeypatch.setattr(layer_speed, "probe", probe_and_count)
    monkeypatch.setattr(layer_speed, "worth_trying", lambda *_: True)


def measured(**changes: object) -> Measurements:
    link = LinkSpeed(50e9, 40e9, 30e9, 0.01)
    given = {"training": LayerSpeed(500e12, 300e-6, {2032: 2e-3, 8128: 7e-3}), "gain_in_8_bits": 1.5, "peer_bytes": None, "unsteady": ()}
    return Measurements("bfloat16", 700e12, 2.4e12, 4e-6, link, **(given | changes))  # type: ignore[arg-type]


@pytest.mark.usefixtures("counted")
def test_a_whole_machine_is_measured_and_its_file_is_read(tmp_path: Path) -> None:
    lines: list[str] = []
    found = measure(CPU, torch.float32, TINY, [CPU, CPU], lines.append, deadline=time.monotonic() + 60)
    assert len(lines) == 7 and lines[-1].startswith("training over an 8B's layers in float32: ")
    assert found.product_flops > 1e8 and found.peer_bytes is not None and found.peer_bytes > 0 and found.gain_in_8_bits is None
    assert sorted(found.training.seconds) == [SAMPLE_TOKENS, 2 * SAMPLE_TOKENS] and found.training.flops > 1e6
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(spec_of("CPU", 1 << 34, 80, found.peer_bytes, found)))
    gpu = find_gpu(str(file))
    assert gpu.flops == pytest.approx(found.training.flops * WITH_FEATURES, rel=1e-3) and gpu.memory_bytes == 1 << 34
    assert gpu.link_gb_per_second == pytest.approx(found.link.to_device / 1e9, rel=1e-3)
    assert gpu.peer_gb_per_second == pytest.approx(found.peer_bytes / 1e9, rel=1e-3)
    assert speeds_of(gpu) == "measured on CPU"


@pytest.mark.usefixtures("counted")
def test_layers_in_fewer_bits_are_timed_too() -> None:
    found = measure_layers(CPU, torch.float32, TINY, "nf4")
    assert found.flops > 1e6 and len(found.seconds) == 2


def test_jobs_of_several_ranks_share_a_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[int, int]]] = []

    def note(model: SuperModel, runs: Sequence[JobRun]) -> Generator[None, None, Timed]:
        seen.append([(run.spec.r, run.spec.batch_size) for run in runs])
        yield
        tokens = SAMPLE_TOKENS * sum(run.spec.batch_size for run in runs)
        return Timed(len(runs), tokens, 1e-6 * tokens * (1 + model.base.model.config.num_hidden_layers))

    monkeypatch.setattr(layer_speed, "probe", note)
    found = measure_layers(CPU, torch.float32, replace(TINY, samples=(2, 6), ranks=(8, 32)))
    assert seen == [[(8, 1), (32, 1)], [(8, 3), (32, 3)]] * 2
    assert sorted(found.seconds) == [2 * SAMPLE_TOKENS, 6 * SAMPLE_TOKENS]
    with pytest.raises(AssertionError, match="samples of 2 jobs"):
        replace(TINY, samples=(3,), ranks=(8, 32))


def test_seconds_that_follow_the_formula_give_its_constants() -> None:
    """A layer takes 300 us, and each token its multiply-adds at 500 TFLOP/s."""
    token = 2 * (2 * LAYERS.layer_weights + 3 * 4096 * SAMPLE_TOKENS) / 500e12
    found = speed_of({tokens: 300e-6 + token * tokens for tokens in (2032, 8128)}, LAYERS)
    assert (found.flops, found.layer_seconds) == pytest.approx((500e12, 300e-6))
    alone = speed_of({8128: token * 8128}, LAYERS)
    assert alone.flops == pytest.approx(500e12) and alone.layer_seconds is None
    assert LAYERS.layer_weights == 218_103_808


@pytest.mark.parametrize("many", [1e-3, 2e-3, 9e-3])
def test_times_that_show_no_fixed_part_have_none(many: float) -> None:
    found = speed_of({2032: 2e-3, 8128: many}, LAYERS)
    assert found.layer_seconds == 0.0 and math.isfinite(found.flops)


@pytest.mark.parametrize("seconds", [{}, {2032: -1e-6}, {2032: 0.0, 8128: 1e-3}])
def test_more_layers_that_take_no_longer_are_no_measurement(seconds: dict[int, float]) -> None:
    with pytest.raises(CalibrationError, match="the GPU is busy"):
        speed_of(seconds, LAYERS)


def test_what_was_measured_is_what_is_predicted_with(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(spec_of("X", 80 << 30, 90, 300e9, measured())))
    gpu = find_gpu(str(tmp_path / "gpu.json"))
    assert gpu.rate.multiply_adds_per_second("cuda", False) == pytest.approx(250e12 * WITH_FEATURES)
    assert gpu.rate.multiply_adds_per_second("cuda", True) == pytest.approx(1.5 * 250e12 * WITH_FEATURES)
    memory = MemoryModel(1, (), 32, 2, 4, 5, *LAYER_OF_8B)
    fixed = token_cost_on("cuda", HOPPER.smallest_rows, memory, fixed_work=gpu.fixed_work).fixed_tokens
    assert fixed * 2 * 218e6 / 250e12 == pytest.approx(300e-6), "tokens that take as long as a layer takes besides"
    assert link_rate(gpu, gpu) == 300e9
    (tmp_path / "apart.json").write_text(json.dumps(spec_of("X", 80 << 30, 90, 0.0, measured(gain_in_8_bits=None))))
    apart = find_gpu(str(tmp_path / "apart.json"))
    assert link_rate(apart, apart) == 40e9, "by the slower direction"
    assert apart.rate.gain_in_8_bits == FP8_GAIN


def test_check_predicts_with_the_file(base: Path, data: Path, tmp_path: Path) -> None:
    run = run_spec(base, tmp_path / "out", [job("a", str(data / "a.jsonl"))], dtype="bfloat16")
    rates: list[float] = []
    for flops, seconds in ((500e12, None), (250e12, None), (500e12, 1.0)):
        training = LayerSpeed(flops, seconds, {8128: 7e-3})
        (tmp_path / "gpu.json").write_text(json.dumps(spec_of("X", 80 << 30, 90, 0.0, measured(training=training))))
        checked = check(run, gpu=str(tmp_path / "gpu.json"))
        assert checked.rated_as == "measured on X"
        rates.append(checked.tokens_per_second)
    assert rates[0] == pytest.approx(2 * rates[1]) and rates[2] < rates[0] / 10


@pytest.mark.usefixtures("counted")
def test_a_gpu_that_is_busy_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    products = iter([ProductSpeed(1.2, Repeated(1.0, 1.3)), ProductSpeed(1.0, Repeated(1.2, 1.2))])
    monkeypatch.setattr(calibrating, "measure_product", lambda *_: next(products))
    found = measure(CPU, torch.float32, TINY, [CPU], lambda _: None, deadline=0.0)
    (line,) = found.unsteady
    assert "products of one kind differ by 30%" in line and "products before and after training of one kind differ by 20%" in line
    assert line.endswith("the GPU has other work to do, or is short of power or cooling")


def test_without_a_gpu_it_says_where_to_run_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="calibrate measures a GPU, and the device here is cpu. Run it on the machine that has the GPU"):
        calibrate("cpu", tmp_path / "gpu.json")
    assert not list(tmp_path.iterdir())


def test_copies_have_rates() -> None:
    link = measure_both_ways(CPU)
    assert min(link.to_device, link.to_host, link.both) > 0 and link.spread >= 0
    assert measure_copies(CPU) > 0 and measure_peers([CPU] * 3) > 0


def test_the_first_repeat_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, now = iter([9.0, 3.0, 1.0, 2.0]), [0.0]

    def step() -> None:
        now[0] += next(taken)

    monkeypatch.setattr(link_speed, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert repeat(step, [CPU], 3) == Repeated(1.0, 2.0)
