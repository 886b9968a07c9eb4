"""Which local files of a source are uploaded to a server: those that `tlora train` would read, or none; and over which base they train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlora.base_digest import quick_digest
from tlora.client.orders import files_of, find_base
from tlora.errors import ConfigError
from tlora.job import DataSource


def lay_out(directory: Path, *names: str) -> DataSource:
    directory.mkdir()
    for name in names:
        (directory / name).write_text('{"text": "a"}\n')
    return DataSource(path=str(directory))


def test_a_directory_without_splits_is_sent_whole(tmp_path: Path) -> None:
    assert [file.name for file in files_of(lay_out(tmp_path / "set", "b.jsonl", "a.jsonl"))] == ["a.jsonl", "b.jsonl"]
    assert [file.name for file in files_of(lay_out(tmp_path / "one", "train.jsonl"))] == ["train.jsonl"]


def test_a_directory_with_splits_wants_its_files_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"may hold splits, .* Name the files: test.jsonl, train.jsonl"):
        files_of(lay_out(tmp_path / "set", "train.jsonl", "test.jsonl"))
    assert files_of(DataSource(path=str(tmp_path / "set" / "train.jsonl"))) == [tmp_path / "set" / "train.jsonl"]


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    source = lay_out(tmp_path / "set", "a.jsonl")
    (tmp_path / "set" / "b.jsonl").symlink_to("b.jsonl")
    with pytest.raises(ConfigError, match="b.jsonl: its symbolic links lead in a circle"):
        files_of(source)


def test_a_pipe_is_called_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"rows\.jsonl: is neither a file nor a directory but a pipe, .*; write what it holds to a file"):
        files_of(DataSource(path=str(tmp_path / "rows.jsonl")))


def lay_out_base(directory: Path, weights: bytes) -> tuple[str, str | None]:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    return str(directory), quick_digest(directory)


def test_a_directory_means_a_base_of_the_server_with_its_name_and_its_files(tmp_path: Path) -> None:
    """The name alone may be another model's. What is not known of either is not compared, and that is said."""
    said: list[str] = []
    mine, digest = lay_out_base(tmp_path / "mine" / "base", b"a" * 9000)
    _, other = lay_out_base(tmp_path / "other" / "base", b"b" * 9000)
    assert find_base("base", {"base": other}, said.append) == "base" and not said, "exactly a served name"
    assert find_base(mine, {"more": other, "base": digest}, said.append) == "base"
    assert said == [f"base_model {mine}: the server's 'base' is used, which has the same files"]
    with pytest.raises(ConfigError, match=r"the server's 'base' is another model .*--set base_model=base"):
        find_base(mine, {"base": other}, said.append)
    for wanted, known in ((mine, None), (str(tmp_path / "nowhere" / "base"), other)):
        assert find_base(wanted, {"base": known}, said.append) == "base" and "'base' is used, whose files are not compared" in said[-1]
    with pytest.raises(ConfigError, match="the server does not serve it"):
        find_base(mine, {"more": other}, said.append)
