"""Workers of two GPUs hold what those of two one-thread ranks hold: the same tests, on GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cluster.test_wide_training import (
    World,
    make_world,
    test_a_base_that_does_not_fit_on_a_gpu_lies_in_parts_on_those_of_a_group,
    test_a_rank_or_the_worker_is_lost,
    test_a_wide_group_has_the_bytes_of_a_run,
    test_idle_gpus_are_lent,
    test_jobs_go_on_on_other_gpus,
    test_the_next_controller_finds_a_wide_worker,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
__all__ = [
    "test_a_base_that_does_not_fit_on_a_gpu_lies_in_parts_on_those_of_a_group",
    "test_a_rank_or_the_worker_is_lost",
    "test_a_wide_group_has_the_bytes_of_a_run",
    "test_idle_gpus_are_lent",
    "test_jobs_go_on_on_other_gpus",
    "test_the_next_controller_finds_a_wide_worker",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("wide-gpu")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLORA_CACHE", str(directory / "cache"))
        yield make_world(directory, "cuda", 10)
