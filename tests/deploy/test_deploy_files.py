"""The files of `deploy/` are what their readers accept: Kubernetes by its own schemas, the others by what they say and name."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from typer.main import get_command

from tests.deploy.commands import (
    COMPOSE,
    DEPLOY,
    DOCKERFILE,
    SBATCH,
    UNIT,
    WORKER_UNIT,
    CommandLine,
    command_lines,
    compose,
    instructions,
    manifest,
    manifests,
    pods,
    settings,
    unit,
)
from tlora.cli.commands import app
from tlora.cluster.local import STOP_SECONDS
from tlora.service.config import read_config

ROOT = DEPLOY.parent
DOCS = ROOT / "docs" / "how-to"
VERSIONS = ("1.33", "1.37")  # the first whose Jobs count failures by index for good, and the last that the schemas know


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", manifests(), ids=lambda one: one["kind"])
def test_manifests_are_valid(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_a_wrong_manifest_is_found() -> None:
    """The schemas look: at types, at names, at what is missing."""
    for change in ({"replicas": "two"}, {"replica": 2}, {"selector": 1}):
        wrong = manifest("Deployment", "tlora-server")
        wrong["spec"] |= change
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_manifests_name_what_there_is() -> None:
    server = manifest("Deployment", "tlora-server")["spec"]
    service = manifest("Service", "tlora")["spec"]
    labels = server["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items() and server["selector"]["matchLabels"].items() <= labels.items()
    (container,) = server["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    assert all(container[f"{kind}Probe"]["httpGet"]["port"] in ports for kind in ("startup", "liveness", "readiness"))
    page = (DOCS / "kubernetes.md").read_text(encoding="utf-8")
    known = {one["kind"] + one["metadata"].get("name", "") for one in manifests()}
    for kind, pod in pods():
        assert kind in ("Deployment", "Job")
        mounts = [mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]]
        assert sorted(volume["name"] for volume in pod["volumes"]) == sorted(mounts)
        secrets: dict[str, set[str]] = {}
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert "PersistentVolumeClaim" + volume["persistentVolumeClaim"]["claimName"] in known
            if "configMap" in volume:
                assert "ConfigMap" + volume["configMap"]["name"] in known
            if "secret" in volume:
                secrets[volume["secret"]["secretName"]] = set()
        for variable in (variable for one in pod["containers"] for variable in one.get("env", [])):
            reference = variable["valueFrom"]["secretKeyRef"]
            secrets.setdefault(reference["name"], set()).add(reference["key"])
        for name, keys in secrets.items():
            (made,) = re.findall(rf"kubectl create secret (?:tls|generic) {name} .*", page.replace("\\\n", " "))
            assert all(f"--from-literal={key}=" in made for key in keys)


def test_whoever_is_stopped_has_the_time_to_save_its_jobs() -> None:
    """The server lets its workers save theirs, and a worker is given more than Slurm's minute."""
    for _, pod in pods():
        assert pod["terminationGracePeriodSeconds"] > 2 * STOP_SECONDS
    services = compose()["services"]
    assert all(int(service["stop_grace_period"].removesuffix("s")) > 2 * STOP_SECONDS for service in services.values())
    assert int(unit()["Service"]["TimeoutStopSec"]) > 2 * STOP_SECONDS
    assert int(directives()["signal"].removeprefix("TERM@")) >= 60


