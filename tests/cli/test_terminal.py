"""Output where the stream's encoding lacks characters that we print."""

from __future__ import annotations

import io
import sys

import pytest

from tlora.cli.result_view import exit_code, print_end
from tlora.cli.terminal import open_console
from tlora.engine.results import Results
from tlora.store.job_result import JobResult


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_stream_without_unicode_gets_the_results_spelled_out(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)  # which some runners of tests set
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))
    results = Results({"\u4e2d\u6587": JobResult("\u4e2d\u6587", "done", train_loss_first=2.0, train_loss=1.0, path="out")})
    print_end(open_console(), results, [])
    sys.stdout.flush()
    told = raw.getvalue().decode(encoding)
    assert "2.0000 -> 1.0000" in told and "??" in told and exit_code(results.values(), None) == 0
