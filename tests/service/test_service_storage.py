"""What is made of a tenant's files counts in its storage, and goes with them: nothing of a deleted file stays, nothing in use is lost."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text, update
from starlette.testclient import TestClient

from tests.service.fake_cluster import TOKEN_BYTES, make_set
from tests.service.served import ROW, Served, config_of, serving, until
from tlora.cluster.local import LocalBackend, LocalMachine
from tlora.errors import ConfigError
from tlora.json_file import read_object
from tlora.service import storage
from tlora.service.backend_factory import BackendFactory
from tlora.service.database.store import default_url, open_store
from tlora.service.database.tables import files
from tlora.service.database.tables import jobs as job_rows
from tlora.service.housekeeping import Housekeeping
from tlora.service.machine import Devices
from tlora.service.server import open_server

BASE = Path(__file__).parents[2] / "demo" / "base"
KILLED = 9
MINUTES = 600.0  # after which a worker has heard that its job has ended


def sets(served: Served) -> list[Path]:
    """The tokenized sets of all tenants; asserts that nothing else lies there but their records."""
    found = sorted((served.opened.services.config.directory / "tokens").glob("*/*"))
    assert not [path for path in found if path.name.startswith("tmp-")], found
    names = {path.name for path in found}
    records = [read_object(path)["train"] for path in (served.opened.services.config.directory / "tokens").glob("*/known/*")]
    assert set(records) <= names, "a record of a set that is gone"
    return [path for path in found if path.name != "known"]


def sweep(served: Served, later: float = MINUTES) -> None:
    Housekeeping(served.opened.services).sweep(time.time() + later)


def tokens_of(served: Served, tenant: str = "alice") -> int:
    return served.ask(tenant, "GET", "/v1/storage", 200)["tokenized_bytes"]


def delete_as_before(served: Served, file: str) -> None:
    """A deletion that the store has and that nothing follows from yet, not even a refusal."""
    change = update(files).where(files.c.id == file).values(deleted=time.time())
    served.opened.services.writer.do(lambda connection: connection.execute(change))


def run(served: Served, file: str, tenant: str = "alice", **fields: Any) -> str:
    job = served.submit(tenant, file=file, **fields)["id"]
    served.wait(tenant, job, "succeeded")
    return job


def test_a_tokenized_set_goes_with_its_file_and_is_kept_and_counted_until_then(served: Served) -> None:
    one, two = served.upload("alice"), served.upload("alice", ROW * 9)
    run(served, one)
    run(served, two)
    both = {"file": one, "eval_file": two}
    run(served, one, data=both)
    run(served, one, tenant="alice", data=both, name="again")
    bobs = served.upload("bob")
    run(served, bobs, tenant="bob")
    assert len(sets(served)) == 3, "alice's two and bob's one: those of the third job are the same"
    sweep(served)
    assert len(sets(served)) == 3, "jobs that have ended may be cloned: reading their data again would be in vain"
    size = sum(file.stat().st_size for path in sets(served) for file in path.iterdir())
    assert tokens_of(served) + tokens_of(served, "bob") == size
    assert served.ask("alice", "GET", "/v1/storage", 200) | {"tokenized_bytes": 0} == {
        "object": "storage",
        "files_bytes": 17 * len(ROW),
        "tokenized_bytes": 0,
        "limit_bytes": served.opened.services.config.limits.storage_bytes,
    }
    served.ask("alice", "DELETE", f"/v1/files/{one}", 200)
    sweep(served)
    assert len(sets(served)) == 2 and tokens_of(served) == tokens_of(served, "bob"), (
        "the other file's, and another tenant's of equal content"
    )
    served.ask("alice", "DELETE", f"/v1/files/{two}", 200)
    sweep(served)
    assert [path.parent.name for path in sets(served)] == [served.ask("bob", "GET", "/v1/files")["data"] and sets(served)[0].parent.name]
    assert tokens_of(served) == 0 and tokens_of(served, "bob") > 0


@pytest.mark.parametrize("state", ["preparing", "queued", "running", "paused", "left a moment ago"])
def test_what_an_unfinished_job_needs_stays(tmp_path: Path, state: str) -> None:
    with serving(tmp_path / "server", eager=False, held=state == "preparing") as served:
        file = served.upload("alice")
        job = served.submit("alice", file=file)["id"]
        if state == "preparing":  # intake has put the set in place, and its answer is on its way
            (upload,) = (served.opened.services.config.directory / "files").glob("*/*")
            make_set(served.opened.services.config.directory / "tokens" / upload.parent.name, [str(upload)], 1024)
        else:
            served.wait("alice", job, "queued")
        if state == "running":
            until(lambda: served.cluster.placed.get(job))
            served.cluster.step(job, 1)
            served.wait("alice", job, "running")
        if state == "paused":
            served.ask("alice", "POST", f"/v1/jobs/{job}/pause", 200)
        if state == "left a moment ago":
            served.ask("alice", "POST", f"/v1/jobs/{job}/cancel", 200)
        delete_as_before(served, file)
        sweep(served, 0.0)
        assert len(sets(served)) == 1
        if state != "left a moment ago":
            served.ask("alice", "POST", f"/v1/jobs/{job}/cancel", 200)
        sweep(served)
        assert sets(served) == []


def test_a_job_resumes_after_a_restart_with_its_set_or_has_its_data_read_again(tmp_path: Path) -> None:
    with serving(tmp_path, eager=False) as served:
        file = served.upload("alice")
        jobs = [served.submit("alice", file=file, name=name)["id"] for name in ("a", "b")]
        for job in jobs:
            served.wait("alice", job, "queued")
        keys = served.keys
    with serving(tmp_path, eager=False) as served:
        served.keys = keys
        sweep(served)
        assert served.intakes[0].asked == ["base:base"] and len(sets(served)) == 1, "what was made before is used"
        (made,) = sets(served)
    made.rename(tmp_path / "away")
    with serving(tmp_path) as served:
        served.keys = keys
        for job in jobs:
            served.wait("alice", job, "succeeded")
        assert len(sets(served)) == 1
        sweep(served)
        assert len(sets(served)) == 1 and tokens_of(served) > TOKEN_BYTES


def test_sets_of_an_earlier_version_are_counted_and_cleared(tmp_path: Path) -> None:
    """It kept all sets for ever and recorded none of them."""
    with serving(tmp_path) as served:
        one, two = served.upload("alice"), served.upload("alice", ROW * 9)
        run(served, one)
        run(served, two)
        delete_as_before(served, one)
        assert len(sets(served)) == 2
        place = sets(served)[0].parent
        keys = served.keys
    (place / "tmp-123-dead").mkdir()
    (place / "tmp-123-dead" / "tokens.bin").write_bytes(b"half a set, whose process was killed")
    (place / "a1b2c3").mkdir()
    (place / "a1b2c3" / "meta.json").write_text("{")
    with serving(tmp_path) as served:
        served.keys = keys
        assert tokens_of(served) > 2 * TOKEN_BYTES
        sweep(served)
        assert (place / "tmp-123-dead").exists(), "something may be filling it"
        sweep(served, 4000.0)
        assert len(sets(served)) == 1 and TOKEN_BYTES < tokens_of(served) < 2 * TOKEN_BYTES
        assert "a sample in clear" in (sets(served)[0] / "meta.json").read_text()


def test_a_server_that_is_killed_while_it_removes_a_set_removes_it_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as served:
        one, two = served.upload("alice"), served.upload("alice", ROW * 9)
        run(served, one)
        run(served, two)
        keys = served.keys
    child = os.fork()
    if child == 0:
        try:
            with serving(tmp_path) as served:
                served.keys = keys
                served.ask("alice", "DELETE", f"/v1/files/{one}", 200)
                monkeypatch.setattr(storage.shutil, "rmtree", lambda *_, **__: os._exit(KILLED))
                sweep(served)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    assert len(list(tmp_path.glob("tokens/*/tmp-*"))) == 1, "it was killed in the middle"
    with serving(tmp_path) as served:
        served.keys = keys
        assert tokens_of(served) < 2 * TOKEN_BYTES
        sweep(served, 61.0)
        assert len(sets(served)) == 1


def test_where_storage_is_full_sets_that_no_job_needs_give_way_and_others_do_not(tmp_path: Path) -> None:
    with serving(tmp_path, eager=False, limits={"storage_bytes": 13_000}) as served:
        file = served.upload("alice")
        jobs = [served.submit("alice", file=file, data={"file": file, "max_length": length})["id"] for length in (100, 200)]
        for job in jobs:
            served.wait("alice", job, "queued")
        assert 2 * TOKEN_BYTES < tokens_of(served) < 11_000
        full = served.ask("alice", "POST", "/v1/files", 413, files={"file": ("b.jsonl", ROW * 100)}, data={"purpose": "fine-tune"})
        assert full["error"]["code"] == "storage_full"
        assert (
            f"their tokenized data has {tokens_of(served):,}; {100 * len(ROW):,} more would exceed its 13,000" in full["error"]["message"]
        )
        third = served.submit("alice", data={"file": file, "max_length": 300})["id"]
        reason = served.wait("alice", third, "failed")["reason"]
        assert "no room for its tokenized data" in reason and "Delete files that you do not need, or wait until jobs have ended" in reason
        served.opened.services.storage.look()  # as a sweep does, between the moment in which a set is put in place and intake's answer
        again = served.submit("alice", file=file, data={"file": file, "max_length": 300})["id"]
        assert "no room for its tokenized data" in served.wait("alice", again, "failed")["reason"], (
            "a set that was counted needs its room too"
        )
        same = served.submit("alice", file=file, data={"file": file, "max_length": 200})["id"]
        served.wait("alice", same, "queued")  # on a set that another job has, and that had room
        until(lambda: served.cluster.placed.get(jobs[0]))
        served.cluster.finish(jobs[0])
        served.wait("alice", jobs[0], "succeeded")
        sweep(served)
        assert 2 * TOKEN_BYTES < tokens_of(served) < 11_000, "one was beyond the limit, together with that of the job that failed"
        served.upload("alice", ROW * 100)
        sweep(served)
        query = select(job_rows.c.intake).where(job_rows.c.id == jobs[1])
        needed = served.opened.services.read(lambda connection: connection.execute(query).scalar_one())["train_set"]
        assert [str(path) for path in sets(served)] == [needed]
        served.ask("bob", "POST", "/v1/files", 200, files={"file": ("b.jsonl", ROW * 100)}, data={"purpose": "fine-tune"})


def test_what_the_store_has_no_record_of_is_listed_once_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A database that is older than its directory, as after an old copy was put back."""
    with serving(tmp_path) as served:
        run(served, served.upload("alice"))
        (tenant,) = (tmp_path / "files").iterdir()
        keys = served.keys
    old = (tmp_path / "tlora.db").read_bytes()
    with serving(tmp_path) as served:
        served.keys = keys
        job = run(served, served.upload("alice", ROW * 9))
    (tmp_path / "tlora.db").write_bytes(old)
    before = {path: path.read_bytes() for name in ("files", "jobs", "tokens") for path in (tmp_path / name).rglob("*") if path.is_file()}
    with caplog.at_level(logging.WARNING), serving(tmp_path) as served:
        keeper = Housekeeping(served.opened.services)
        for _ in range(3):
            keeper.sweep(time.time() + 4000.0)
    assert len(list(tenant.iterdir())) == 2 and (tmp_path / "jobs" / job).is_dir()
    assert {
        path: path.read_bytes() for name in ("files", "jobs", "tokens") for path in (tmp_path / name).rglob("*") if path.is_file()
    } == before
    lines = [record.getMessage() for record in caplog.records if "no record" in record.getMessage()]
    assert len(lines) == 1 and " and 2 more: the store has no record of them; they are left alone. Put the newest" in lines[0], lines


