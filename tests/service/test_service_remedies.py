"""What a tenant reads of a failure names nothing that only `tlora train` or the machine's owner can do."""

from __future__ import annotations

import ast
import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.served import Served
from tlora import durable
from tlora.data.worker import _trouble
from tlora.errors import CheckpointError
from tlora.manifest import verify
from tlora.service.job_status_writer import ANEW, in_service_words

SOURCE = Path(__file__).parents[2] / "src" / "tlora"
WHAT_A_JOB_RUNS = (
    "engine/job_opening.py",
    "engine/trainer.py",
    "store/*.py",
    "group/*.py",
    "data/dataset.py",
    "planning/start.py",
    "durable.py",
    "manifest.py",
)
# Looked at before a run begins, by `tlora train` alone.
OF_THE_COMMAND = ("run_directory.py", "overwrite.py", "run_recovery.py", "scheduled_directory.py")
OTHERS = ("output_dir", "--resume", "--overwrite", "TLORA_", "resume the run", "put it back")


def text_of(node: ast.expr) -> str | None:
    """A message, with X for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
    return None


def messages() -> Iterator[str]:
    """Of all errors that a job can end with."""
    for pattern in WHAT_A_JOB_RUNS:
        for path in SOURCE.glob(pattern):
            if path.name in OF_THE_COMMAND:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error") and node.args:
                    found = text_of(node.args[0])
                    if found is not None:
                        yield found


def test_no_error_that_a_job_can_end_with_names_a_remedy_that_is_not_its_tenants() -> None:
    changed = {message: said for message in messages() if (said := in_service_words(message)) != message}
    assert len(changed) >= 8, "the errors are looked for where they no longer are"
    for message in messages():
        said = changed.get(message, message).lower()
        assert not [word for word in OTHERS if word.lower() in said], message
    for message, said in changed.items():
        assert said.endswith(ANEW) and said.startswith(message[:8])


def test_what_is_wrong_and_what_a_tenant_can_do_stays() -> None:
    for reason in (
        "line 3: role 'x' is none; correct it",
        "its loss is not finite. Lower learning_rate; its last finite state is at step 3",
        "",
    ):
        assert in_service_words(reason) == reason
    mixed = "too long. Lower max_length, which helps. Or use a new output_dir"
    assert in_service_words(mixed) == f"too long. Lower max_length, which helps. {ANEW}"


@pytest.mark.parametrize("kind", ["no checkpoint", "not written"])
def test_a_tenant_is_told_to_clone_the_job(served_slowly: Served, tmp_path: Path, kind: str) -> None:
    def write(_: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    with pytest.raises(CheckpointError) as raised:
        if kind == "not written":
            durable.write_directory(tmp_path / "checkpoint-4", write)
        else:
            (tmp_path / "checkpoint-4").mkdir()
            verify(tmp_path / "checkpoint-4")
    job = served_slowly.submit("alice")["id"]
    while job not in served_slowly.cluster.placed:
        served_slowly.wait("alice", job, "queued", "running")
    served_slowly.cluster.fail(job, str(raised.value))
    reason = served_slowly.wait("alice", job, "failed")["reason"]
    assert reason.endswith(ANEW) and "--resume" not in reason and "output_dir" not in reason, reason
    assert served_slowly.ask("alice", "POST", f"/v1/jobs/{job}/clone", 201, json={})["cloned_from"] == job, "the remedy works"


def test_trouble_of_the_servers_disk_is_not_a_tenants(tmp_path: Path) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "tokens" / "set"))
    served, own = (_trouble(error, tmp_path / "tokens", served) for served in (True, False))
    assert "Permission denied" in served and "ask the server's operator" in served
    assert "TLORA_CACHE" in own and "TLORA_CACHE" not in served and str(tmp_path) not in served
