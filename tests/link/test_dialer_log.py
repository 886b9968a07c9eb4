"""A worker whose log cannot be written, as on a full disk, dials again all the same."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.full_stream import FullStream
from tlora.errors import ConfigError
from tlora.link import dialer
from tlora.link.authentication import AdmissionError
from tlora.link.dialer import Dialer


def test_what_cannot_be_said_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception] = [ConfigError("the place is another's"), AdmissionError("no more")]
    ended: list[str] = []

    class Client:
        def be_refused(self, reason: str) -> None:
            ended.append(reason)

    def dial(*_: object) -> None:
        raise answers.pop(0)

    monkeypatch.setattr(dialer, "dial", dial)
    client: Any = Client()
    made = Dialer(None, client, 600.0)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "stderr", FullStream())
    made._dial(None)
    assert not answers and len(ended) == 1 and "no more" in ended[0]
