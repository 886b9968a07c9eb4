"""A directory that cannot be written is refused with the key, its value and a remedy, before anything else is looked at."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tlora.engine.train import resolve_run, train
from tlora.errors import ConfigError
from tlora.job import JobSpec
from tlora.live.cluster_run import train_on_cluster
from tlora.service.config import ServerConfig
from tlora.service.database.store import default_url, open_store
from tlora.service.server import open_server
from tlora.writable_directory import check_writable

LONGEST = 4096 - 1 - 256


def nested(parent: Path, length: int) -> Path:
    """A path in `parent` of so many bytes, of which nothing is there."""
    path = parent
    while length - len(os.fsencode(path)) > 202:
        path /= "d" * 100
    return path / ("e" * (length - len(os.fsencode(path)) - 1))


def too_long_name(parent: Path) -> tuple[Path, str]:
    return parent / "gone" / ("ä" * 128), "a name in it has 256 bytes, and may have 255. Choose a shorter one"


def too_long_path(parent: Path) -> tuple[Path, str]:
    rule = f"has {LONGEST + 1} bytes, and may have {LONGEST}, so that files in it have names too"
    return nested(parent, LONGEST + 1), f"{rule}. Choose a shorter one"


def file_in_the_way(parent: Path) -> tuple[Path, str]:
    (parent / "file").touch()
    return parent / "file" / "out", f"{parent / 'file'} is a file. Choose another"


def broken_link(parent: Path) -> tuple[Path, str]:
    (parent / "link").symlink_to("nothing")
    return parent / "link", f"{parent / 'link'} is a symbolic link to nothing. Choose another"


def not_utf8(parent: Path) -> tuple[Path, str]:
    directory = Path(os.fsdecode(os.fsencode(parent) + b"/\xe9"))
    rule = "has bytes that are not UTF-8, and files that name it are UTF-8"
    return directory, f"{str(directory)!a} {rule}. Choose another "


BAD = [too_long_name, too_long_path, file_in_the_way, broken_link, not_utf8]


@pytest.mark.parametrize("make", BAD)
def test_a_directory_that_cannot_be_written(tmp_path: Path, make: Callable[[Path], tuple[Path, str]]) -> None:
    directory, reason = make(tmp_path)
    with pytest.raises(ConfigError) as refused:
        check_writable(directory, "output_dir")
    assert str(refused.value).startswith(f"output_dir {directory}: {reason}")


def test_the_longest_paths_that_are_taken(tmp_path: Path) -> None:
    check_writable(tmp_path / ("n" * 255), "output_dir")
    check_writable(nested(tmp_path, LONGEST), "output_dir")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [0, -1])
def test_a_file_system_that_gives_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(os, "pathconf", lambda *_: limit)
    check_writable(tmp_path / "out", "output_dir")


@pytest.mark.parametrize("make", BAD)
@pytest.mark.parametrize("resume", [False, True])
def test_train_refuses_it_before_the_base_is_looked_at(tmp_path: Path, make: Callable[[Path], tuple[Path, str]], resume: bool) -> None:
    directory, reason = make(tmp_path)
    with pytest.raises(ConfigError) as refused:
        train([JobSpec(name="a", data="gone.jsonl")], base_model=str(tmp_path / "gone"), output_dir=str(directory), resume=resume)
    assert reason in str(refused.value)


@pytest.mark.parametrize("make", BAD)
def test_a_cluster_refuses_it_before_the_base_is_looked_at(tmp_path: Path, make: Callable[[Path], tuple[Path, str]]) -> None:
    directory, reason = make(tmp_path)
    run = resolve_run([JobSpec(name="a", data="gone.jsonl")], {"base_model": str(tmp_path / "gone"), "output_dir": str(directory)})
    with pytest.raises(ConfigError) as refused:
        train_on_cluster(run, device="cpu")
    assert reason in str(refused.value)


@pytest.mark.parametrize("make", BAD)
def test_a_server_refuses_it_before_its_store_is_opened(tmp_path: Path, make: Callable[[Path], tuple[Path, str]]) -> None:
    directory, reason = make(tmp_path)
    with pytest.raises(ConfigError) as refused:
        open_server(ServerConfig(data_dir=str(directory)))
    assert str(refused.value).startswith(f"data_dir {directory}: {reason}")


def test_a_database_whose_path_sqlite_cannot_take(tmp_path: Path) -> None:
    directory = nested(tmp_path, 504 - len("/tlora.db"))
    open_server(ServerConfig(data_dir=str(directory), device="cpu")).close()
    (tmp_path / "short").symlink_to(directory.parent / f"{directory.name}x")
    with pytest.raises(ConfigError, match="its path has 505 bytes, and SQLite takes 504. Choose a shorter one"):
        open_store(default_url(tmp_path / "short"))
    with pytest.raises(ConfigError, match="its path has 505 bytes, and SQLite takes 504. Choose a shorter one"):
        open_server(ServerConfig(data_dir=f"{directory}f", device="cpu"))
