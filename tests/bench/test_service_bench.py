"""`bench.service` measures a server that works: every order is accepted, and its log has no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import service


def test_a_small_run_has_its_figures_and_a_clean_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(service.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{root / 'src'}:{root}")
    (tmp_path / "idle").mkdir()
    server = service.start(tmp_path / "idle", "bench.service_server", str(tmp_path / "idle"))
    try:
        server.wait()
        file = server.upload(service._ROW * 8)
        found = service.accept_with_clients(server, file, 4, 40)
        assert len(server.json("GET", "/v1/jobs?limit=100")["data"]) == found["jobs"] == 40
        assert 0 < found["cpu_seconds_per_1000"] < 1000 * server.cpu_seconds()
        assert 0 < found["commits_per_1000_jobs"] <= 1000
    finally:
        server.end()
    assert "Traceback" not in (tmp_path / "server.log").read_text()
