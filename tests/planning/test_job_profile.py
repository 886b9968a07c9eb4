"""A job's profile against a walk through all its global batches, and against the adapter that it trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.engine.tiny_runs import job, run_spec, train
from tlora.data.dataset import Dataset
from tlora.data.order import Mixture, global_batch, mix
from tlora.data.profile import tokens_of_steps
from tlora.errors import ConfigError, ModelError
from tlora.job import JobSpec
from tlora.planning.job_profile import ProfiledJob, profile_jobs


def test_a_profile_is_what_the_job_then_does(base: Path, data: Path, tmp_path: Path) -> None:
    own = {"path": str(data / "c.jsonl"), "eval_path": str(data / "held-out.jsonl")}
    orders = [
        job("epochs", str(data / "a.jsonl"), max_steps=None, num_train_epochs=2, batch_size=5),
        job("cut", {**own}, max_steps=13, batch_size=7, r=3, target_modules=["q_proj", "down_proj"]),
        job("split", {"path": str(data / "c.jsonl"), "eval_size": 0.25}, max_steps=4),
    ]
    found = profile_jobs(run_spec(base, tmp_path / "none", orders))
    results = train(base, tmp_path / "out", orders)
    for name, made in found.items():
        assert isinstance(made, ProfiledJob)
        profile, result = made.profile, results[name]
        assert profile.steps == result.total_steps
        assert profile.tokens_per_step == pytest.approx(result.num_tokens / result.steps, rel=1e-12)
        tensors = load_file(tmp_path / "out" / name / "adapter_model.safetensors")
        assert profile.adapter_parameters == sum(tensor.size for tensor in tensors.values())
        assert (made.eval_set is not None) == (name == "cut")
    cut = found["cut"]
    assert isinstance(cut, ProfiledJob)
    lengths = Dataset(Path(cut.train_set)).lengths
    assert sum(cut.profile.length_histogram) == len(lengths) and cut.profile.longest_sample_tokens >= lengths.max()
    for k, count in enumerate(cut.profile.length_histogram):
        assert count == sum(2**k <= n < 2 ** (k + 1) for n in lengths)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 60), st.integers(0, 9))
def test_tokens_of_steps_are_those_of_the_batches(samples: int, batch: int, steps: int, seed: int) -> None:
    spec = JobSpec.model_validate({"name": "x", "data": "d", "batch_size": batch, "max_steps": steps, "seed": seed})
    for epoch in (samples, mix([samples, samples], [1, 2.5])):
        lengths = np.random.default_rng(seed).integers(1, 100, 2 * samples if isinstance(epoch, Mixture) else samples)
        walked = sum(int(lengths[global_batch(step, epoch, batch, seed)].sum()) for step in range(steps))
        assert tokens_of_steps(lengths, epoch, spec, steps) == walked


def test_what_is_wrong_with_a_job_is_its_own(base: Path, data: Path, tmp_path: Path) -> None:
    orders = [
        job("gone", str(tmp_path / "no.jsonl")),
        job("wrong", str(data / "a.jsonl"), target_modules=["no"]),
        job("x", str(data / "a.jsonl")),
    ]
    found = profile_jobs(run_spec(base, tmp_path, orders))
    assert isinstance(found["x"], ProfiledJob)
    for name, said in (("gone", "no.jsonl"), ("wrong", "'no'")):
        error = found[name]
        assert isinstance(error, ConfigError) and said in str(error)
    with pytest.raises(ModelError, match="no such directory"):
        profile_jobs(run_spec(tmp_path / "none", tmp_path, orders))
