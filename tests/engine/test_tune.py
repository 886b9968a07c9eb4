"""`tlora tune`: which launches a base has, which tile is chosen by a clock that we set, and what ends up in the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tlora.engine import tune as tuning
from tlora.engine.tune import Choice, launches_of, pick, tune, write_choices, write_rows
from tlora.errors import ConfigError
from tlora.job import RunSpec
from tlora.kernels import tile_files
from tlora.kernels.tiles import AnyTile, Key, SkinnyTile, Tile, TileTable, describe, tile_by_rule
from tlora.store.run_directory import check_tiles, write_run_file
from tlora.supermodel.load import outline

with interpreted():
    from tlora.kernels import tile_trials

pytestmark = MARKS
BF16 = torch.bfloat16
FORWARD, SHRINK = Key("forward", BF16, 256, 64, 1), Key("shrink", BF16, 0, 64, 3)
FAST, FASTER, FASTEST = (SkinnyTile(64, columns, 3, 4) for columns in (32, 64, 128))
RULE = tile_by_rule(SHRINK)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A directory with config.json alone."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_the_launches_of_a_base_come_from_its_config(base: str) -> None:
    found = launches_of(outline(base))
    forward = {key[2:] for key in found if key.kernel == "forward"}
    assert forward == {(64, 64, 1), (32, 64, 1), (96, 64, 1), (64, 96, 1)}
    gradients = {key[2:]: widths for key, widths in found.items() if key.kernel == "input_gradient"}
    assert gradients == {(64, 128, 3): (64, 32, 32), (64, 64, 1): (64,), (64, 192, 2): (96, 96), (96, 64, 1): (64,)}
    shrinks = {key[3:] for key in found if key.kernel == "shrink"}
    assert shrinks == {(64, 1), (64, 2), (64, 3), (32, 1), (96, 1)}
    assert {(key.columns, key.together) for key in found if key.kernel == "sum"} == shrinks
    assert {key.dtype for key in found} == {BF16}


@pytest.mark.parametrize(
    ("seconds", "bad", "chosen", "num_faults"),
    [
        ({RULE: 1.0, FAST: 0.9, FASTER: 0.8}, [], FASTER, 0),
        ({RULE: 1.0, FAST: 0.9, FASTER: 0.8}, [FASTER], FAST, 1),
        ({RULE: 1.0, FAST: 0.9, FASTER: 0.8, FASTEST: 0.7}, [FAST, FASTER, FASTEST], RULE, 3),
        ({RULE: 1.0, FAST: 0.985}, [], RULE, 0),
        ({RULE: 1.0, FAST: 1.5}, [FAST], RULE, 0),
        ({RULE: 1.0}, [], RULE, 0),
    ],
)  # fmt: skip
def test_the_fastest_that_is_right_wins_by_a_margin(
    seconds: dict[AnyTile, float], bad: list[AnyTile], chosen: AnyTile, num_faults: int
) -> None:
    asked: list[AnyTile] = []

    def fault(tile: AnyTile) -> str | None:
        asked.append(tile)
        return "wrong" if tile in bad else None

    tile, faults = pick(seconds, RULE, fault)
    assert tile == chosen and len(faults) == num_faults and all("wrong" in line for line in faults)
    assert len(asked) == num_faults + (chosen != RULE), "only what would win is proven"


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a clock of our own times the interpreter")
def test_a_candidate_that_fails_or_errs_is_left_out_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key("shrink", torch.float32, 0, 32, 1)
    rule, failing, wrong, right = tile_by_rule(key), *(SkinnyTile(64, 32, stages, 4) for stages in (5, 6, 7))
    made = tile_trials.results

    def results(problem: tile_trials.Problem, tile: AnyTile) -> list[torch.Tensor]:
        if tile == failing:
            raise RuntimeError("out of resource: shared memory\nand more")
        return [t * (2 if tile == wrong else 1) for t in made(problem, tile)]

    timed: list[int] = []

    def in_turn(steps: Sequence[Callable[[], object]]) -> list[float]:
        timed.append(len(steps))
        for step in steps:
            step()
        return [20.0, 10.0]

    monkeypatch.setattr(tile_trials, "results", results)
    monkeypatch.setattr(tile_trials, "candidates", lambda key, card: [rule, failing, wrong, right])
    monkeypatch.setattr(tuning, "in_turn", in_turn)
    monkeypatch.setattr(tuning, "_graph_of", lambda step, calls: step)
    monkeypatch.setattr(tuning, "TOKENS", 64)
    choice = tuning.choose(key, (), DEVICE)
    assert timed == [2] and choice.tile == right and choice.rule == rule
    assert choice.seconds == 0.5 and choice.rule_seconds == 1.0 and choice.gain == 0.5
    assert [line.partition(": ")[2][:40] for line in choice.faults] == [
        "RuntimeError: out of resource: shared me",
        "differs by 1.0e+00 from the rule's tile",
    ]


def test_the_file_gets_what_differs_and_keeps_other_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_files, "SHIPPED", tmp_path / "shipped")
    path, other, gone = tmp_path / "t.json", FORWARD._replace(columns=4096), FORWARD._replace(columns=512)
    won = Tile(128, 128, 64, 4, 4)
    write_choices(path, "G", [Choice(key, won, tile_by_rule(key), 0.8e-3, 1e-3) for key in (other, gone)])
    by_rule = [Choice(key, tile_by_rule(key), tile_by_rule(key), 1e-3, 1e-3) for key in (SHRINK, gone)]
    write_choices(path, "G", [Choice(FORWARD, won, tile_by_rule(FORWARD), 0.5e-3, 1e-3), *by_rule])
    assert tile_files.merged([path]) == TileTable({other: won, FORWARD: won})
    row = tile_files.read_rows(path)[FORWARD]
    assert (row["microseconds"], row["rule_microseconds"]) == (500.0, 1000.0)
    write_choices(tmp_path / "shipped" / "g.json", "G", [Choice(SHRINK, FAST, RULE, 0.5, 1.0)])
    write_choices(path, "G", by_rule)
    assert tile_files.merged([tmp_path / "shipped" / "g.json", path]).find(SHRINK) == RULE, "the rule must win over the package's entry"


def test_a_written_table_is_read_back_and_the_later_file_wins(tmp_path: Path) -> None:
    shipped, own, absent = (tmp_path / name for name in ("shipped.json", "deep/own.json", "absent.json"))
    other, tile = SHRINK._replace(inner=2048), Tile(64, 128, 32, 5, 4, first=True)
    first = {FORWARD: Tile(128, 128, 64, 4, 4), SHRINK: SkinnyTile(64, 128, 3, 4)}
    second = {FORWARD: tile, other: SkinnyTile(64, 64, 4, 8)}
    for path, entries in ((shipped, first), (own, second)):
        write_rows(path, "a GPU", {key: describe(key, entry) | {"microseconds": 1.5} for key, entry in entries.items()}, {"tokens": 8})
    assert tile_files.merged([shipped]).entries == first
    assert tile_files.merged([shipped, own, absent]).entries == first | second
    assert tile_files.merged([own, shipped]).find(FORWARD) == first[FORWARD]
    content = json.loads(own.read_text())
    assert (content["gpu"], content["tokens"], content["entries"][0]["microseconds"]) == ("a GPU", 8, 1.5)
    assert own.read_text().count("\n") == 8, "head, an entry a line, and brackets"


def test_a_table_without_entries_is_written_as_json(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.json", "a GPU", {}, {})
    assert tile_files.merged([tmp_path / "t.json"]) == TileTable()


def test_tune_writes_where_training_reads(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(tuning, "why_plain", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked: dict[Key, tuple[int, ...]] = {}

    def choose(key: Key, widths: tuple[int, ...], device: torch.device) -> Choice:
        asked[key] = widths
        rule = tile_by_rule(key)
        return Choice(key, FAST if key == SHRINK else rule, rule, 1e-3, 2e-3)

    monkeypatch.setattr(tuning, "choose", choose)
    lines: list[str] = []
    tuned = tune(base, note=lines.append)
    assert asked == launches_of(outline(base)) and len(lines) == len(asked) == len(tuned.choices)
    assert lines[0].startswith(f"[1/{len(asked)}] forward ")
    assert tuned.path == tmp_path / "cache" / "tiles" / "a-gpu.json"
    assert tile_files.table_of.__wrapped__(torch.device("cuda")).entries == {SHRINK: FAST}
    assert tune(base, out=tmp_path / "own.json", note=lines.append).path == tmp_path / "own.json"


def test_without_a_gpu_or_candidates_tune_says_so(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="GPU.* is cpu"):
        tune(base, device="cpu")
    monkeypatch.setattr(tuning, "pick_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(tuning, "why_plain", lambda device: "compute capability 7.5 has no bf16")
    with pytest.raises(ConfigError, match=r"do not run here: compute capability 7\.5 has no bf16"):
        tune(base)
    monkeypatch.setattr(tuning, "why_plain", lambda device: None)
    with pytest.raises(ConfigError, match="this base is float32. Give --dtype bfloat16"):
        tune(base, "float32")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ConfigError, match=r"t\.json cannot be read"):
        tune(base, out=tmp_path / "t.json")
    assert (tmp_path / "t.json").read_text() == "{"


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_a_resume_with_other_tiles_is_told_and_refused_where_bits_are_promised(deterministic: bool, tmp_path: Path) -> None:
    jobs = [{"name": "a", "data": "d"}]
    run = RunSpec.model_validate({"base_model": "b", "output_dir": str(tmp_path), "jobs": jobs, "deterministic": deterministic})
    assert check_tiles(run, "0123") is None, "nothing there"
    write_run_file(tmp_path, run, {"status": "running"}, forget=True)
    assert check_tiles(run, "0123") is None, "a run without kernels"
    write_run_file(tmp_path, run, {"status": "running", "tiles": "0123"})
    write_run_file(tmp_path, run, {"status": "preparing"})  # what a resume writes before anything is loaded
    assert json.loads((tmp_path / "run.json").read_text())["tiles"] == "0123"
    assert check_tiles(run, "0123") is None and check_tiles(run, None) is None
    if deterministic:
        with pytest.raises(ConfigError, match=r"0123.*4567.*output_dir"):
            check_tiles(run, "4567")
    else:
        assert "were 0123 and are 4567" in (check_tiles(run, "4567") or "")
    write_run_file(tmp_path, run, {"status": "preparing"}, forget=True)
    assert check_tiles(run, "4567") is None, "--overwrite begins anew"
