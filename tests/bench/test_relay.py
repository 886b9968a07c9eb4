"""Bytes go the way of a rank's to another host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_all_bytes_come(tmp_path: Path) -> None:
    """In a process of its own, as it forks."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "bench.relay", "--mib", "64", "--repeats", "1", "--commit", "abc", "--json", str(out)]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    assert ended.returncode == 0, ended.stdout.decode()
    ways = json.loads(out.read_text())["ways"]
    assert len(ways) == 2 and all(way["gb_per_second"] > 0 for way in ways.values())
