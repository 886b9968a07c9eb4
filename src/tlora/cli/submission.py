"""Sends a plan's uploads and requests one after the other, with a line about each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlora.api import BaseList, JobView, OrderedData, Sweep
from tlora.cli.terminal import bytes_text, note
from tlora.client.connection import Connection
from tlora.client.jobs import find_start
from tlora.client.orders import Plan, find_base, order_of
from tlora.client.transfers import upload_files
from tlora.errors import ConfigError, ServiceError, TloraError
from tlora.job import DataSource
from tlora.jobs_file import read_settings
from tlora.wording.numbers import quantity

_DATA_KEYS = OrderedData.model_fields.keys() - {"file", "eval_file"}


def submit_plan(connection: Connection, plan: Plan, start_from: str | None, tell: Callable[[str], None]) -> list[JobView]:
    """The jobs, once the server has accepted all of them. Raises TloraError, which says how many it had accepted before."""
    base = find_base(plan.base_model, {base.name: base.digest for base in connection.get("/v1/bases", BaseList).data}, note)
    source = find_start(connection, start_from) if start_from is not None else None
    ids = upload_files(connection, plan.files, _say_upload)
    accepted: list[JobView] = []
    for submission in plan.submissions:
        body = order_of(submission, base, ids, source)
        try:
            if submission.sweep is None:
                jobs = [connection.send("POST", "/v1/jobs", JobView, body)]
            else:
                jobs = connection.send("POST", "/v1/sweeps", Sweep, body).data
        except TloraError as error:
            if not accepted and (len(plan.submissions) == 1 or not isinstance(error, ServiceError) or not error.status):
                raise  # it has no answer, or it needs no name
            told = (
                f"{quantity(len(accepted), 'job before it was', 'jobs before it were')} accepted: submit the others alone"
                if accepted
                else "No job was accepted"
            )
            raise ConfigError(f"{', '.join(submission.names[:3])}: {error}. {told}") from error
        for job in jobs:
            tell(f"{job.name}: accepted as {job.id}")
        accepted += jobs
    return accepted


def _say_upload(name: str, size: int, known: bool) -> None:
    note(f"{name} ({bytes_text(size)}): {'the server has it' if known else 'uploaded'}")


def clone_job(connection: Connection, job: JobView, settings: Sequence[str]) -> JobView:
    """A new job with the order of `job`, except for `settings` ("r=8", "max_length=512", "data=other.jsonl")."""
    given, title = read_settings(settings, job.name)
    name = given.pop("name", title)
    changes: dict[str, Any] = {"name": str(name)}
    data: dict[str, Any] = {}
    for key, value in given.items():
        place = key.removeprefix("data.")
        if key == "data" or place in ("path", "file"):
            data["file"] = _uploaded(connection, value)
        elif place in ("eval_path", "eval_file"):
            data["eval_file"] = _uploaded(connection, value)
        elif key.startswith("data.") or key in _DATA_KEYS:
            data[place] = value
        elif key == "start_from":
            changes[key] = find_start(connection, str(value))
        else:
            changes[key] = value
    if data:
        changes["data"] = data
    body: Mapping[str, Any] = {"set": changes}
    return connection.send("POST", f"/v1/jobs/{job.id}/clone", JobView, body)


def _uploaded(connection: Connection, value: object) -> str:
    from tlora.client.orders import files_of

    if not isinstance(value, str):
        raise ConfigError(f"data: {value!r} is not the path of a file; write --set data=other.jsonl")
    files = files_of(DataSource(path=str(Path(value).expanduser().absolute())))
    if len(files) > 1:
        raise ConfigError(f"data: {value!r} holds {len(files)} files; name one")
    return upload_files(connection, files, _say_upload)[files[0]]
