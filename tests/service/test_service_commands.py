"""The commands against a server on a socket: what they send, print and return."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.service.desk import Desk, at_desk
from tests.service.served import ROW, until
from tlora import manifest
from tlora.api import JobView
from tlora.cli import server_commands
from tlora.cli.commands import app
from tlora.client.connection import Connection
from tlora.client.jobs import Sight
from tlora.jobs_file import read_jobs_file


def test_a_jobs_file_is_submitted_as_it_trains(job_controller: Desk) -> None:
    found = job_controller("submit", "jobs.yaml", "--follow")
    names = [job.name for job in read_jobs_file("jobs.yaml").jobs]
    jobs = {job["name"]: job for job in job_controller.asked("/v1/jobs?limit=100")["data"]}
    assert sorted(jobs) == sorted(names) and len(names) == 6  # the names that `tlora train` gives the sweep's jobs
    assert all(f"{name}: accepted as {jobs[name]['id']}" in found.output for name in names)
    assert all(f"{name}: succeeded" in found.output for name in names)
    files = job_controller.asked("/v1/files")["data"]
    assert len(files) == 1  # two paths, one content
    assert jobs["sql"]["order"]["data"]["file"] == [{"file": files[0]["id"], "weight": None}] * 2
    assert (jobs["polite"]["order"]["r"], jobs["polite"]["order"]["max_steps"], jobs["polite"]["order"]["data"]["eval_size"]) == (4, 5, 2)
    grid = [job for name, job in jobs.items() if name.startswith("grid-")]
    assert len({job["sweep"] for job in grid}) == 1 and grid[0]["sweep"] is not None
    assert sorted((job["order"]["r"], job["order"]["learning_rate"]) for job in grid) == [(8, 5e-4), (8, 1e-3), (16, 5e-4), (16, 1e-3)]
    again = job_controller("submit", "jobs.yaml")
    assert "the server has it" in again.output and len(job_controller.asked("/v1/files")["data"]) == 1


def test_a_filter_that_finds_none_says_so(job_controller: Desk) -> None:
    assert job_controller("jobs").output.startswith("no jobs; `tlora submit")
    assert job_controller("jobs", "--name", "other").output == job_controller("jobs", "--status", "failed").output == "no such jobs\n"


def test_a_sweep_over_data_is_sent_job_by_job(job_controller: Desk, place: Path) -> None:
    (place / "other.jsonl").write_bytes(ROW * 9)
    (place / "jobs.yaml").write_text("base_model: base\njobs: [{name: mix, sweep: {data: [data.jsonl, other.jsonl], r: [2, 4]}}]\n")
    job_controller("submit", "jobs.yaml")
    assert {job["name"] for job in job_controller.asked("/v1/jobs")["data"]} == {job.name for job in read_jobs_file("jobs.yaml").jobs}


def test_what_the_server_cannot_take_is_one_message(job_controller: Desk, place: Path) -> None:
    (place / "template.jinja").write_text("x")
    (place / "empty.jsonl").write_text("")
    (place / "jobs.yaml").write_text(
        "base_model: base\njobs:\n  - {name: a, data: {path: data.jsonl, chat_template: template.jinja}}\n"
        "  - {name: b, data: org/set}\n  - {name: c, data: missing.jsonl}\n  - {name: d, data: empty.jsonl}\n"
        "  - {name: e, data: data.jsonl, adapter_path: elsewhere}\n  - {name: f, data: jobs.yaml}\n"
    )
    found = job_controller("submit", "jobs.yaml", status=2)
    for words in ("6 problems", "chat_template", "data set of the hub", "no such file", "the file is empty", "--start-from", "must end in"):
        assert words in found.output, (words, found.output)
    assert job_controller.asked("/v1/files")["data"] == []


def test_a_job_that_the_server_refuses_is_named(job_controller: Desk, place: Path) -> None:
    """With what became of the others."""
    lines = [
        f"  - {{name: {name}, data: data.jsonl, max_steps: 1, batch_size: 500, gpus: {gpus}}}\n"
        for name, gpus in (("fits", 1), ("wide", 500))
    ]
    for order, told in ((lines[::-1], "No job was accepted"), (lines, "1 job before it was accepted: submit the others alone")):
        (place / "jobs.yaml").write_text("base_model: base\njobs:\n" + "".join(order))
        found = job_controller("submit", "jobs.yaml", status=2)
        assert "error: wide: gpus: 500 is more than this server's" in found.output and told in found.output
    assert [job["name"] for job in job_controller.asked("/v1/jobs")["data"]] == ["fits"]


def test_a_base_that_is_not_served_and_one_under_its_directorys_name(job_controller: Desk, place: Path) -> None:
    found = job_controller("submit", "jobs.yaml", "--set", "base_model=other/model", status=2)
    assert "base_model other/model: the server does not serve it. It serves base" in found.output
    assert "tlora bases add other/model" in found.output
    (place / "base").mkdir()
    job_controller("submit", "jobs.yaml", "--set", "base_model=./base")
    job_controller("bases", "add", "more=some/model", tenant="operator")
    assert "more" in job_controller("bases", "list").output


def test_jobs_are_found_by_id_and_name_and_ambiguous_names_are_one_error(slow_desk: Desk) -> None:
    job_controller = slow_desk
    job_controller("submit", "jobs.yaml")
    job = job_controller.wait("polite", "queued")
    for name in ("polite", job["id"]):
        assert job["id"] in job_controller("show", name).output
    assert json.loads(job_controller("show", "polite", "--json").output)["id"] == job["id"]
    assert [one["name"] for one in json.loads(job_controller("jobs", "--json", "--name", "sql").output)] == ["sql"]
    job_controller("submit", "jobs.yaml")
    found = job_controller("pause", "polite", status=2)
    assert "2 jobs are named 'polite'" in found.output and job["id"] in found.output and "Give an id" in found.output
    for name in ("nothing", "job-" + "0" * 24, "a b"):
        assert "error: " in job_controller("show", name, status=2).output
    assert "there is no job 'polite'" in job_controller("show", "polite", tenant="bob", status=2).output


def test_of_several_jobs_of_a_name_the_only_one_that_can_be_changed_is_meant(slow_desk: Desk) -> None:
    job_controller = slow_desk
    for _ in range(2):
        job_controller("submit", "jobs.yaml")
        last = job_controller.asked("/v1/jobs?name=polite")["data"][0]["id"]
        job_controller.served.wait("alice", last, "queued")
        assert "polite: paused" in job_controller("pause", "polite").output
        assert "polite: queued" in job_controller("resume", "polite").output
        assert "polite: cancelled" in job_controller("cancel", "polite").output
        assert job_controller.asked(f"/v1/jobs/{last}")["status"] == "cancelled"
    assert "2 jobs are named 'polite'" in job_controller("cancel", "polite", status=2).output


def test_pause_resume_cancel_and_what_cannot_be(slow_desk: Desk) -> None:
    job_controller = slow_desk
    job_controller("submit", "jobs.yaml")
    job_controller.wait("polite", "queued")
    assert "polite: paused" in job_controller("pause", "polite").output
    assert "paused" in job_controller("queue").output
    assert "polite: queued" in job_controller("resume", "polite").output
    found = job_controller("cancel", "polite", "nothing", "sql", status=2)
    assert "polite: cancelled" in found.output and "sql: cancelled" in found.output and "no job 'nothing'" in found.output
    assert "has been cancelled and cannot be paused" in job_controller("pause", "polite", status=2).output
    assert job_controller("submit", "jobs.yaml", "--start-from", "polite", status=2).output.count("has no adapter") == 1


def test_a_file_that_is_refused_is_named_and_not_called_uploaded(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "long.jsonl").write_bytes(ROW * 9)
    (place / "several.yaml").write_text(
        "base_model: base\njobs: [{name: a, data: data.jsonl}, {name: b, data: long.jsonl}, {name: c, data: same.jsonl}]"
    )
    for desk in at_desk(tmp_path / "server", monkeypatch, limits={"file_rows": 8}):
        found = desk("submit", "several.yaml", status=2)
        assert f"error: {place / 'long.jsonl'}: the file has more than 8 rows; split it" in found.output
        assert "data.jsonl (" in found.output and "long.jsonl (" not in found.output


def test_the_key_that_the_docs_have_made_for_others_submits(job_controller: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "service.md").read_text()
    (command,) = re.findall(r"`tlora (keys create NAME --tenant TEAM[^`]*)`", text)
    key = job_controller(*command.split(), tenant="operator").stdout.strip()
    monkeypatch.setenv("TLORA_API_KEY", key)
    found = CliRunner().invoke(app, ["submit", "jobs.yaml"])
    assert found.exit_code == 0 and "polite: accepted as" in found.output, found.output
    narrow = job_controller("keys", "create", "narrow", "--scope", "submit", tenant="operator")
    assert "without read it sends orders and files, and sees none" in narrow.stderr


def test_a_job_starts_from_a_checkpoint_of_a_job_by_its_name(job_controller: Desk) -> None:
    job_controller("submit", "jobs.yaml", "--follow")
    polite = job_controller.wait("polite", "succeeded")["id"]
    refused = job_controller("submit", "jobs.yaml", "--start-from", "polite:checkpoint-3", status=2)
    assert f"start_from '{polite}:checkpoint-3': there is no such checkpoint now" in refused.output
    checkpoint = job_controller.served.opened.services.config.directory / "jobs" / polite / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / manifest.MANIFEST).write_text("{}")
    job_controller("clone", "sql", "--set", f"start_from={polite}:checkpoint-3", "--set", "name=mine")
    job_controller("submit", "jobs.yaml", "--start-from", "polite:checkpoint-3")
    jobs = job_controller.asked("/v1/jobs?limit=7")["data"]
    assert [job["order"]["start_from"] for job in jobs] == [f"{polite}:checkpoint-3"] * 7
    odd = job_controller("submit", "jobs.yaml", "--start-from", "polite:last", status=2)
    assert "'last' is no checkpoint of a job. Write polite:checkpoint-STEP, or polite alone" in odd.output


def test_a_clone_is_named_after_what_was_set(job_controller: Desk, place: Path) -> None:
    (place / "other.jsonl").write_bytes(ROW * 9)
    job_controller("submit", "jobs.yaml", "--follow")
    settings = ("learning_rate=1e-5", "max_length=32", "data=other.jsonl")
    found = job_controller("clone", "polite", *(part for setting in settings for part in ("--set", setting)), "--follow")
    made = job_controller.asked("/v1/jobs?limit=1")["data"][0]
    assert made["name"] == "polite-lr1e-5-len32-dataother" and "accepted as" in found.output
    old = job_controller.wait("polite", "succeeded")
    assert (made["order"]["learning_rate"], made["order"]["data"]["max_length"], made["order"]["max_steps"]) == (1e-5, 32, 5)
    assert made["order"]["data"]["file"] != old["order"]["data"]["file"] and made["cloned_from"] == old["id"]
    job_controller("clone", "polite", "--set", "name=plain", "--set", "chat_template_kwargs={enable_thinking: false}")
    assert job_controller.asked("/v1/jobs?limit=1")["data"][0]["order"]["data"]["chat_template_kwargs"] == {"enable_thinking": False}
    job_controller("clone", "polite", "--set", "name=mine", "--set", "start_from=polite")
    mine = job_controller.asked("/v1/jobs?limit=1")["data"][0]
    assert (mine["name"], mine["order"]["start_from"]) == ("mine", old["id"])
    for setting, words in (
        ("r", "must be key=value"),
        ("r=[", "not valid YAML"),
        ("rank=8", "rank"),
        ("data=3", "is not the path of a file"),
    ):
        assert words in job_controller("clone", "polite", "--set", setting, status=2).output


def test_an_adapter_is_downloaded_verified_and_replaces_nothing(job_controller: Desk, place: Path) -> None:
    job_controller("submit", "jobs.yaml", "--follow")
    job_controller("download", "polite", "sql", "--out", "adapters")
    found = place / "adapters" / "polite"
    assert (found / "adapter_model.safetensors").read_bytes().startswith(b"weights of job-")
    assert manifest.find_damage(found) is None and not list((place / "adapters").glob("tmp-*"))
    assert "is there already" in job_controller("download", "polite", "--out", "adapters", status=2).output
    job_controller("cancel", "polite", status=2)
    assert "Clone it to train it again" in job_controller("download", _cancelled(job_controller), status=2).output


def _cancelled(job_controller: Desk) -> str:
    served = job_controller.served
    served.cluster.eager = False
    job = served.ask("alice", "POST", "/v1/jobs", 201, json=served.order("alice", name="gone"))
    return served.ask("alice", "POST", f"/v1/jobs/{job['id']}/cancel", 200)["id"]


def test_a_failed_job_ends_the_watching_with_status_1(job_controller: Desk, place: Path) -> None:
    (place / "jobs.yaml").write_text("base_model: base\njobs: [{name: good, data: data.jsonl}, {name: bad, data: data.jsonl, seed: 666}]\n")
    found = job_controller("submit", "jobs.yaml", "--follow", status=1)
    assert "bad: failed, data.jsonl, line 3: not JSON" in found.output and "good: succeeded" in found.output
    assert "line 3: not JSON" in job_controller("jobs", "--status", "failed").output
    assert "line 3: not JSON" in job_controller("show", "bad", "--logs").output


def test_ctrl_c_leaves_the_jobs_running_and_says_so(slow_desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("tlora.client.jobs.watch", interrupted)
    found = slow_desk("submit", "jobs.yaml", "--follow", status=130)
    assert f"6 jobs go on at {slow_desk.url}" in found.output
    assert {job["status"] for job in slow_desk.asked("/v1/jobs")["data"]} <= {"preparing", "queued", "running"}
    assert "tlora show job-" in slow_desk("show", "polite", "--follow", status=130).output


@pytest.mark.parametrize(
    ("ended", "said", "status"),
    [
        (["succeeded"], "sql goes on at {url}; 1 of 2 ended. See: tlora show job-", 130),
        (["failed", "succeeded"], None, 1),
        (["succeeded", "succeeded"], None, 0),
    ],
)
def test_ctrl_c_counts_no_job_that_has_ended(
    slow_desk: Desk, place: Path, monkeypatch: pytest.MonkeyPatch, ended: list[Any], said: str | None, status: int
) -> None:
    (place / "jobs.yaml").write_text("base_model: base\njobs: [{name: polite, data: data.jsonl}, {name: sql, data: data.jsonl}]\n")

    def interrupted(connection: Connection, ids: list[str], **_: object) -> Iterator[Sight]:
        views = [connection.get(f"/v1/jobs/{job}", JobView) for job in ids]
        yield Sight((*(view.model_copy(update={"status": end}) for view, end in zip(views, ended, strict=False)), *views[len(ended) :]))
        raise KeyboardInterrupt

    monkeypatch.setattr("tlora.client.jobs.watch", interrupted)
    found = slow_desk("submit", "jobs.yaml", "--follow", status=status)
    assert said.format(url=slow_desk.url) in found.output if said else " on at " not in found.output


def test_keys_are_made_listed_and_revoked_by_the_server_and_in_its_store(job_controller: Desk) -> None:
    made = json.loads(job_controller("keys", "create", "ci", "--tenant", "carol", "--json", tenant="operator").output)
    assert made["key"].startswith("tml-") and made["scopes"] == ["read", "submit"]
    local = job_controller("keys", "create", "local", "--local", "--scope", "read").stdout.split()[0]
    assert local.startswith("tml-") and job_controller.served.client.get("/v1/jobs", headers={"X-API-Key": local}).status_code == 200
    listed = job_controller("keys", "list", "--local").output
    assert listed.count("key-") >= 4 and "carol" in listed and local not in listed
    assert "carol" in job_controller("keys", "list", tenant="operator").output
    assert "lacks the scope 'admin'" in job_controller("keys", "list", status=2).output
    job_controller("keys", "revoke", made["id"], tenant="operator")
    assert "revoked" in job_controller("keys", "list", tenant="operator").output
    for words in ("--local", ""):
        assert "error: " in job_controller("keys", "revoke", made["id"], *words.split(), tenant="operator", status=2).output
    assert "is no id of a key" in job_controller("keys", "revoke", "../x", tenant="operator", status=2).output


def test_login_saves_a_key_that_the_server_accepts(job_controller: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unknown there, or revoked" in job_controller("login", job_controller.url, stdin="tml-wrong-key\n", status=2).output
    assert "is no key" in job_controller("login", job_controller.url, stdin="\n", status=2).output
    assert "is saved in" in job_controller("login", job_controller.url, stdin=job_controller.served.key("alice") + "\n").output
    assert job_controller("login", job_controller.url, "--page", status=2).exit_code == 2
    for name in ("TLORA_URL", "TLORA_API_KEY"):
        monkeypatch.delenv(name)
    assert CliRunner().invoke(app, ["jobs"]).exit_code == 0


def test_drain_refuses_new_jobs_until_it_is_undone(job_controller: Desk) -> None:
    assert "refuses new jobs; 0 jobs left to end" in job_controller("drain", "--wait", tenant="operator").output
    assert "drained" in job_controller("submit", "jobs.yaml", status=2).output and "accepts no new jobs" in job_controller("queue").output
    assert "accepts jobs" in job_controller("drain", "--undo", tenant="operator").output
    job_controller("submit", "jobs.yaml")


def test_a_host_that_is_left_gets_no_jobs_until_it_is_taken_back(job_controller: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_commands, "_LOOK_SECONDS", 0.1)
    ended = job_controller("drain", "--host", "local", "--wait", tenant="operator").output
    assert "host local gets no new jobs, and has no job" in ended
    job_controller.tick_until(lambda: "drained" in job_controller("queue").output)  # its picture comes after it
    shown = " ".join(job_controller("queue").output.split())
    assert "host fails with CPU processes in use" in shown and "0-1 0 of 2 drained" in shown and "left" in shown and "free" not in shown
    job_controller("submit", "jobs.yaml")
    page = job_controller.served.client.get("/", headers={"X-API-Key": job_controller.served.key("alice")}).text
    assert "<h1>Hosts</h1>" in page and "drained" in page
    assert not job_controller.asked("/v1/cluster")["groups"], "it starts nothing"
    assert "unknown host 'xy'. There are local" in job_controller("drain", "--host", "xy", tenant="operator", status=2).output
    assert job_controller("drain", "--finish", tenant="operator", status=2) and job_controller("drain", "--host", "local", status=2)
    assert "host local gets jobs again" in job_controller("drain", "--host", "local", "--undo", tenant="operator").output
    until(lambda: all(job["status"] == "succeeded" for job in job_controller.asked("/v1/jobs?limit=100")["data"]))
    job_controller.tick_until(lambda: "host" not in job_controller("queue").output)


def test_a_drain_that_waits_leaves_anothers_undo_alone(slow_desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    job_controller = slow_desk
    job_controller("submit", "jobs.yaml")
    key = job_controller.served.key("operator", "read", "submit", "admin")

    def undo(_: float) -> None:
        job_controller.served.ask("operator", "PUT", "/v1/drain", 200, json={"draining": False}, headers={"Authorization": f"Bearer {key}"})

    monkeypatch.setattr(server_commands.time, "sleep", undo)
    ended = job_controller("drain", "--wait", tenant="operator", status=1)
    assert "accepts jobs again (the drain was undone, or the server was started anew); 6 jobs left to end" in ended.output
    assert not job_controller.asked("/v1/cluster")["draining"]

    def end_all(_: float) -> None:
        for job in job_controller.asked("/v1/jobs?limit=100")["data"]:
            job_controller.served.ask("alice", "POST", f"/v1/jobs/{job['id']}/cancel")

    monkeypatch.setattr(server_commands.time, "sleep", end_all)
    assert "refuses new jobs; 0 jobs left to end" in job_controller("drain", "--wait", tenant="operator").output


def test_the_queue_shows_groups_and_reasons(slow_desk: Desk) -> None:
    job_controller = slow_desk
    job_controller("submit", "jobs.yaml")
    job = job_controller.wait("polite", "queued")
    until(lambda: job["id"] in job_controller.served.cluster.placed)
    job_controller.served.cluster.step(job["id"], 3)
    job_controller.wait("polite", "running")
    job_controller.tick_until(lambda: "polite (3/10)" in job_controller("queue").output)
    assert "jobs that share it" in job_controller("queue").output and json.loads(job_controller("queue", "--json").output)["gpus"] == [0, 1]
    assert "of others" in job_controller("queue", tenant="bob").output
    whole = job_controller("queue", "--all-tenants", tenant="operator").output
    assert "alice/polite (3/10)" in whole and "alice/sql" in whole and "of others" not in whole
    assert "lacks the scope 'admin'" in job_controller("queue", "--all-tenants", status=2).output


def test_an_operator_lists_the_jobs_of_all_tenants(job_controller: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for tenant in ("alice", "bob"):
        job_controller("submit", "jobs.yaml", tenant=tenant)
    listed = job_controller("jobs", "--all-tenants", tenant="operator").output.splitlines()
    assert listed[0].split()[:3] == ["job", "tenant", "id"] and len(listed) == 1 + 2 * 6
    assert [line.split()[:2] for line in listed if line.startswith("polite ")] == [["polite", "bob"], ["polite", "alice"]]
    of_bob = json.loads(job_controller("jobs", "--tenant", "bob", "--name", "sql", "--json", tenant="operator").output)
    assert [(job["tenant"], job["name"]) for job in of_bob] == [("bob", "sql")]
    two = job_controller("jobs", "--all-tenants", "--limit", "2", tenant="operator")
    assert len(two.stdout.splitlines()) == 3 and "--all lists the others too" in two.stderr
    assert "there is no tenant 'carol'" in job_controller("jobs", "--tenant", "carol", tenant="operator", status=2).output
    for options in (["--all-tenants"], ["--tenant", "bob"], ["--tenant", "alice"]):
        assert "this key lacks the scope 'admin'" in job_controller("jobs", *options, status=2).output
    assert "tenant" not in job_controller("jobs", tenant="bob").output.splitlines()[0]


def test_an_operator_acts_on_a_job_of_another_tenant(job_controller: Desk) -> None:
    """By its name there; its events say who it was. A key without the scope admin is refused, also of its own tenant's name."""
    for tenant in ("alice", "bob"):
        job_controller("submit", "jobs.yaml", tenant=tenant)
    assert job_controller("pause", "sql", "--tenant", "bob", tenant="operator").output == "sql: paused\n"
    assert "paused by an operator" in job_controller("show", "sql", "--tenant", "bob", tenant="operator").output
    assert json.loads(job_controller("show", "sql", "--json").output)["status"] != "paused", "alice's is another"
    assert job_controller("resume", "sql", tenant="bob").output.startswith("sql: "), "its owner may let it go on"
    assert job_controller("cancel", "sql", "--tenant", "bob", tenant="operator").output == "sql: cancelled\n"
    shown = job_controller("show", "sql", tenant="bob").output
    assert "resumed by its owner" in shown and "cancelled by an operator" in shown
    assert "there is no tenant 'carol'" in job_controller("cancel", "sql", "--tenant", "carol", tenant="operator", status=2).output
    for tenant in ("alice", "bob"):
        assert "lacks the scope 'admin'" in job_controller("cancel", "polite", "--tenant", "bob", tenant=tenant, status=2).output
