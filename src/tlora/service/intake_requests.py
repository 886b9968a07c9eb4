"""The lines that the server sends to its intake process. Answers are JSON objects with the request's `key`."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from tlora.job import JobSpec


@dataclass(frozen=True, slots=True)
class IntakeRequest:
    """One job to be profiled, or, without a `spec`, a base to be looked at. `tokens_dir` gets the tenant's tokenized data."""

    key: str
    base_model: str  # directory or hub id
    tenant: str = ""
    spec: JobSpec | None = None
    tokens_dir: str = ""


_REQUESTS: TypeAdapter[IntakeRequest] = TypeAdapter(IntakeRequest)


def request_line(request: IntakeRequest) -> bytes:
    """With a line end. Of a JobSpec only what was set is said."""
    return _REQUESTS.dump_json(request, exclude_unset=True) + b"\n"


def parse_request(line: bytes) -> IntakeRequest:
    """What `request_line` gave. Raises ValueError."""
    return _REQUESTS.validate_json(line)
