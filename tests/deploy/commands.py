"""The files of `deploy/` as programs read them, and the command lines in them: taken out, never written again."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
COMPOSE, DOCKERFILE = DEPLOY / "compose.yaml", DEPLOY / "Dockerfile"
SBATCH = DEPLOY / "slurm" / "worker.sbatch"
UNIT, WORKER_UNIT = (DEPLOY / "systemd" / name for name in ("tlora.service", "tlora-worker.service"))


@dataclass(frozen=True)
class CommandLine:
    """Words behind `tlora`. `variables` are those of the environment that the file sets, and where their values come from."""

    file: str
    words: tuple[str, ...]
    variables: dict[str, Any] = field(default_factory=dict[str, Any])

    def __str__(self) -> str:
        return f"{self.file}: {' '.join(self.words[:1])}"


def manifests() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in manifests() if one["kind"] == kind and one["metadata"].get("name", "") == name]
    return found


def pods() -> list[tuple[str, dict[str, Any]]]:
    """The kind of what makes the pods, and their spec."""
    return [(one["kind"], one["spec"]["template"]["spec"]) for one in manifests() if "template" in one.get("spec", {})]


def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))


def unit(path: Path = UNIT) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign] # names have capitals
    parser.read_string(path.read_text(encoding="utf-8"))
    return parser


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: name and the rest, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.strip().partition(" ") for line in text.splitlines() if line.strip())]


def command_lines() -> list[CommandLine]:
    """All of them. A container's are arguments of the image's entry point."""
    found = [CommandLine("Dockerfile", tuple(json.loads(rest))) for name, rest in instructions() if name == "CMD"]
    for kind, pod in pods():
        for one in pod["containers"]:
            assert "command" not in one, "a container runs the image's entry point"
            found.append(CommandLine(f"kubernetes {kind}", tuple(one["args"]), {each["name"]: each for each in one.get("env", [])}))
    found += [
        CommandLine("compose", tuple(map(str, service["command"])), service.get("environment", {}))
        for service in compose()["services"].values()
    ]
    for path in (UNIT, WORKER_UNIT):
        program, *words = shlex.split(unit(path)["Service"]["ExecStart"])
        assert Path(program).name == "tlora"
        found.append(CommandLine("systemd", tuple(words)))
    found += [
        CommandLine("slurm", tuple(shlex.split(call))) for call in re.findall(r"srun tlora (.*?) \|\|", SBATCH.read_text(encoding="utf-8"))
    ]
    return found


def settings() -> dict[str, str]:
    """The server's settings that the files carry, by file."""
    config_map = manifest("ConfigMap", "tlora-server")["data"]["server.yaml"]
    return {"kubernetes": config_map, "compose": compose()["configs"]["server"]["content"]}