@pytest.mark.parametrize("emptied", [("files", "jobs", "job_files", "events"), ("jobs", "job_files", "events"), ("files", "job_files")])
def test_a_database_that_was_emptied_is_refused_and_nothing_is_deleted(tmp_path: Path, emptied: tuple[str, ...]) -> None:
    """Its row of the store's id is there still."""
    place = tmp_path / "server"
    with serving(place) as served:
        run(served, served.upload("alice"))
    with serving(place):  # which sees that there are files
        pass
    copy = (place / "tlora.db").read_bytes()
    before = {path: path.read_bytes() for name in ("files", "jobs", "tokens") for path in (place / name).rglob("*") if path.is_file()}
    engine = open_store(default_url(place))
    with engine.begin() as connection:
        for table in emptied:
            connection.execute(text(f"DELETE FROM {table}"))
    engine.dispose()
    with pytest.raises(ConfigError, match=r"has no \w+.*emptied, or is an old copy.*Put the database back"):
        open_server(config_of(place))
    assert {
        path: path.read_bytes() for name in ("files", "jobs", "tokens") for path in (place / name).rglob("*") if path.is_file()
    } == before
    (place / "tlora.db").write_bytes(copy)
    for path in place.glob("tlora.db-*"):
        path.unlink()
    with serving(place):  # the remedy
        pass


