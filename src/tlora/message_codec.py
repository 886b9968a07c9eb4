"""Messages between processes: frozen dataclasses, each of which is one line of JSON. Nothing is ever unpickled.

A message's type stands in its field `kind`, the name of its class in lower case. What is read is checked against the annotations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

Message = TypeVar("Message")
_Class = TypeVar("_Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(cls: type[_Class]) -> type[_Class]:
    """A frozen dataclass that may be a member of a codec's union."""
    kind = cls.__name__.lower()
    cls.__annotations__["kind"] = Literal[kind]  # type: ignore[valid-type]
    setattr(cls, "kind", field(default=kind, kw_only=True, repr=False))  # noqa: B010
    return dataclass(frozen=True, slots=True)(cls)


class Codec(Generic[Message]):
    """Of a union of messages. Its schema is made when it is first used: a process that sends nothing does not wait for it."""

    def __init__(self, union: object) -> None:
        self._union = union

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        numbers = ConfigDict(ser_json_inf_nan="constants")  # a loss may be NaN, which JSON has no number for
        return TypeAdapter(cast("Any", Annotated[self._union, Field(discriminator="kind")]), config=numbers)

    def encode(self, one: Message) -> bytes:
        """With a line end. Of a pydantic model only what was set is said, so that what the person left open stays open. Any message has
        a line: a lone surrogate, which a reason may quote from a file, has no UTF-8 and becomes a question mark.
        """
        try:
            return self._adapter.dump_json(one, exclude_unset=True, warnings=False) + b"\n"
        except PydanticSerializationError:
            plain = self._adapter.dump_python(one, exclude_unset=True, warnings=False)
            return to_json(_encodable(plain), inf_nan_mode="constants") + b"\n"

    def decode(self, line: bytes) -> Message:
        """What `encode` gave. Raises ValueError, which does not show the line: it may hold a secret."""
        try:
            return self._adapter.validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(inner) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_encodable(inner) for inner in cast("list[Any]", value)]
    return value
