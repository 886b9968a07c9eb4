"""Hosts that are killed, stopped, suspended, cut off and slowed down at random while jobs train: no job is lost or doubled, no bit differs.

`python -m tests.cluster.host_trials 1 60` runs as many as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.host_trials import Material, open_trial
from tests.hosts import why_no_namespaces

pytestmark = [
    pytest.mark.skipif(bool(why_no_namespaces()), reason=f"no namespaces: {why_no_namespaces()}"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("material"))


@pytest.mark.parametrize("seed", [2, 3, 5, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(11, 18))])
def test_jobs_end_as_one_process_trains_them_whatever_befalls_their_hosts(material: Material, tmp_path: Path, seed: int) -> None:
    with open_trial(material, tmp_path / "trial", seed) as trial:
        trial.run()
