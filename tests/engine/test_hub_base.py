"""A launch over a base of the hub: one process downloads it, with a line of its progress, and all read it from its directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.data.small_hub import small_hub

DEMO = Path(__file__).parents[2] / "demo" / "base"


@pytest.mark.slow
@pytest.mark.usefixtures("real_start")  # the hub's clients read HF_ENDPOINT when they are imported
def test_one_process_downloads_for_two_ranks_and_says_how_far_it_is(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {n}.", "completion": f"{n} it is."} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    jobs = [{"name": name, "data": "rows.jsonl", "max_steps": 1, "batch_size": 2} for name in ("one", "two")]
    (tmp_path / "jobs.yaml").write_text(yaml.safe_dump({"base_model": "org/name", "output_dir": str(tmp_path / "out"), "jobs": jobs}))
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_CACHE"}
    environment |= {"HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "TLORA_CACHE": str(tmp_path / "cache")}

    def tlora(*words: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "tlora", *words]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout, ended.stderr

    with small_hub() as hub:
        environment["HF_ENDPOINT"] = hub.endpoint
        commit = hub.add("org/name", {path.name: path.read_bytes() for path in DEMO.iterdir()} | {"pytorch_model.bin": b"not to be read"})
        weights = f"GET /org/name/resolve/{commit}/model.safetensors"
        said, progress = tlora("check", str(tmp_path / "jobs.yaml"), "--device", "cpu")
        assert "training downloads 4.4 MB of org/name first, to " in said + progress and "downloading org/name: " in progress
        assert weights not in hub.asked
        said, _ = tlora("train", str(tmp_path / "jobs.yaml"), "--device", "cpu", "--gpus", "2")
        assert "downloading org/name@" in said and " of 4.6 MB" in said
        assert hub.asked.count(weights) == 1 and not any("pytorch_model.bin" in asked for asked in hub.asked)
        assert json.loads((tmp_path / "out" / "run.json").read_text())["base_model"] == f"org/name@{commit}"

        shutil.rmtree(tmp_path / "home")
        ask = ("generate", "--adapter", str(tmp_path / "out" / "one"), "--prompt", "Say 3.", "--max-new-tokens", "2", "--device", "cpu")
        answer, said = tlora(*ask)
        lines = said.splitlines()
        assert re.fullmatch(rf"downloading org/name@{commit}: [\d.]+ k?B of 4\.6 MB", lines[0]), said
        assert hub.asked.count(weights) == 2 and all(line.startswith(("downloading ", "prompt: ")) for line in lines), said
        assert tlora(*ask) == (answer, "\n".join(line for line in lines if not line.startswith("downloading ")) + "\n")
