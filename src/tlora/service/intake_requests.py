"""What the server tells its intake process: settings in argv, then requests as lines. Answers are JSON objects with the request's `key`."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from tlora.job import JobSpec


@dataclass(frozen=True, slots=True)
class IntakeSettings:
    """`bases_dir` keeps the outlines of bases, held on a `device`; `slots` are batches at a time; the others are those of
    `data.limits.DataLimits`.
    """

    bases_dir: str
    dtype: str
    base_precision: str | None
    slots: int
    memory_bytes: int
    cpu_seconds: int
    seconds: float
    row_characters: int
    rows: int
    device: str = "cuda"
    unused_weights: str = "refuse"
    layout: str = "auto"


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
