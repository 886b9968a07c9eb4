"""How fast a base is: the fit through given times by hand, a tiny base really timed, and that nothing of it is left for the jobs."""

from __future__ import annotations

import itertools
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tlora.batching.pack import MicroBatch
from tlora.engine import calibration
from tlora.engine.background_calibration import BackgroundCalibration, HasRoom
from tlora.engine.calibration import CalibrationError, Timed, device_name, fitted, key_of, recall
from tlora.engine.worker_reconciler import WorkerReconciler
from tlora.group.engine import Engine
from tlora.protocol import BaseSpeed
from tlora.supermodel.supermodel import SuperModel
from tlora.worker_protocol import DesiredState, Load, Measured, Memory

SPEED = BaseSpeed(1000.0, 0.01, 0.0, 0.001)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "speeds"


def load_of(base: Path, out: Path, **changes: Any) -> Load:
    return replace(Load(str(base), str(out), "cpu", 0.0, deterministic=True, calibrate=True), **changes)


# -- the fit ---------------------------------------------------------------------------------------------------------------


def seconds(
    tokens: float, members: int = 1, rate: float = 20_000.0, launch: float = 0.02, member: float = 0.004, floor: float = 0.0
) -> float:
    """As `shape.cost` has it."""
    return math.hypot(launch + member * (members - 1) + tokens / rate, floor)


def test_times_that_follow_the_formula_give_its_constants() -> None:
    points = [Timed(1, tokens, seconds(tokens)) for tokens in (128, 512, 2048, 8192)] + [Timed(4, 512, seconds(512, 4))]
    found = fitted(points)
    assert (found.tokens_per_second, found.launch_seconds, found.member_seconds) == pytest.approx((20_000.0, 0.02, 0.004))
    assert found.floor_seconds == pytest.approx(0.0, abs=1e-6)


def test_a_floor_is_seen_by_the_smallest() -> None:
    points = [Timed(1, 128, seconds(128, floor=0.05)), Timed(1, 4096, seconds(4096)), Timed(1, 8192, seconds(8192))]
    found = fitted(points)
    assert found.floor_seconds == pytest.approx(0.05) and found.member_seconds == 0.0


@pytest.mark.parametrize(
    "points",
    [
        [Timed(1, 128, 0.1)],
        [Timed(1, 128, 0.1), Timed(1, 512, 0.4), Timed(4, 512, 0.3)],  # no fixed time, and a group that is faster than one
        [Timed(1, 128, 0.1), Timed(1, 512, 0.05)],  # noise: more tokens took less
        [Timed(1, 128, 0.1), Timed(1, 512, 0.9)],  # more than in proportion
    ],
)
def test_whatever_was_timed_all_constants_are_sound(points: list[Timed]) -> None:
    found = fitted(points)
    assert found.tokens_per_second > 0 and math.isfinite(found.tokens_per_second)
    assert min(found.launch_seconds, found.floor_seconds, found.member_seconds) >= 0
    largest = max(points, key=lambda point: (point.members == 1, point.tokens))
    assert seconds(largest.tokens, 1, found.tokens_per_second, found.launch_seconds, 0.0, 0.0) == pytest.approx(largest.seconds)


@pytest.mark.parametrize("points", [[], [Timed(4, 512, 0.1)], [Timed(1, 128, 0.0)]])
def test_no_time_is_no_speed(points: list[Timed]) -> None:
    with pytest.raises(CalibrationError, match="no time"):
        fitted(points)


# -- a tiny base -----------------------------------------------------------------------------------------------------------


def probed(base: Path) -> list[Timed]:
    model = SuperModel.from_pretrained(str(base), deterministic=True)
    calibration = Made(load_of(base, base), model).finish()
    assert calibration.over and not model.bank.jobs(), "nothing is left in the model"
    return calibration.points


class Made:
    """A measurement, and what it says."""

    def __init__(self, load: Load, model: SuperModel, has_room: HasRoom = lambda runs, tokens: True) -> None:
        self.told: list[Measured] = []
        self.notes: list[str] = []
        self.begun: list[tuple[str, ...]] = []
        self.calibration = BackgroundCalibration(key_of(load, "CPU"), model, has_room, self.told.append, self.notes.append)

    def finish(self, *, beside_jobs: bool = False) -> BackgroundCalibration:
        while not self.calibration.over:
            self.calibration.turn(self.begun.append, beside_jobs=beside_jobs)
        return self.calibration


@pytest.mark.slow
def test_a_base_is_timed_once_and_what_was_found_is_kept(base: Path, tmp_path: Path, own_cache: Path) -> None:
    model, load = SuperModel.from_pretrained(str(base), deterministic=True), load_of(base, tmp_path)
    assert recall(key_of(load, "CPU"), "CPU") is None
    made = Made(load, model)
    made.finish()
    (first,) = made.told
    assert first.device == device_name(model.device) == "CPU" and first.speed.tokens_per_second > 0
    assert len(made.notes) == 1 and "was measured in" in made.notes[0]
    (kept,) = own_cache.iterdir()
    assert recall(key_of(load, "CPU"), "CPU") == first
    assert recall(key_of(replace(load, deterministic=False), "CPU"), "CPU") is None, "another kind of run"
    kept.write_text("{")
    assert recall(key_of(load, "CPU"), "CPU") is None
    again = Made(load, model)
    again.finish()
    assert again.told and "tokens_per_second" in kept.read_text()


