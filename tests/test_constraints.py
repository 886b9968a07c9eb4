"""The versions of `constraints.txt` can be installed together: each allows the others that it needs.

What is asked is the metadata of the distributions that are installed here. PyPI's torch demands one Triton; a build for CPUs demands none.
"""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def test_pinned_versions_allow_each_other() -> None:
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = {canonicalize_name(line.name): str(line.specifier).removeprefix("==") for line in lines}
    refused, asked = [], 0
    for distribution in distributions():
        name, version = canonicalize_name(distribution.name), distribution.version
        if pins.get(name) != version.partition("+")[0]:
            continue
        for needed in map(Requirement, distribution.requires or []):
            pin = pins.get(canonicalize_name(needed.name))
            if pin is not None and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                asked += 1
                if not needed.specifier.contains(pin, prereleases=True):
                    refused.append(f"{name} {version} needs {needed}")
    assert not refused
    assert asked > 50, "few distributions here have the versions of constraints.txt"
