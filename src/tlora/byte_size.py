"""Numbers of bytes in settings: with a unit (`22GiB`, `512 MB`) or without."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from tlora.adapter_shape import Words

_READER = TypeAdapter(ByteSize)


def _read(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return int(_READER.validate_python(re.sub(r"(?i)(?<=[\d\s])([kmgtpe]i)\s*$", r"\1B", value)))  # 22Gi, as Kubernetes writes it
    except (ValidationError, OverflowError):
        raise PydanticCustomError("byte_size", "not a number of bytes") from None


Bytes = Annotated[int, BeforeValidator(_read), Field(ge=1, le=10**18), Words("a number of bytes, such as 22GiB")]
