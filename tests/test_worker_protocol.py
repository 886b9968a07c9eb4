"""Every report has a line, whatever its reason quotes: a sender that raises would leave its worker silent for ever."""

from __future__ import annotations

import math

from tlora.worker_protocol import Envelope, Failed, Finished, parse_worker_line, worker_line


def test_a_reason_with_a_lone_surrogate_has_a_line() -> None:
    """Data files can have them, in JSON's escapes, and UTF-8 cannot."""
    said = Envelope(3, 1, Failed("a", "role '\ud800' is none: é", 7))
    assert parse_worker_line(worker_line(said)) == Envelope(3, 1, Failed("a", "role '?' is none: é", 7))


def test_a_result_with_anything_in_it_has_a_line() -> None:
    said = Envelope(3, 1, Finished("a", {"loss": math.nan, "settings": {"\udc80": ["\udc81", 1, None]}}, 7))
    found = parse_worker_line(worker_line(said))
    assert isinstance(found, Envelope) and isinstance(found.report, Finished)
    loss = found.report.result.pop("loss")
    assert (loss is None or math.isnan(loss)) and found.report.result == {"settings": {"?": ["?", 1, None]}}
