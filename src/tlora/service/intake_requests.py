"""What the server tells its intake process: settings in argv, then requests as lines. Answers are JSON objects with the request's `key`."""

from __future__ import annotations

from tlora.job import JobSpec
from tlora.message_codec import Codec, message


@message
class IntakeSettings:
    """`bases_dir` keeps the outlines of bases, held on a `device`; `slots` are batches at a time; the others are those of
    `data.request.DataLimits`.
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


@message
class IntakeRequest:
    """One job to be profiled, or, without a `spec`, a base to be looked at. `tokens_dir` gets the tenant's tokenized data."""

    key: str
    base_model: str  # directory or hub id
    tenant: str = ""
    spec: JobSpec | None = None
    tokens_dir: str = ""


INTAKE_MESSAGES: Codec[IntakeSettings | IntakeRequest] = Codec(IntakeSettings | IntakeRequest)
request_line = INTAKE_MESSAGES.encode


def parse_request(line: bytes) -> IntakeRequest:
    """What `request_line` gave. Raises ValueError."""
    found = INTAKE_MESSAGES.decode(line)
    if not isinstance(found, IntakeRequest):
        raise ValueError(f"{type(found).__name__} is no request")
    return found
