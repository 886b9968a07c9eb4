"""`tlora tune`: its options, what it prints, and its errors. The engine is a fake one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tlora.cli.commands import app
from tlora.engine import tune as tuning
from tlora.engine.tune import Choice, Tuned
from tlora.errors import ConfigError
from tlora.kernels.tiles import Key, SkinnyTile, Tile, tile_by_rule

FORWARD = Key("forward", torch.bfloat16, 14336, 4096, 1)
GRADIENT = Key("input_gradient", torch.bfloat16, 4096, 28672, 2)
SUM = Key("sum", torch.bfloat16, 4096, 0, 3)


def call(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": None})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_options_are_handed_on_and_the_table_says_what_was_gained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    won = Tile(128, 128, 64, 4, 8, halves=True, first=True)
    choices = (
        Choice(FORWARD, won, tile_by_rule(FORWARD), 1.31e-3, 1.35e-3, ("64x256x64 s4 w4: OutOfResources: shared memory",)),
        Choice(GRADIENT, tile_by_rule(GRADIENT), tile_by_rule(GRADIENT), 2.6e-3, 2.6e-3),
        Choice(SUM, SkinnyTile(64, 64, 4, 4), tile_by_rule(SUM), 20e-6, 40e-6),
    )

    def fake(base_model: str, dtype: str, device: str | None, out: Path | None, note: object) -> Tuned:
        asked.extend([base_model, dtype, device, out])
        assert callable(note)
        note("[1/3] a line")
        return Tuned("NVIDIA H200", tmp_path / "t.json", choices, 61.4)

    monkeypatch.setattr(tuning, "tune", fake)
    code, out, err = call("some/base", "--device", "cuda", "--dtype", "bfloat16", "--out", "t.json")
    assert code == 0 and asked == ["some/base", "bfloat16", "cuda", Path("t.json")] and err == "[1/3] a line\n"
    rows = {line[:30].strip(): line[30:].split() for line in out.splitlines()}
    assert rows["forward 4096 -> 14336"] == ["128x128x64", "s4", "w8", "halves", "first", "1350.0", "1310.0", "3.0%"]
    assert rows["input gradient of 2 28672 -> 4"[:30]] == ["096", "by", "rule", "2600.0", "2600.0"]
    assert rows["sum of 3 ranks x 4096"] == ["64x64", "s4", "w4", "40.0", "20.0", "50.0%"]
    assert "forward 4096 -> 14336: 64x256x64 s4 w4: OutOfResources" in out
    assert "NVIDIA H200: 2 of 3 launches are faster than by rule\nin 61 s; table: " in out and "t.json" in out


def test_errors_are_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*_: object) -> Tuned:
        raise ConfigError("no GPU here")

    monkeypatch.setattr(tuning, "tune", fake)
    assert call("some/base") == (2, "", "error: no GPU here\n")
    code, _, err = call("some/base", "--dtype", "int8")
    assert code == 2 and "--dtype int8" in err and "auto, bfloat16 or float16" in err
