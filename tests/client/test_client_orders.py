"""Which local files of a source are uploaded to a server: those that `tlora train` would read, or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlora.client.orders import files_of
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
