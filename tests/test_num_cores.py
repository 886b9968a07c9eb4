"""How many cores a process may use where control groups give it less than the machine has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tlora import processes


def make_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("memberships", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {}, math.inf),
        ("0::/pods/one\n", {"cpu.max": "max 100000\n", "pods/cpu.max": "400000 100000\n", "pods/one/cpu.max": "800000 100000\n"}, 4.0),
        ("0::/pods/one\n", {"pods/one/cpu.max": "50000 100000\n"}, 0.5),  # a container does not see the groups above its own
        ("2:cpu,cpuacct:/pod\n", {"cpu,cpuacct/pod/cpu.cfs_quota_us": "200000\n", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n"}, 2.0),
        ("2:cpu,cpuacct:/pod\n", {"cpu,cpuacct/pod/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("2:cpuset:/pod\n1:memory:/\n", {"cpuset/pod/cpu.max": "1 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "no numbers\n"}, math.inf),
        ("not a table\n", {"cpu.max": "100000 100000\n"}, math.inf),
    ],
)
def test_a_quota_of_control_groups(memberships: str, files: dict[str, str], cores: float, tmp_path: Path) -> None:
    make_files(tmp_path / "groups", files)
    make_files(tmp_path, {"memberships": memberships})
    assert processes._quota(tmp_path / "memberships", tmp_path / "groups") == cores


@pytest.mark.parametrize(("quota", "cores"), [(math.inf, 8), (1.5, 2), (0.1, 1), (20.0, 8)])
def test_cores_are_those_of_the_affinity_within_the_quota(quota: float, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(processes, "_quota", lambda *_: quota)
    assert processes.num_cores() == cores