def test_the_probes_are_of_one_job_and_of_a_group(base: Path, own_cache: Path) -> None:
    points = probed(base)
    alone, group = points[:-1], points[-1]
    for point, tokens in [*zip(alone, calibration.PROBES, strict=False), (group, calibration.PROBES[1])]:
        assert 0.6 * tokens < point.tokens < 1.4 * tokens, (point, tokens)
    assert {point.members for point in alone} == {1} and group.members == calibration.MEMBERS
    assert all(point.seconds > 0 for point in points)


def test_all_micro_batches_of_a_probe_are_of_one_shape(base: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU launches them as CUDA graphs, as it does those of a job after its first hundreds of steps. Their samples are not of a length
    that has an attention of its own.
    """
    shapes = dict[tuple[str, ...], set[tuple[int, ...]]]()
    compute = Engine.run_micro_batch

    def run_micro_batch(engine: Engine) -> MicroBatch | None:
        if (packed := compute(engine)) is not None:
            members = tuple(sorted({row.job_id for row in packed.rows}))
            shapes.setdefault(members, set()).add(tuple(row.tokens for row in packed.rows))
            assert packed.budget % 128 == 0
        return packed

    monkeypatch.setattr(Engine, "run_micro_batch", run_micro_batch)
    probed(base)
    assert len(shapes) > 1 and all(len(found) == 1 for found in shapes.values()), shapes
    assert sum(len(members) > 1 for members in shapes) == 1, "all of the group in each"
    assert all(tokens % 64 for found in shapes.values() for lengths in found for tokens in lengths)


def test_one_that_compiled_does_not_count(base: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may be compiled in any of the micro-batches that are timed: it took ten times as long, and says nothing of the speed."""
    took = [9.0, 0.5, 9.0, 0.5, 0.5]  # the first to warm up
    monkeypatch.setattr(calibration, "_WARM_UP", {"cpu": 1})
    monkeypatch.setattr(calibration, "_TIMED", {"cpu": 4})
    monkeypatch.setattr(calibration, "MOST_SECONDS", {"cpu": 1e9})
    count = itertools.count()

    def one(*_: object) -> tuple[int, float]:
        return 128, took[next(count) % len(took)]

    monkeypatch.setattr(calibration, "time_micro_batch", one)
    points = probed(base)
    assert len(points) == len(calibration.PROBES) + 1 and {point.seconds for point in points} == {0.5}


def test_it_goes_on_as_long_as_it_gets_faster(base: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a load, kernels are tuned for longer than a few micro-batches take."""
    turns = [[8.0, 8.0, 8.0], [2.0, 9.0, 2.0], [0.5, 0.5, 0.5], [0.49, 0.49, 0.49]]
    monkeypatch.setattr(calibration, "_WARM_UP", {"cpu": 0})
    monkeypatch.setattr(calibration, "_MOST_TURNS", {"cpu": 5})
    monkeypatch.setattr(calibration, "MOST_SECONDS", {"cpu": 1e9})
    took = itertools.cycle(itertools.chain(*turns))
    monkeypatch.setattr(calibration, "time_micro_batch", lambda *_: (128, next(took)))
    assert {point.seconds for point in probed(base)} == {0.49}


def test_what_cannot_be_timed_is_said_and_the_worker_goes_on(
    base: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> tuple[int, float]:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(calibration, "time_micro_batch", fails)
    model = SuperModel.from_pretrained(str(base))
    made = Made(load_of(base, tmp_path), model)
    assert made.finish().over and not made.told and not model.bank.jobs()
    assert len(made.notes) == 1 and "CUDA out of memory" in made.notes[0] and not own_cache.exists()


# -- who hears it ----------------------------------------------------------------------------------------------------------


def test_each_controller_hears_it_once() -> None:
    worker_reconciler, load = WorkerReconciler((0,)), Load("b", "o", "cpu", 0.0)
    worker_reconciler.hear_want(DesiredState(1, 1, load))
    worker_reconciler.hear_report(Measured("H200", SPEED))
    assert worker_reconciler.reports == [Measured("H200", SPEED)]
    worker_reconciler.reports.clear()
    worker_reconciler.hear_want(DesiredState(1, 2, load))
    assert not [report for report in worker_reconciler.reports if isinstance(report, Measured)]
    worker_reconciler.hear_want(DesiredState(2, 1, load))
    assert [report for report in worker_reconciler.reports if isinstance(report, Measured)] == [Measured("H200", SPEED)]
    worker_reconciler.hear_report(Memory((30 << 30,)))
    worker_reconciler.reports.clear()
    worker_reconciler.hear_want(DesiredState(3, 1, load))
    assert worker_reconciler.reports[:2] == [Measured("H200", SPEED), Memory((30 << 30,))]


def test_a_full_disk_costs_the_measurement_and_not_the_worker(
    base: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written where the made-up jobs would lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no" / "such" / "place"))
    made = Made(load_of(base, tmp_path / "out"), SuperModel.from_pretrained(str(base)))
    assert made.finish().over and not made.told
    assert len(made.notes) == 1 and "was not measured" in made.notes[0] and "No such file" in made.notes[0]
