"""Two versions in turns: the windows that each reports, in the order that was promised, and the ratio of the rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.turns import WARM_UP, measure


def _make_version(tree: Path, name: str, seconds: float, log: Path) -> Path:
    """A repository whose windows take `seconds` as it says, and which notes its turns in `log`."""
    (tree / "bench").mkdir(parents=True)
    (tree / "bench" / "__init__.py").touch()
    (tree / "bench" / "together.py").write_text(
        f"def run_window(engine, tokens):\n    open({str(log)!r}, 'a').write({name!r} + ' ')\n    return 100, {seconds}\n"
    )
    (tree / "bench" / "throughput.py").write_text(
        "from bench import together\n"
        "def read_options(arguments): return arguments\n"
        "def run_benchmark(options):\n"
        "    assert options[-2:] == ['--lengths', '512'], options\n"
        "    print('compiled')\n"
        "    while True: together.run_window(None, 1)\n"
    )
    return tree


def test_turns_alternate_and_the_ratio_is_new_over_old(tmp_path: Path) -> None:
    log = tmp_path / "log"
    old, new = _make_version(tmp_path / "old", "old", 2.0, log), _make_version(tmp_path / "new", "new", 1.0, log)
    found = measure(old, new, 3, ["--lengths", "512"], tmp_path / "caches")
    assert found["tokens_per_second"] == {"old": 50.0, "new": 100.0}
    assert found["ratio"] == 2.0 and found["ratios_of_rounds"] == [2.0, 2.0, 2.0]
    assert log.read_text().split() == ["old", "new"] * WARM_UP + ["old", "new", "new", "old", "old", "new"]


def test_a_version_that_ends_is_an_error(tmp_path: Path) -> None:
    old, new = (_make_version(tmp_path / name, name, 1.0, tmp_path / "log") for name in ("old", "new"))
    (new / "bench" / "throughput.py").write_text("from bench import together\nraise SystemExit(3)\n")
    with pytest.raises(RuntimeError, match="exit code 3"):
        measure(old, new, 1, ["--lengths", "512"], tmp_path / "caches")
