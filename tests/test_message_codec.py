"""Messages as lines: what is sent is what is read, to the last bit, and what is no such message is refused."""

from __future__ import annotations

import math
import struct
from dataclasses import FrozenInstanceError, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.job import RunSpec
from tlora.message_codec import Codec, message


@message
class Told:
    rank: int
    values: tuple[tuple[float, ...], ...]
    names: frozenset[str] = frozenset()
    secret: str = field(default="", repr=False)


@message
class Order:
    run: RunSpec


@message
class Letter:
    inside: Told | Order


CODEC: Codec[Told | Order | Letter] = Codec(Told | Order | Letter)
RUN = RunSpec.model_validate({"base_model": "base", "jobs": [{"name": "a", "data": "a.jsonl", "max_length": 64}]})


def bits(told: object) -> list[bytes]:
    assert isinstance(told, Told)
    return [struct.pack("<d", math.nan if math.isnan(value) else value) for row in told.values for value in row]


@given(
    st.integers(),
    st.lists(st.lists(st.floats(), max_size=4), max_size=3),
    st.frozensets(st.text(max_size=4), max_size=3),
    st.text(max_size=8),
)
def test_what_is_sent_is_what_is_read(rank: int, values: list[list[float]], names: frozenset[str], secret: str) -> None:
    told = Told(rank, tuple(map(tuple, values)), names, secret)
    line = CODEC.encode(told)
    found = CODEC.decode(line)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert isinstance(found, Told) and (found.rank, found.names, found.secret) == (rank, names, secret) and bits(found) == bits(told)


def test_a_person_s_order_says_no_more_than_was_set() -> None:
    found = CODEC.decode(CODEC.encode(Letter(Order(RUN))))
    assert found == Letter(Order(RUN))
    assert found.inside.run.jobs[0].model_fields_set == RUN.jobs[0].model_fields_set  # type: ignore[union-attr]
    assert b"learning_rate" not in CODEC.encode(Order(RUN))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "EOF"),
        (b"no message\n", "Invalid JSON"),
        (CODEC.encode(Told(1, ()))[:-2], "Invalid JSON"),
        (b'{"rank":1,"values":[]}\n', "kind"),
        (b'{"kind":"telling","rank":1,"values":[]}\n', "kind"),
        (b'{"kind":"told","rank":1}\n', "told.values: Field required"),
        (b'{"kind":"told","rank":"one","values":[]}\n', "told.rank"),
        (b'{"kind":"order","run":{"base_model":"b","jobs":[]}}\n', "order.run.jobs"),
        (b"\x80\x04\x95cposix\nsystem\n", "Invalid JSON"),
    ],
)
def test_what_is_no_message_is_refused(line: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CODEC.decode(line)


def test_a_refusal_does_not_show_the_line() -> None:
    with pytest.raises(ValueError, match="rank") as refused:
        CODEC.decode(b'{"kind":"told","rank":"tlw-secret","values":[],"secret":"tlw-secret"}\n')
    assert "tlw-secret" not in str(refused.value)


def test_a_message_is_frozen_and_shows_its_fields_alone() -> None:
    told = Told(1, (), secret="x")
    assert repr(told) == "Told(rank=1, values=(), names=frozenset())" and Told.__match_args__ == ("rank", "values", "names", "secret")
    with pytest.raises(FrozenInstanceError):
        told.rank = 2  # type: ignore[misc]
