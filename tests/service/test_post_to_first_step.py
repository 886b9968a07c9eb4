"""`docs/explanation/architecture.md` lists the functions from `POST /v1/jobs` to the first optimizer step; here a real server, its intake
and its worker say when each of them was first called, and that is compared with the list.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.engine.tiny_runs import write_rows
from tests.service.test_real_server import Server, running

DESIGN = Path(__file__).parents[2] / "docs" / "explanation" / "architecture.md"
MOST_FUNCTIONS = 20
TRACE = """
import importlib.abc, importlib.machinery, json, os, sys, time
from functools import reduce, wraps

WANTED, FILE = json.loads(os.environ["TRACED_FUNCTIONS"]), os.environ["TRACE_FILE"]  # which the test makes when the trace shall begin

def traced(module, name):
    *owners, last = name.split(".")
    owner = reduce(getattr, owners, sys.modules[module])
    function, called = getattr(owner, last), []
    @wraps(function)
    def call(*arguments, **options):
        if not called and os.path.exists(FILE):
            called.append(True)
            with open(FILE, "a") as file:  # one write of a line: processes share it
                file.write(json.dumps([time.monotonic_ns(), module, name]) + "\\n")
        return function(*arguments, **options)
    setattr(owner, last, call)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in WANTED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def execute_and_trace(module):
            execute(module)
            for function in WANTED[name]:
                traced(name, function)
        spec.loader.exec_module = execute_and_trace
        return spec

sys.meta_path.insert(0, Finder())
"""


def listed() -> list[tuple[str, str]]:
    """Module and qualified name of each."""
    text = DESIGN.read_text(encoding="utf-8").split("## From `POST /v1/jobs` to the first optimizer step")[1].split("\n## ")[0]
    found = re.findall(r"^\d+\. `([\w.]+)` in `([\w/]+)\.py`:", text, re.MULTILINE)
    return [("tlora." + file.replace("/", "."), name) for name, file in found]


@pytest.mark.slow
def test_the_listed_functions_are_called_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_start: None) -> None:
    functions, file = listed(), tmp_path / "trace.jsonl"
    assert 10 <= len(functions) <= MOST_FUNCTIONS and len(set(functions)) == len(functions)
    wanted: dict[str, list[str]] = {}
    for module, name in functions:
        wanted.setdefault(module, []).append(name)
    (tmp_path / "sitecustomize.py").write_text(TRACE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TRACED_FUNCTIONS", json.dumps(wanted))
    monkeypatch.setenv("TRACE_FILE", str(file))
    directory = tmp_path / "server"
    directory.mkdir()
    with running(directory) as servers:
        servers.append(server := Server(directory))
        upload = {"file": ("data.jsonl", write_rows(tmp_path / "data.jsonl", 8).read_bytes())}
        data = server.ask("POST", "/v1/files", files=upload, data={"purpose": "fine-tune"})["id"]
        file.touch()
        job = server.submit(name="one", data={"file": data}, max_steps=1, batch_size=4, r=4)
        assert server.ended(job)["status"] == "succeeded", (tmp_path / "server.log").read_text()
    called = sorted(json.loads(line) for line in file.read_text().splitlines())
    assert functions == [(module, name) for _, module, name in called], f"{DESIGN.name}: list these"
