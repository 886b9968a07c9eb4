"""Runs whose samples differ much in length: the plan for an 8B on an H100, and the program that measures it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from bench import cards, long_samples
from tlora.engine.check import RunCheck, check
from tlora.job import DataConfig, JobSpec, RunSpec


def checked(directory: Path, lengths: list[int], limit: str, gpu: str = "h100", **settings: object) -> RunCheck:
    """Four jobs of rank 16 over random token ids of such lengths, on one GPU with so much of its memory."""
    directory.mkdir(exist_ok=True)
    base, dice = cards.make_base("8B", directory / "base"), random.Random(0)
    rows = [json.dumps({"input_ids": [dice.randrange(3, 1000) for _ in range(length)]}) for length in lengths]
    (directory / "ids.jsonl").write_text("\n".join(rows))
    data = DataConfig(path=str(directory / "ids.jsonl"), max_length=max(lengths))
    jobs = [JobSpec(name=f"job{i}", data=data, r=16, batch_size=8, max_steps=20) for i in range(4)]
    fields = {"base_model": str(base), "output_dir": str(directory / "out"), "jobs": jobs, "memory_limit": limit} | settings
    return check(RunSpec.model_validate(fields), gpu=gpu)


@pytest.mark.slow
def test_one_sample_of_16384_does_not_slow_down_all_others_of_an_8b(tmp_path: Path) -> None:
    found = checked(tmp_path, [16_384, *[1024] * 144], "30GiB")
    assert not [problem for job in found.jobs for problem in job.problems] and found.resident_jobs == 4
    auto, *_, every = found.recompute_choices
    assert (auto.recompute, auto.layers_of_budget) == ("auto", 0) and 16 < auto.recomputed_layers < 32
    assert 2048 <= auto.token_budget == found.token_budget < 8192 and found.predicted_bytes <= 30 << 30
    assert auto.tokens_per_second > 1.12 * every.tokens_per_second
    assert f"no layer recomputed in micro-batches of up to {found.token_budget:,} tokens" in found.recomputed
    assert f"{auto.recomputed_layers} of 32 in that of a sample of 16,384 tokens by itself" in found.recomputed


@pytest.mark.slow
def test_four_jobs_over_an_8b_train_in_22_gib(tmp_path: Path) -> None:
    dice = random.Random(1)
    lengths = [2048, *(dice.randrange(128, 2049) for _ in range(60))]
    found, roomy = (checked(tmp_path / limit, lengths, limit, "a100-80") for limit in ("22GiB", "70GiB"))
    assert not [problem for job in found.jobs for problem in job.problems] and found.resident_jobs == 4
    assert found.predicted_bytes <= 22 << 30 and not roomy.recomputed_layers and not roomy.streamed
    assert "times as fast, by prediction, as with the whole base on the device" in found.streamed
    assert found.tokens_per_second > 0.85 * roomy.tokens_per_second
    assert found.stream_cost is not None and found.stream_cost.exposed_seconds < 0.1 * found.stream_cost.seconds


@pytest.mark.slow
def test_every_arm_trains_the_same_samples(tmp_path: Path) -> None:
    """On a CPU nothing is recomputed and no memory is counted: it shows that the program runs."""
    out = tmp_path / "found.json"
    arguments = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--jobs", "2", "--rank", "4", "--batch-size", "4"]
    arguments += ["--long", "120", "--short", "8,24", "--limit-gib", "1", "--rounds", "1", "--commit", "none", "--out", str(out)]
    found = long_samples.run_benchmark(long_samples.read_options([*arguments, "--arms", "planned,one-plan,unlimited"]))
    assert [row["arm"] for row in found["rows"]] == list(long_samples.ARMS)
    assert len({row["tokens"] for row in found["rows"]}) == 1 and found["rows"][0]["tokens"] == 2 * 1200
    assert found["medians"].keys() >= {"planned over one-plan", "planned over unlimited"} and json.loads(out.read_text()) == found


def test_an_arm_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_samples.read_options(["--arms", "planned,best"])
    assert "'best' is none of planned, one-plan, unlimited" in capsys.readouterr().err
