"""LobRA's setting by arms: what each arm may and may not do, on a small setting."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench import lobra
from bench.length_mixes import drawn_job
from tlora.batching.recompute_plan import same_for_all
from tlora.planning.micro_batches import MicroBatches


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, forked_children: None) -> lobra.Setting:
    return lobra.make_setting(tmp_path_factory.mktemp("lobra"))


def test_samples_are_padded_to_powers_of_two_in_micro_batches_of_one_bucket() -> None:
    assert [lobra.bucket_of(n) for n in (1, 256, 257, 2048, 2049, 16384)] == [256, 256, 512, 2048, 4096, 16384]
    made = lobra.padded_micro_batches([100, 200, 300, 1500, 256], 1024)
    assert made == [[2048], [512], [256] * 3]


def test_plans_of_lobra_have_sixteen_gpus_and_hold_the_longest() -> None:
    assert ((1, 2048),) * 6 + ((2, 4096), (8, 16384)) in lobra.UNEQUAL
    for replicas in (lobra.HOMOGENEOUS, *lobra.UNEQUAL):
        assert sum(gpus for gpus, _ in replicas) == 16 and max(holds for _, holds in replicas) == lobra.LONGEST


def test_seconds_are_those_of_all_samples_in_every_arm(setting: lobra.Setting) -> None:
    """With nothing to balance and nothing to pad, a replica takes what its samples do."""
    step = [[2048] * 16 for _ in range(6)]
    micro = MicroBatches(4096, same_for_all(0))
    alone = 3 * setting.micro_batch_seconds([2048] * 2, 4096)
    for ends in (lobra.padded_step, lobra.packed_step, lobra.dispatched_step):
        assert ends(setting, step, micro) == pytest.approx([alone] * 16)


def test_a_recomputed_layer_and_padding_cost_what_the_planner_says(setting: lobra.Setting) -> None:
    plain = setting.micro_batch_seconds([1000], 1000)
    assert setting.micro_batch_seconds([1000], 1000, 32) == pytest.approx(1.31 * plain)
    full = setting.micro_batch_seconds([1000] * 2, 2000)
    assert setting.micro_batch_seconds([1000], 2000) == pytest.approx(full) and plain < full < 2 * plain


def test_a_long_sample_is_recomputed_where_it_would_not_fit(setting: lobra.Setting) -> None:
    memory = setting.device.parts.memory
    held = memory.most_tokens(setting.room_bytes, 0)
    assert 4096 < held < lobra.LONGEST and lobra.for_all(setting, held).most_layers == 0
    layers = lobra.for_all(setting, lobra.LONGEST).most_layers
    assert 0 < layers < 32
    assert memory.activation_bytes(lobra.LONGEST, layers) <= setting.room_bytes < memory.activation_bytes(lobra.LONGEST, layers - 1)


def test_lanes_are_never_slower_than_one_plan_for_all(setting: lobra.Setting) -> None:
    jobs = [drawn_job("short", 300, 0.8, 2048, 64), drawn_job("long", 4000, 0.7, lobra.LONGEST, 16)]
    step: Sequence[list[int]] = [[item.tokens for item in job.batch(n, 0)] for n, job in enumerate(jobs)]
    one = MicroBatches(lobra.LONGEST, lobra.for_all(setting, lobra.LONGEST))
    ends = [sum(lobra.packed_step(setting, step, micro)) for micro in (lobra.with_lanes(setting, jobs), one)]
    assert ends[0] < ends[1]


def test_the_program_compares_all_arms_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, setting: lobra.Setting
) -> None:
    monkeypatch.setattr(lobra, "make_setting", lambda _: setting)
    monkeypatch.setattr(lobra, "MIXES", {"few": 4})
    file = tmp_path / "lobra.json"
    lobra.main(["--steps", "1", "--commit", "abc", "--json", str(file)])
    (mix,) = json.loads(file.read_text())["mixes"].values()
    first, *others = mix["arms"]
    assert first["fewer"] == 0 and len(others) == 5
    for row in others:
        assert row["fewer"] == pytest.approx(1 - row["gpu_seconds_a_step"] / first["gpu_seconds_a_step"])
        assert 0 < row["busy_share"] <= 1 + 1e-9
    assert capsys.readouterr().out.count("GPU-seconds a step") == 6


def test_no_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lobra.main(["--steps", "0"])
    assert "0 steps say nothing" in capsys.readouterr().err
