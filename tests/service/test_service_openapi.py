"""Schemathesis over the OpenAPI document, with all its checks: against a server on a socket, with a key of all scopes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.served import listening

# A request that is as documented may break a rule between its fields (400), or name what there is not (404, 409).
CONFIG = '[checks]\npositive_data_acceptance.expected-statuses = ["2xx", "400", "401", "403", "404", "409"]\n'


def run(directory: Path, phases: str, examples: int) -> int:
    """The cases that were tried; fails with schemathesis' own words. Streams do not end, and a drained server answers 503: these two are
    tested by hand.
    """
    with listening(directory / "server") as (served, url):
        key = served.key("alice", "read", "submit", "admin")
        config = directory / "schemathesis.toml"
        config.write_text(CONFIG)
        program = Path(sys.executable).with_name("schemathesis")
        command = [str(program), "--config-file", str(config), "run", f"{url}/openapi.json", "-H", f"Authorization: Bearer {key}"]
        command += ["--exclude-path-regex", "stream$|drain", "--max-examples", str(examples), "--phases", phases, "--seed", "17"]
        command += ["--no-color", "--suppress-health-check", "all", "--continue-on-failure"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    found = re.search(r"(\d+) generated", ended.stdout)
    assert found is not None and "Tested: 49" in ended.stdout, ended.stdout[-3000:]
    return int(found[1])


@pytest.mark.slow
def test_what_is_documented_holds(tmp_path: Path) -> None:
    assert run(tmp_path, "fuzzing", 8) >= 200


@pytest.mark.soak
def test_what_is_documented_holds_with_every_boundary_value(tmp_path: Path) -> None:
    assert run(tmp_path, "coverage,fuzzing,stateful", 100) >= 3_000
