"""The parts of `bench.shared_base` over bases that fill a GPU, and their rival, where there is no GPU: small, and by gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.test_shared_base_bench import run

pytestmark = [pytest.mark.usefixtures("forked_children"), pytest.mark.slow]


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.soak), ("--lengths", "10-60")], ids=["alike", "mixed"])
def test_big_bases_train_shared_and_whole(options: tuple[str, ...], tmp_path: Path) -> None:
    found = run(tmp_path, "--gpus", "2", "--parts", "big,fp8", *options)
    for rank in [*found["big"], *found["fp8"]]:
        assert "error" not in rank, rank
        assert rank["micro_batch"]["tokens_per_second_of_all_ranks"] > 0


def test_the_rival_trains_kept_and_recomputed(tmp_path: Path) -> None:
    for rank in run(tmp_path, "--gpus", "2", "--parts", "fsdp")["fsdp"]:
        ways = {name: way for name, way in rank.items() if "samples a GPU" in name}
        assert len(ways) == 2 and all(way["tokens_per_second_of_all_ranks"] > 0 for way in ways.values()), rank
