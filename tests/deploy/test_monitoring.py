"""The dashboard, the alert rules and the log rotation: every metric in them is one that a server has and its reference names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.commands import DEPLOY
from tests.service.served import serving, until

DASHBOARD, ALERTS, LOGROTATE = DEPLOY / "grafana" / "tlora.json", DEPLOY / "prometheus" / "alerts.yaml", DEPLOY / "logrotate" / "tlora"
REFERENCE = DEPLOY.parent / "docs" / "reference" / "metrics.md"
NAME = re.compile(r"\btlora_[a-z_]+\b")
SELECTED = re.compile(r"\b(tlora_[a-z_]+)\{([^}]*)\}")


def panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]] + [rule["expr"] for rule in rules()]


def labels_of(reference: str) -> dict[str, set[str]]:
    """The metrics that the reference names, with their labels."""
    return {name: set(re.split(r",\s*", labels)) - {""} for name, labels in re.findall(r"`(tlora_[a-z_]+)(?:\{([^}]*)\})?`", reference)}


def test_metrics_and_labels_of_the_dashboard_and_the_alerts_are_in_the_reference() -> None:
    known = labels_of(REFERENCE.read_text(encoding="utf-8"))
    for expression in expressions():
        names = {name.removesuffix("_bucket") for name in NAME.findall(expression)}
        assert names <= known.keys(), expression
        for name, selectors in SELECTED.findall(expression):
            assert set(re.findall(r"(\w+)\s*=", selectors)) <= known[name.removesuffix("_bucket")], expression
        for by in re.findall(r"by \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", by)) <= {"le"} | set().union(*(known[name] for name in names)), expression


def test_what_grows_is_asked_of_counters() -> None:
    """A gauge of the store falls as ended jobs are removed, which `increase` takes for a restart and counts anew."""
    for expression in expressions():
        for name in re.findall(r"(?:rate|increase)\((tlora_[a-z_]+)", expression):
            assert name.endswith(("_total", "_bucket")), expression


def test_the_reference_has_what_a_server_says_and_nothing_else(tmp_path: Path) -> None:
    with serving(tmp_path, eager=False) as served:
        job = served.submit("alice")["id"]
        until(lambda: job in served.cluster.placed)
        served.cluster.step(job, 1)
        served.wait("alice", job, "running")
        admin = {"X-API-Key": served.key("root", "admin")}
        busy = re.compile(r"^tlora_gpus_busy\{[^}]*\} 1.0$", flags=re.MULTILINE)
        until(lambda: busy.search(served.client.get("/metrics", headers=admin).text))  # the picture of its GPUs comes after its status
        text = served.client.get("/metrics", headers=admin).text
    typed = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, flags=re.MULTILINE))
    said = {name for name in typed if name.startswith("tlora_") and not name.endswith("_created")}
    assert said == labels_of(REFERENCE.read_text(encoding="utf-8")).keys()
    assert re.search(r'^tlora_tenant_jobs\{status="running",tenant="alice"\} 1.0$', text, flags=re.MULTILINE), text
    assert re.search(r'^tlora_requests_total\{code="201",method="POST",tenant="alice"\} 1.0$', text, flags=re.MULTILINE), text
    (there,) = re.findall(r'^tlora_gpus\{host="([^"]+)"\} ', text, flags=re.MULTILINE)
    assert f'tlora_gpus_busy{{host="{there}"}} 1.0' in text


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    assert dashboard["schemaVersion"] >= 36 and dashboard["uid"] == "tlora"
    assert len({panel["id"] for panel in panels()}) == len(panels())
    cells = set[tuple[int, int]]()
    for panel in panels():
        place = panel["gridPos"]
        own = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert place["x"] + place["w"] <= 24 and not own & cells, panel["title"]
        cells |= own
        assert panel["datasource"]["uid"] == "${source}" and panel["targets"]


def test_the_alerts_are_rules_that_prometheus_reads() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"} and rule["labels"]["severity"] in ("critical", "warning")
        assert {"summary", "description"} == set(rule["annotations"]) and rule["expr"].count("(") == rule["expr"].count(")")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
    if shutil.which("promtool") is not None:
        subprocess.run(["promtool", "check", "rules", ALERTS], check=True)


def test_the_logs_of_workers_are_rotated_by_copying() -> None:
    """Their processes keep them open to append."""
    text = LOGROTATE.read_text(encoding="utf-8")
    assert "copytruncate" in text and re.search(r"^/var/lib/tlora/workers/\*\.log \{$", text, flags=re.MULTILINE)
    assert text.count("{") == text.count("}") == 1