def test_an_upload_that_was_killed_before_its_row_does_not_refuse_the_start(tmp_path: Path) -> None:
    with serving(tmp_path):
        pass
    (tmp_path / "files" / "tenant-1").mkdir()
    (tmp_path / "files" / "tenant-1" / f"{'0' * 64}.jsonl").write_bytes(ROW)
    for _ in range(2):
        with serving(tmp_path):
            pass


def test_a_directory_of_a_job_that_cannot_be_removed_keeps_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path, retention={"ended_jobs_seconds": 1}) as served:
        job = run(served, served.upload("alice"))
        with monkeypatch.context() as patch:
            patch.setattr(storage.shutil, "rmtree", lambda *_, **__: None)
            sweep(served)
        served.ask("alice", "GET", f"/v1/jobs/{job}", 200)
        sweep(served)
        served.ask("alice", "GET", f"/v1/jobs/{job}", 404)
        assert not (tmp_path / "jobs" / job).exists()


@contextmanager
def training(directory: Path) -> Iterator[Served]:
    """A server whose data is read and trained on by real processes."""

    def make(bases: Mapping[str, str]) -> LocalBackend:
        return LocalBackend(LocalMachine((0,), "cpu", bases, directory, deterministic=True))

    opened = open_server(config_of(directory, base_models={"base": str(BASE)}), BackendFactory(Devices("cpu", (0,)), make))
    with TestClient(opened.app) as client:
        until(lambda: opened.services.live.fault is None)
        yield Served(opened, client, [], [])


@pytest.mark.slow
def test_nothing_of_a_deleted_file_stays_in_clear_after_real_training(tmp_path: Path) -> None:
    row = b'{"prompt": "the secret is Xylophonist", "completion": "and so is Xylophonist"}\n'
    directory = tmp_path / "server"
    with training(directory) as served:
        file = served.upload("alice", row * 20)
        order = {"data": {"file": file, "eval_size": 0.2}, "max_steps": 2, "r": 2, "eval_steps": 1, "save_steps": 1}
        job = served.submit("alice", **order)["id"]
        ended = served.wait("alice", job, "succeeded", "failed")
        assert ended["status"] == "succeeded", ended
        (made,) = sets(served)
        assert tokens_of(served) == sum(path.stat().st_size for path in made.iterdir())
        assert b"Xylophonist" in (made / "meta.json").read_bytes()
        sweep(served)
        assert sets(served) == [made]
        served.ask("alice", "DELETE", f"/v1/files/{file}", 200)
        sweep(served, 4000.0)
        assert sets(served) == [] and tokens_of(served) == 0
    left = [path for path in directory.rglob("*") if path.is_file() and b"Xylophonist" in path.read_bytes()]
    assert left == []
