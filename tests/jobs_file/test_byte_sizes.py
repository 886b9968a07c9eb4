"""Numbers of bytes with units, in a jobs file and in a server's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tlora.job import RunSpec
from tlora.jobs_file import explain, read_jobs_file
from tlora.service.config import ServerConfig

JOBS: dict[str, Any] = {"base_model": "b", "jobs": [{"name": "a", "data": "d"}]}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("22GiB", 22 << 30),
        ("22Gi", 22 << 30),
        ("22 gib", 22 << 30),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("23622320128", 22 << 30),
        (22 << 30, 22 << 30),
        ("auto", "auto"),
    ],
)
def test_units(written: object, value: object, tmp_path: Path) -> None:
    assert RunSpec.model_validate(JOBS | {"memory_limit": written}).memory_limit == value
    (tmp_path / "d.jsonl").write_text("")
    file = tmp_path / "jobs.yaml"
    file.write_text(f"base_model: b\nmemory_limit: {written}\njobs: [{{name: a, data: d.jsonl}}]\n")
    run = read_jobs_file(file)
    assert run.memory_limit == value
    assert RunSpec.model_validate_json(run.model_dump_json()) == run


@pytest.mark.parametrize("written", ["22XB", "GiB", "-3GiB", "0GiB", 0, 2.5, "", None, "1e3GiB", "9" * 400 + "GiB", 10**30])
def test_what_is_no_number_of_bytes(written: object) -> None:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(JOBS | {"memory_limit": written})
    said = explain(caught.value)
    assert said.startswith("memory_limit: ") and "is not 'auto' or a number of bytes, such as 22GiB; the default is auto" in said


def test_a_servers_settings() -> None:
    config = ServerConfig.model_validate(
        {"memory_limit": "22GiB", "limits": {"storage_bytes": "100GiB", "line_bytes": "1MiB"}, "log_file_bytes": "64KiB"}
    )
    assert (config.memory_limit, config.limits.storage_bytes, config.limits.line_bytes) == (22 << 30, 100 << 30, 1 << 20)
    assert config.log_file_bytes == 1 << 16
    with pytest.raises(ValidationError):
        ServerConfig.model_validate({"log_file_bytes": "63KiB"})
