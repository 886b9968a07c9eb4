"""A job's way through the API: ordered, run, paused, resumed, cancelled, cloned, swept, and what comes out of it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.service.served import ROW, Served, serving, until
from tlora.service.database import file_rows, job_rows


def test_a_job_is_accepted_trained_and_its_adapter_downloaded(served: Served) -> None:
    made = served.submit("alice", r=8)
    assert (made["status"], made["order"]["r"], made["waiting_for"]) == ("preparing", 8, "its data is being read")
    done = served.wait("alice", made["id"], "succeeded")
    assert done["steps"] == 10 and done["total_steps"] == 10 and done["result"]["train_loss"] == 0.5
    assert "path" not in done["result"]
    kinds = [event["kind"] for event in served.ask("alice", "GET", f"/v1/jobs/{made['id']}/events")["data"]]
    assert kinds == ["created", "queued", "running", "succeeded"]
    answer = served.ask("alice", "GET", f"/v1/jobs/{made['id']}/adapter", 200)
    assert len(answer.content) == int(answer.headers["content-length"])
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        assert archive.getnames() == ["one/adapter_config.json", "one/adapter_model.safetensors", "one/MANIFEST.json"]
        found = archive.extractfile("one/adapter_model.safetensors")
        assert found is not None and found.read() == b"weights of " + made["id"].encode()
    metrics = served.ask("alice", "GET", f"/v1/jobs/{made['id']}/metrics", 200)
    assert [row["loss"] for row in metrics["data"]] == [2.5, 1.5]  # the torn third row comes later
    assert served.ask("alice", "GET", f"/v1/jobs/{made['id']}/metrics", 200, params={"offset": metrics["next_offset"]})["data"] == []
    assert any("trained 10 steps" in line for line in served.ask("alice", "GET", f"/v1/jobs/{made['id']}/logs", 200)["lines"])


def test_the_log_of_a_job_of_many_events_has_the_last_ones(served: Served) -> None:
    services, job = served.opened.services, served.submit("alice")["id"]
    served.wait("alice", job, "succeeded")
    tenant = services.read(lambda connection: job_rows.row_of(connection, job).tenant)
    told = [(tenant, job, "queued", f"turn {number} of many") for number in range(1001)]
    services.writer.do(lambda connection: job_rows.add_events(connection, told))
    lines = served.ask("alice", "GET", f"/v1/jobs/{job}/logs", 200)["lines"]
    assert [line for line in lines if line.startswith("queued: turn")] == [f"queued: turn {number} of many" for number in range(1, 1001)]


def test_a_jobs_logs_have_the_tenants_names_of_files_and_no_paths_of_the_server(served: Served) -> None:
    made = served.submit("alice")
    services, job, file = served.opened.services, made["id"], made["order"]["data"]["file"]
    directory, name = services.config.directory, served.ask("alice", "GET", f"/v1/files/{file}", 200)["filename"]
    tenant = services.read(lambda connection: job_rows.row_of(connection, job).tenant)
    path = services.read(lambda connection: file_rows.paths_of(connection, directory, tenant, [file]))[file]
    (directory / "workers").mkdir(exist_ok=True)
    (directory / "workers" / "gpu0.log").write_text(f"{job}: r is 4, as in {directory}/jobs/job-0\n{job}: {path}: 3 rows\n")
    lines = served.ask("alice", "GET", f"/v1/jobs/{job}/logs", 200)["lines"]
    assert f"{job}: r is 4, as in /jobs/job-0" in lines and f"{job}: {name}: 3 rows" in lines
    assert str(directory) not in "".join(lines)


def test_bad_data_fails_that_job_with_the_tenants_own_file_name_and_row(served: Served) -> None:
    failed = served.wait("alice", served.submit("alice", seed=666)["id"], "failed")
    assert failed["reason"] == "data.jsonl, line 3: not JSON; correct it"


def test_a_running_job_has_its_losses(served_slowly: Served) -> None:
    """Alone and in a list, from the newest rows of its metrics; after its end those of its result."""
    job = served_slowly.submit("alice")["id"]
    until(lambda: job in served_slowly.cluster.placed)
    served_slowly.cluster.step(job, 3)
    assert served_slowly.wait("alice", job, "running")["train_loss"] is None  # nothing is logged
    metrics = served_slowly.opened.services.config.directory / "jobs" / job / "metrics.jsonl"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_text(
        '{"step": 0, "eval_loss": 3.0}\n{"step": 1, "loss": 2.0}\n{"step": 1, "eval_loss": 1.5}\n{"step": 2, "loss": 1.0}\n{"st'
    )
    (listed,) = served_slowly.ask("alice", "GET", "/v1/jobs")["data"]
    for shown in (listed, served_slowly.ask("alice", "GET", f"/v1/jobs/{job}")):
        assert (shown["train_loss"], shown["eval_loss"]) == (1.5, 1.5)
    served_slowly.cluster.finish(job)
    assert served_slowly.wait("alice", job, "succeeded")["train_loss"] == 0.5
    stopped = served_slowly.submit("alice")["id"]
    until(lambda: stopped in served_slowly.cluster.placed)
    served_slowly.cluster.step(stopped, 3)
    served_slowly.wait("alice", stopped, "running")
    metrics = metrics.parent.with_name(stopped) / "metrics.jsonl"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_text('{"step": 1, "loss": 2.0}\n')
    served_slowly.ask("alice", "POST", f"/v1/jobs/{stopped}/cancel", 200)
    assert served_slowly.wait("alice", stopped, "cancelled")["train_loss"] == 2.0, "it leaves no result"


def test_pause_resume_and_cancel(served_slowly: Served) -> None:
    ids = [served_slowly.submit("alice")["id"] for _ in range(2)]
    for job in ids:
        until(lambda job=job: job in served_slowly.cluster.placed)
        served_slowly.cluster.step(job, 3)
        served_slowly.wait("alice", job, "running")
    paused = served_slowly.ask("alice", "POST", f"/v1/jobs/{ids[0]}/pause", 200)
    assert (paused["status"], paused["waiting_for"]) == ("paused", "paused")
    assert served_slowly.ask("alice", "POST", f"/v1/jobs/{ids[0]}/pause", 200)["status"] == "paused"
    started = paused["started_at"]
    assert ("hold", ids[0]) in served_slowly.cluster.asked
    assert served_slowly.ask("alice", "POST", f"/v1/jobs/{ids[0]}/resume", 200)["status"] == "queued"
    assert ("release", ids[0]) in served_slowly.cluster.asked
    assert served_slowly.ask("alice", "POST", f"/v1/jobs/{ids[1]}/cancel", 200)["status"] == "cancelled"
    assert ("cancel", ids[1]) in served_slowly.cluster.asked
    for verb in ("pause", "resume"):
        refused = served_slowly.ask("alice", "POST", f"/v1/jobs/{ids[1]}/{verb}", 409)
        assert refused["error"]["code"] == "wrong_state"
    until(lambda: ids[0] in served_slowly.cluster.placed)
    served_slowly.cluster.step(ids[0], 4)
    assert served_slowly.wait("alice", ids[0], "running")["started_at"] == started, "it began but once"
    served_slowly.cluster.finish(ids[0])
    assert served_slowly.wait("alice", ids[0], "succeeded")["steps"] == 10
    assert served_slowly.ask("alice", "POST", f"/v1/jobs/{ids[0]}/cancel", 409)["error"]["code"] == "wrong_state"


def test_a_job_that_is_paused_or_cancelled_while_its_data_is_read(tmp_path: Path) -> None:
    with serving(tmp_path, eager=False, held=True) as served:
        ids = [served.submit("alice")["id"] for _ in range(2)]
        assert served.ask("alice", "POST", f"/v1/jobs/{ids[0]}/pause", 200)["status"] == "paused"
        assert served.ask("alice", "POST", f"/v1/jobs/{ids[1]}/cancel", 200)["status"] == "cancelled"
        served.intakes[0].let_go()
        until(lambda: ("hold", ids[0]) in served.cluster.asked)
        assert served.cluster.submitted == [ids[0]]
        assert served.ask("alice", "POST", f"/v1/jobs/{ids[0]}/resume", 200)["status"] == "queued"


def test_data_without_room_on_the_disk_is_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.service.order_reader._ROOM_SECONDS", 0.05)
    with serving(tmp_path / "server", held=True) as served:
        jobs = [served.submit("alice", name=name)["id"] for name in ("waits", "goes")]
        intake = served.intakes[0]
        until(lambda: set(jobs) <= set(intake.asked))
        for _ in range(3):
            asked = len(intake.asked)
            for job in jobs:
                intake.tell({"key": job, "problem": "no room", "disk_full": True})
            until(lambda asked=asked: len(intake.asked) == asked + 2)
        found = served.ask("alice", "GET", f"/v1/jobs/{jobs[0]}")
        assert found["status"] == "preparing"
        until(lambda: "room on the server's disk" in served.ask("alice", "GET", f"/v1/jobs/{jobs[0]}")["waiting_for"])
        served.ask("alice", "POST", f"/v1/jobs/{jobs[0]}/cancel", 200)
        intake.tell({"key": jobs[0], "problem": "no room", "disk_full": True})
        intake.let_go()
        served.wait("alice", jobs[1], "succeeded")
        assert intake.asked.count(jobs[0]) == 4, "one that was cancelled is not asked for again"


def test_a_worker_that_fails_a_job_tells_why_without_a_path_of_the_server(served_slowly: Served) -> None:
    job = served_slowly.submit("alice")["id"]
    until(lambda: job in served_slowly.cluster.placed)
    served_slowly.cluster.fail(job, f"{served_slowly.opened.services.config.directory}/jobs/{job} is damaged")
    assert served_slowly.wait("alice", job, "failed")["reason"] == f"jobs/{job} is damaged"


def test_a_clone_has_the_same_order_but_for_what_is_set(served: Served) -> None:
    first = served.submit("alice", r=8, learning_rate=1e-3)
    changes = {"set": {"learning_rate": 5e-4, "data": {"max_length": 64}}}
    clone = served.ask("alice", "POST", f"/v1/jobs/{first['id']}/clone", 201, json=changes)
    assert clone["cloned_from"] == first["id"] and clone["id"] != first["id"]
    differ = {key for key in clone["order"] if clone["order"][key] != first["order"][key]}
    assert differ == {"learning_rate", "data"} and clone["order"]["data"]["max_length"] == 64
    refused = served.ask("alice", "POST", f"/v1/jobs/{first['id']}/clone", 400, json={"set": {"learning_rate": -1}})
    assert "learning_rate" in refused["error"]["message"]
    assert served.ask("alice", "POST", f"/v1/jobs/{first['id']}/clone", 400, json={"set": {"data": "x"}})["error"]["code"] == "refused"


def test_a_sweep_is_all_its_jobs_or_none(served: Served) -> None:
    body = {"job": served.order("alice", name="s"), "sweep": {"r": [8, 16], "learning_rate": [1e-4, 3e-4, 1e-3]}}
    made = served.ask("alice", "POST", "/v1/sweeps", 201, json=body)
    assert [job["name"] for job in made["data"]][:2] == ["s-r8-lr1e-4", "s-r8-lr3e-4"] and len(made["data"]) == 6
    assert {job["sweep"] for job in made["data"]} == {made["id"]}
    for bad, said in (
        ({"r": [8, 0]}, "r"),
        ({"nonsense": [1]}, "unknown key"),
        ({"r": list(range(1, 200)), "seed": list(range(100))}, "more than 1000"),
    ):
        refused = served.ask("alice", "POST", "/v1/sweeps", 400, json=body | {"sweep": bad})
        assert said in refused["error"]["message"]
    swept = served.ask("alice", "POST", "/v1/sweeps", 201, json=body | {"sweep": {"data": [body["job"]["data"]["file"]]}})
    assert swept["data"][0]["order"]["data"]["file"] == body["job"]["data"]["file"]
    assert len(served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 100})["data"]) == 7


def test_pages_of_jobs_are_the_newest_first_without_gaps(served: Served) -> None:
    file = served.upload("alice")
    ids = [served.submit("alice", file=file, name=f"j{number}")["id"] for number in range(7)]
    found: list[str] = []
    cursor = None
    while True:
        page = served.ask("alice", "GET", "/v1/jobs", 200, params={"limit": 3} | ({"cursor": cursor} if cursor else {}))
        found += [job["id"] for job in page["data"]]
        cursor = page["next_cursor"]
        assert page["has_more"] == (cursor is not None)
        if cursor is None:
            break
    assert found == ids[::-1]
    assert [job["name"] for job in served.ask("alice", "GET", "/v1/jobs", 200, params={"name": "j3"})["data"]] == ["j3"]
    assert served.ask("alice", "GET", "/v1/jobs", 200, params={"status": "failed"})["data"] == []


def test_a_job_starts_from_another_ones_adapter(served: Served) -> None:
    first = served.submit("alice")
    served.wait("alice", first["id"], "succeeded")
    second = served.submit("alice", start_from=first["id"])
    served.wait("alice", second["id"], "succeeded")
    assert served.ask("alice", "POST", "/v1/jobs", 404, json=served.order("alice", start_from="job-0"))["error"]["code"] == "not_found"
    failed = served.submit("alice", seed=666)
    served.wait("alice", failed["id"], "failed")
    refused = served.ask("alice", "POST", "/v1/jobs", 409, json=served.order("alice", start_from=failed["id"]))
    assert refused["error"]["code"] == "no_adapter"
    served.ask("operator", "POST", "/v1/bases", 201, json={"name": "other", "path": "x"}, headers=_admin(served))
    refused = served.ask("alice", "POST", "/v1/jobs", 409, json=served.order("alice", start_from=first["id"], base_model="other"))
    assert refused["error"]["code"] == "other_base"


def _admin(served: Served) -> dict[str, str]:
    return {"Authorization": f"Bearer {served.key('operator', 'admin', 'read', 'submit')}"}


BAD_ORDERS: list[tuple[dict[str, Any], int, str]] = [
    ({"base_model": "nowhere"}, 400, "There are: base"),
    ({"r": 300}, 422, "less than or equal to 256"),
    ({"r": 0}, 422, "greater than or equal to 1"),
    ({"gpus": 3, "batch_size": 4}, 400, "more than this server's 2. Set at most 2"),
    ({"gpus": 99}, 400, "more than batch_size"),
    ({"lora_rank": 8}, 422, "did you mean 'r'"),
    ({"max_length": 8}, 422, "it belongs in data"),
    ({"chat_template": "{{ x.__class__ }}"}, 422, "unknown key"),
    ({"adapter_path": "/etc"}, 422, "unknown key"),
    ({"data": {"file": "file-0"}}, 404, "there is no file"),
    ({"data": {"file": "/etc/passwd"}}, 422, "pattern"),
    ({"data": {"path": "x.jsonl", "file": "file-0"}}, 422, "data.path: unknown key"),
    ({"early_stopping_patience": 2}, 400, "needs evaluation data"),
    ({"target_modules": ["(a+)+$"]}, 422, "pattern"),
    ({"learning_rate": "fast"}, 422, "learning_rate"),
    ({"name": ""}, 422, "name"),
]


def test_bad_orders_get_one_clear_refusal_and_nothing_is_kept(served: Served) -> None:
    order = served.order("alice")
    for fields, status, said in BAD_ORDERS:
        refused = served.ask("alice", "POST", "/v1/jobs", status, json=order | fields)
        assert said in refused["error"]["message"], (fields, refused)
        assert served.ask("alice", "GET", "/v1/jobs", 200)["data"] == [], fields


def test_limits_of_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, eager=False, limits={"rank": 16, "open_jobs": 2, "storage_bytes": 6000, "sweep_jobs": 3}) as served:
        file = served.upload("alice", ROW * 8)
        assert served.ask("alice", "POST", "/v1/jobs", 400, json=served.order("alice", file, r=32))["error"]["code"] == "rank_too_large"
        full = served.ask("alice", "POST", "/v1/files", 413, files={"file": ("b.jsonl", ROW * 170)}, data={"purpose": "fine-tune"})
        assert full["error"]["code"] == "storage_full"
        assert full["error"]["message"].endswith("Delete files that you do not need, or wait until jobs have ended")
        full = served.ask("alice", "POST", "/v1/files", 413, files={"file": ("b.jsonl", ROW * 200)}, data={"purpose": "fine-tune"})
        assert "That alone is more than all of it: send less, or ask the operator" in full["error"]["message"]
        wide = {"job": served.order("alice", file), "sweep": {"r": [1, 2, 3, 4]}}
        assert "more than 3" in served.ask("alice", "POST", "/v1/sweeps", 400, json=wide)["error"]["message"]
        many = {"job": served.order("alice", file), "sweep": {"r": [1, 2, 3]}}
        refused = served.ask("alice", "POST", "/v1/sweeps", 429, json=many)["error"]
        assert refused["code"] == "too_many_jobs" and refused["message"].endswith("3 more would exceed its 2. Submit 2 at most")
        assert served.ask("alice", "GET", "/v1/jobs", 200)["data"] == []
        for _ in range(2):
            served.ask("alice", "POST", "/v1/jobs", 201, json=served.order("alice", file))
        refused = served.ask("alice", "POST", "/v1/jobs", 429, json=served.order("alice", file))["error"]
        assert refused["code"] == "too_many_jobs" and refused["message"].endswith("1 more would exceed its 2. Wait for some, or cancel")
        served.submit("bob")  # another tenant has its own


def test_the_cluster_shows_own_jobs_and_counts_others(served_slowly: Served) -> None:
    mine, other = served_slowly.submit("alice")["id"], served_slowly.submit("bob")["id"]
    until(lambda: {mine, other} <= served_slowly.cluster.placed.keys())

    def look() -> dict[str, object] | None:
        served_slowly.cluster.tick()
        found = served_slowly.ask("alice", "GET", "/v1/cluster", 200)
        shown = [job for group in found["groups"] for job in group["jobs"]]
        others = sum(group["other_jobs"] for group in found["groups"])
        return found if shown == [mine] and others == 1 else None

    found = until(look)
    assert other not in str(found) and found["others_waiting"] == 0, "who waits for its group's base is in that group"
    for job in (mine, other):
        served_slowly.cluster.step(job, 1)
    assert other not in str(until(look))


def test_learned_speeds_survive_a_restart(tmp_path: Path) -> None:
    """Steps took ten seconds each: the next server predicts what this one did."""
    learned: list[object] = []
    for _ in range(2):
        with serving(tmp_path / "server", eager=False) as served:
            job = served.submit("alice")["id"]
            until(lambda served=served, job=job: job in served.cluster.placed)
            scheduler = served.opened.controller.scheduler
            assert scheduler is not None
            if learned:
                assert scheduler.state.cost.learned("base", 0.0).corrections == learned[0] != (1.0, 1.0, 1.0)
                continue
            for steps in range(1, 40):
                served.cluster.step(job, steps, 10.0)
            served.wait("alice", job, "running")
            until(lambda scheduler=scheduler: scheduler.state.cost.times_corrected > 2)
            served.cluster.finish(job)
            served.wait("alice", job, "succeeded")
            learned.append(scheduler.state.cost.learned("base", 0.0).corrections)
