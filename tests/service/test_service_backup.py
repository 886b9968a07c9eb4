"""Backups: made while the server runs, whole, refused where anything is in the way; and servers made from them."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from tests.service.served import Served, config_of, serving
from tlora import durable, manifest
from tlora.errors import ConfigError, DataError
from tlora.service import backup
from tlora.service.backup import INDEX, back_up, restore


def filled(served: Served) -> tuple[str, str]:
    """A job that has succeeded, and one that has not begun."""
    done = served.submit("alice", name="done")
    served.wait("alice", done["id"], "succeeded")
    served.cluster.eager = False
    return done["id"], served.submit("alice", name="open")["id"]


def test_a_server_made_from_a_backup_has_its_keys_jobs_files_and_adapters(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as served:
        done, begun = filled(served)
        key = served.key("alice")
        files = tmp_path / "server" / "files"
        order = {"name": begun, "data": {"path": [{"path": f"{files}/a.jsonl"}], "eval_path": f"{files}/b"}, "adapter_path": None}
        durable.make_directory(tmp_path / "server" / "jobs" / begun)
        (tmp_path / "server" / "jobs" / begun / "job.json").write_text(json.dumps(order | {"seed": 3}))
        copied = back_up(served.opened.services.config, tmp_path / "copy")
        assert (copied.jobs, copied.files) == (2, 2)
        served.ask("alice", "POST", f"/v1/jobs/{begun}/cancel", 200)  # after the backup
    config = config_of(tmp_path / "restored")
    assert restore(config, tmp_path / "copy") == 1
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "restored", tmp_path / "restored" / "first-key")] == [0o700, 0o600]
    moved = json.loads((tmp_path / "restored" / "jobs" / begun / "job.json").read_text())
    there = tmp_path / "restored" / "files"  # a job resumes only if its order names its files where they are
    assert moved["data"] == {"path": [{"path": f"{there}/a.jsonl"}], "eval_path": f"{there}/b"} and moved["seed"] == 3
    with serving(tmp_path / "restored") as served:
        headers = {"X-API-Key": key}
        jobs = {job["id"]: job for job in served.client.get("/v1/jobs", headers=headers).json()["data"]}
        assert jobs[done]["status"] == "succeeded" and len(jobs) == 2
        assert served.client.get(f"/v1/jobs/{done}/adapter", headers=headers).status_code == 200
        served.keys["alice ()"] = key
        assert served.wait("alice", begun, "succeeded")["id"] == begun
        file = served.client.get("/v1/files", headers=headers).json()["data"][0]["id"]
        assert served.client.get(f"/v1/files/{file}/content", headers=headers).status_code == 200


def test_a_checkpoint_that_comes_and_goes_meanwhile_is_whole_or_not_there(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as served:
        done, _ = filled(served)
        directory = tmp_path / "server" / "jobs" / done
        ended = threading.Event()

        def train() -> None:
            step = 0
            while not ended.is_set():
                step += 1
                durable.write_directory(directory / f"checkpoint-{step}", lambda place, step=step: _write(place, step))
                durable.remove_checkpoints(directory, {f"checkpoint-{step}"})

        def _write(place: Path, step: int) -> None:
            for name in ("a", "b"):
                (place / name).write_bytes(bytes([step % 256]) * 100_000)

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            for number in range(5):
                back_up(served.opened.services.config, tmp_path / f"copy-{number}")
        finally:
            ended.set()
            trainer.join()
    for number in range(5):
        for checkpoint in (tmp_path / f"copy-{number}" / "jobs" / done).glob("checkpoint-*"):
            assert manifest.find_damage(checkpoint) is None


def test_nothing_is_replaced_and_nothing_is_made_where_no_store_is(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as served:
        config = served.opened.services.config
        back_up(config, tmp_path / "copy")
        with pytest.raises(ConfigError, match="is there already"):
            back_up(config, tmp_path / "copy")
        with pytest.raises(ConfigError, match="in the server's own directory"):
            back_up(config, tmp_path / "server" / "copy")
        with pytest.raises(ConfigError, match="is not empty, and nothing is overwritten"):
            restore(config, tmp_path / "copy")
    with pytest.raises(ConfigError, match="no server has its store there"):
        back_up(config_of(tmp_path / "nothing"), tmp_path / "more")
    elsewhere = tmp_path / "elsewhere"  # a server whose store is PostgreSQL's
    elsewhere.mkdir()
    (elsewhere / "store.json").write_text("{}")
    with pytest.raises(ConfigError, match="the store of its server lies at the database_url of its settings: give them with --config"):
        back_up(config_of(elsewhere), tmp_path / "more")
    with pytest.raises(ConfigError, match="is no backup"):
        restore(config_of(tmp_path / "nothing"), tmp_path / "server")
    for work in (lambda config: back_up(config, tmp_path / "more"), lambda config: restore(config, tmp_path / "copy")):
        with pytest.raises(ConfigError, match="database_url"):
            work(config_of(tmp_path / "nothing", database_url="postgresql://host/name"))
    assert not (tmp_path / "nothing").exists() and not (tmp_path / "more").exists()


def test_a_damaged_backup_restores_nothing(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as served:
        filled(served)
        back_up(served.opened.services.config, tmp_path / "copy")
    index = json.loads((tmp_path / "copy" / INDEX).read_text())
    names = [name for name in index["files"] if name.startswith("files/")]

    def try_with(change: str) -> str:
        broken = tmp_path / f"broken-{change}"
        shutil.copytree(tmp_path / "copy", broken)
        if change == "bytes":
            (broken / names[0]).write_bytes(b"x")
        elif change == "missing":
            (broken / names[0]).unlink()
        elif change == "outside":
            (broken / INDEX).write_text(json.dumps(index | {"files": {"../x": {"bytes": 1, "sha256": "0"}}}))
        else:
            (broken / INDEX).write_text(json.dumps(index | {"schema": "9999", "tlora": "99"}))
        with pytest.raises((DataError, ConfigError)) as caught:
            restore(config_of(tmp_path / "restored"), broken)
        assert not (tmp_path / "restored").exists() and not list(tmp_path.glob("tmp-*"))
        return str(caught.value)

    assert "is not what was backed up" in try_with("bytes")
    assert "is missing" in try_with("missing")
    assert "outside of itself" in try_with("outside")
    assert "made by tlora 99" in try_with("newer")


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with serving(tmp_path / "server") as served:
        filled(served)
        monkeypatch.setattr(backup, "_copy", full)
        with pytest.raises(DataError, match="No space left on device"):
            back_up(served.opened.services.config, tmp_path / "copy")
    assert not (tmp_path / "copy").exists() and not list(tmp_path.glob("tmp-*"))