def test_containers_run_without_rights_and_with_the_images_user() -> None:
    (made,) = [rest for name, rest in instructions() if name == "RUN" and rest.startswith("useradd")]
    (user,) = re.findall(r"--uid (\d+)", made)
    for _, pod in pods():
        context = pod["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == int(user)
        for one in pod["containers"]:
            assert one["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    last = {target: [rest for name, rest in lines if name == "USER"] for target, lines in stages().items()}
    assert last["cpu"] == last["cuda"] == ["tlora"]


def test_a_worker_that_was_asked_to_leave_has_not_failed() -> None:
    (job,) = [one for one in manifests() if one["kind"] == "Job"]
    spec, (container,) = job["spec"], job["spec"]["template"]["spec"]["containers"]
    assert spec["completionMode"] == "Indexed" and spec["suspend"] and "kueue.x-k8s.io/queue-name" in job["metadata"]["labels"]
    (exit_codes,) = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert exit_codes == {"containerName": container["name"], "operator": "In", "values": [143]}


def test_a_worker_needs_nothing_that_is_shared() -> None:
    """A pod gets its data over the line: its volumes are its own. The server's claims are for one node."""
    for _, pod in pods():
        if "serve" not in pod["containers"][0]["args"]:
            assert all("emptyDir" in volume for volume in pod["volumes"]), pod["volumes"]
    claims = [one for one in manifests() if one["kind"] == "PersistentVolumeClaim"]
    assert claims and all(claim["spec"]["accessModes"] == ["ReadWriteOnce"] for claim in claims)


def test_the_workers_of_both_kinds_are_the_same() -> None:
    (job,) = [pod for kind, pod in pods() if kind == "Job"]
    assert {**job, "restartPolicy": None} == {**manifest("Deployment", "tlora-worker")["spec"]["template"]["spec"], "restartPolicy": None}


def test_the_compose_file_names_what_there_is() -> None:
    file = compose()
    for service in file["services"].values():
        assert all(volume.partition(":")[0] in file["volumes"] for volume in service.get("volumes", ()))
        assert all(config["source"] in file["configs"] for config in service.get("configs", ()))
        assert set(service.get("depends_on", {})) <= set(file["services"])
    build = file["services"]["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DOCKERFILE and build["target"] in stages()
    if shutil.which("docker") and not subprocess.run(["docker", "compose", "version"], check=False, capture_output=True).returncode:
        subprocess.run(["docker", "compose", "-f", COMPOSE, "config", "--quiet"], check=True)


def stages() -> dict[str, list[tuple[str, str]]]:
    """The Dockerfile's stages by name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions():
        if name == "FROM":
            found[rest.split()[-1]] = []
        elif found:
            found[list(found)[-1]].append((name, rest))
    return found


def test_the_dockerfile_copies_what_there_is_and_all_that_a_wheel_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = [word for name, rest in instructions() if name == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert all((ROOT / path).exists() for path in copied)
    assert {"pyproject.toml", "src", project["readme"]} <= set(copied)
    assert {path.name for pattern in project.get("license-files", ["LICENSE"]) for path in ROOT.glob(pattern)} <= set(copied)
    extras = {name for _, rest in instructions() for name in re.findall(r"\.whl\)\[(\w+)\]", rest)}
    assert extras and extras <= set(project["optional-dependencies"])
    assert set(dict(instructions())) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "EXPOSE", "ENTRYPOINT", "CMD", "USER", "VOLUME"}


@pytest.mark.soak
@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_images_build(target: str) -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "version"], check=False, capture_output=True).returncode:
        pytest.skip("no docker daemon answers here")
    subprocess.run(["docker", "build", "-f", DOCKERFILE, "--target", target, "-t", f"tlora-test:{target}", ROOT], check=True)
    subprocess.run(["docker", "run", "--rm", f"tlora-test:{target}", "worker", "--help"], check=True)


def directives() -> dict[str, str]:
    """Of the batch script: those before its first command, which alone count."""
    lines = SBATCH.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("#!")
    head = lines[: next(number for number, line in enumerate(lines) if line and not line.startswith("#"))]
    found = [line.removeprefix("#SBATCH --") for line in head if line.startswith("#SBATCH")]
    assert len(found) == sum(line.startswith("#SBATCH") for line in lines)
    return {name: value for name, _, value in (one.partition("=") for one in found)}


def test_the_batch_script_is_one_that_slurm_reads() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    assert directives().keys() >= {"array", "signal", "requeue", "time", "gpus-per-task"}
    assert re.fullmatch(r"\d+-\d+%\d+", directives()["array"]) and re.fullmatch(r"\d\d:\d\d:\d\d", directives()["time"])


def test_workers_come_again_whatever_ended_them_and_are_stopped_by_their_agent() -> None:
    service = unit(WORKER_UNIT)["Service"]
    assert service["KillMode"] == "mixed" and service["Restart"] == "always" and unit(WORKER_UNIT)["Unit"]["StartLimitIntervalSec"] == "0"
    assert unit()["Service"]["KillMode"] == "process", "workers outlive a server that is killed"


@pytest.mark.parametrize("path", [UNIT, WORKER_UNIT], ids=lambda path: path.stem)
def test_units_are_ones_that_systemd_reads(path: Path, tmp_path: Path) -> None:
    service = unit(path)["Service"]
    assert unit(path)["Install"]["WantedBy"] == "multi-user.target"
    if shutil.which("systemd-analyze") is not None:
        here = tmp_path / path.name
        here.write_text(path.read_text(encoding="utf-8").replace(service["ExecStart"].split()[0], shutil.which("true") or "/bin/true"))
        looked = subprocess.run(["systemd-analyze", "verify", "--man=no", here], check=False, capture_output=True, text=True)
        assert looked.returncode == 0 and path.name not in looked.stderr, looked.stderr


@pytest.mark.parametrize("line", command_lines(), ids=str)
def test_command_lines_are_ones_that_the_program_knows(line: CommandLine) -> None:
    command: Any = get_command(app)
    words = list(line.words)
    if words == ["--help"]:
        return
    while words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    command.make_context("tlora", words)  # raises for what it does not know


@pytest.mark.parametrize("file", sorted(settings()))
def test_settings_are_ones_that_a_server_takes(file: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(settings()[file])
    config = read_config(path, {})
    assert config.worker_listen is not None and str(config.directory).startswith("/var/lib/tlora/")
    assert ("ENV", f"TLORA_HOME={config.directory}") in instructions(), "`tlora worker-token` in the container finds it"
