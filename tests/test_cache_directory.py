"""Where compiled kernels are kept, and what happens where the cache directory cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tlora.cache_directory import cache_dir, open_caches, share_compiled_kernels

_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME", "TLORA_CACHE", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A user's, without any variable of a cache but where the caches are."""
    for name in _VARIABLES:
        monkeypatch.setenv(name, "")  # or what a test sets would stay
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return monkeypatch


def test_compiled_kernels_are_kept_in_the_programs_cache(tmp_path: Path) -> None:
    share_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "caches" / "tlora" / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "caches" / "tlora" / "inductor")


def test_inductor_leaves_tritons_cache_where_it_is(tmp_path: Path) -> None:
    """What it does for each GPU's index before its first kernel is compiled, in a process that has no such variable."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_dir
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
    from triton import knobs

    share_compiled_kernels()
    found = [inductor_dir(), triton_cache_dir(0), triton_cache_dir(1), knobs.cache.dir]
    caches = tmp_path / "caches" / "tlora"
    assert found == [str(caches / "inductor"), *[str(caches / "triton")] * 3]


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_variable_of_the_users_wins(environment: pytest.MonkeyPatch, variable: str) -> None:
    environment.setenv(variable, "/somewhere")
    share_compiled_kernels()
    assert os.environ[variable] == "/somewhere"


def test_tritons_home_wins_too(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TRITON_HOME", "/home/else")
    share_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == "/home/else/.triton/cache"


def test_a_cache_that_cannot_be_written_is_a_temporary_one(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "caches").write_text("a file, below which root has no directory either")
    share_compiled_kernels()
    environment.setenv("TMPDIR", str(tmp_path))
    environment.setattr("tempfile.tempdir", None)
    notes: list[str] = []
    open_caches(notes.append)
    assert len(notes) == 1 and str(tmp_path / "caches" / "tlora") in notes[0] and str(cache_dir()) in notes[0], notes
    assert cache_dir().is_dir() and cache_dir().parent == tmp_path
    assert os.environ["TRITON_CACHE_DIR"] == str(cache_dir() / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache_dir() / "inductor")
    open_caches(notes.append)
    assert len(notes) == 1, "said once"


def test_a_cache_that_can_be_written_is_not_spoken_of(tmp_path: Path) -> None:
    notes: list[str] = []
    open_caches(notes.append)
    assert not notes and cache_dir() == tmp_path / "caches" / "tlora" and cache_dir().is_dir()
