"""A base that lies in the hub's cache is read from there: the hub is asked once, for the commit, and may be out of reach."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from tlora.data import base_files
from tlora.data.base_files import located, refuse_mistyped, snapshot
from tlora.data.tokenizer import load_tokenizer
from tlora.errors import ModelError
from tlora.supermodel.load import find_directory, load_config, load_weights, outline, pin_revision

DEMO = Path(__file__).parents[2] / "demo" / "base"
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The demo's base as org/name in a hub's cache, which `main` named when the hub was last asked."""
    directory = tmp_path / "models--org--name"
    for commit in (OLD, NEW):
        shutil.copytree(DEMO, directory / "snapshots" / commit)
    (directory / "refs").mkdir()
    (directory / "refs" / "main").write_text(OLD)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    base_files.ask_commit.cache_clear()
    yield directory
    base_files.ask_commit.cache_clear()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """Begins a hub that answers each request with a status, and with the newest commit; what it is asked."""
    asked: list[str] = []
    servers: list[ThreadingHTTPServer] = []

    def begin(status: int) -> list[str]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                body = json.dumps({"id": "org/name", "sha": NEW}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(base_files, "_ASK_SECONDS", 600.0)  # of a busy machine; how long is waited is not what is looked at here
        return asked

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


def read_all(base_model: str) -> None:
    """All that a launch reads of its base."""
    find_directory(base_model), load_config(base_model), outline(base_model), load_weights(base_model), load_tokenizer(base_model)


def test_the_hub_is_asked_once_for_the_commit(cached: Path, hub: Callable[[int], list[str]]) -> None:
    asked = hub(200)
    read_all("org/name")
    assert find_directory("org/name") == cached / "snapshots" / NEW and pin_revision("org/name") == f"org/name@{NEW}"
    about = [path for path in asked if "org/name" in path]  # the library has questions of its own
    assert about == ["/api/models/org/name/revision/main"]
    read_all(f"org/name@{OLD}")
    assert find_directory(f"org/name@{OLD}") == cached / "snapshots" / OLD
    assert [path for path in asked if "org/name" in path] == about, "a commit needs no hub"


@pytest.mark.parametrize("status", [None, 503])
def test_a_hub_out_of_reach_leaves_what_is_cached_and_says_so_once(
    status: int | None, cached: Path, hub: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = hub(status) if status is not None else []
    if status is None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    read_all("org/name")
    assert find_directory("org/name") == cached / "snapshots" / OLD
    said = capsys.readouterr().err
    assert said.count("org/name is read from its cache") == 1 and f"commit {OLD}" in said
    assert len([path for path in asked if "org/name" in path]) <= 1


def test_what_is_not_whole_in_the_cache_is_left_to_the_library(cached: Path, hub: Callable[[int], list[str]]) -> None:
    hub(200)
    here = str(cached / "snapshots" / NEW)
    assert located("org/name", weights=True) == (here, None) == located("org/name")
    (cached / "snapshots" / NEW / "model.safetensors").unlink()
    assert located("org/name", weights=True) == ("org/name", None) and located("org/name") == (here, None)
    index = cached / "snapshots" / NEW / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (cached / "snapshots" / NEW / "one.safetensors").touch()
    assert located("org/name", weights=True) == ("org/name", None), "a shard is missing"
    (cached / "snapshots" / NEW / "two.safetensors").touch()
    assert located("org/name", weights=True) == (here, None)
    index.write_text("{")
    assert located("org/name", weights=True) == ("org/name", None)
    (cached / "snapshots" / NEW / "config.json").unlink()
    assert snapshot("org/name") is None and snapshot(str(DEMO)) is None


def test_a_hub_that_refuses_is_believed(cached: Path, hub: Callable[[int], list[str]]) -> None:
    hub(404)
    assert snapshot("org/name") is None


def test_a_mistyped_path_is_refused_at_once_where_the_hub_does_not_answer(
    cached: Path, hub: Callable[[int], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DEMO, tmp_path / "demo" / "base")
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = hub(503)
    why = r"^base_model demo/bse: demo has no such directory, and the hub answers 503\. Correct the path \(is it demo/base\?\), or check"
    for read in (load_config, find_directory, pin_revision):
        with pytest.raises(ModelError, match=why):
            read("demo/bse")
    assert len(asked) == 1  # and nothing by a library, which would ask again and again
    with pytest.raises(ModelError, match=r"base_model demo/other: demo has no such directory, and .*Correct the path, or"):
        load_config("demo/other")
    assert load_config("org/name") and find_directory("org/name") == cached / "snapshots" / OLD  # a hub id, in the cache


@pytest.mark.parametrize("status", [200, 404])
def test_a_hub_id_of_which_a_directory_has_the_organization_is_left_to_the_hub(
    status: int, cached: Path, hub: Callable[[int], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org").mkdir()
    monkeypatch.chdir(tmp_path)
    hub(status)
    refuse_mistyped("org/other")
    refuse_mistyped("org/name")
