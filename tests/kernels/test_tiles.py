"""Tiles: which one a shape gets, from which file, and what a damaged file says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tlora.cache_directory import gpu_file_name
from tlora.errors import ConfigError
from tlora.kernels import tile_files
from tlora.kernels.cards import CLASSES, CardClass
from tlora.kernels.tiles import (
    MOST_SIZES,
    WIDEST_BLOCK,
    Key,
    SkinnyTile,
    Tile,
    TileTable,
    describe,
    digest,
    for_tokens,
    keys_of,
    sizes_of,
    tile_by_rule,
)

BF16 = torch.bfloat16
FORWARD = Key("forward", BF16, 4096, 1024, 1)
SHRINK = Key("shrink", BF16, 0, 1024, 2)
TILE = Tile(64, 128, 32, 5, 4, first=True)


def write(path: Path, *rows: Any) -> Path:
    path.write_text(json.dumps({"gpu": "any", "entries": list(rows)}))
    return path


def test_an_exact_entry_goes_before_the_rule_and_no_other_does() -> None:
    table = TileTable({FORWARD: TILE, SHRINK: SkinnyTile(64, 32, 2, 4)})
    assert table.gemm(FORWARD, 8192, 132) == TILE
    assert table.shrink(BF16, 1024, 2) == SkinnyTile(64, 32, 2, 4)
    for other in (
        FORWARD._replace(columns=4112),
        FORWARD._replace(inner=1040),
        FORWARD._replace(dtype=torch.float16),
        FORWARD._replace(kernel="input_gradient"),
        FORWARD._replace(together=2),
    ):
        assert table.find(other) == tile_by_rule(other) != TILE
    assert table.shrink(BF16, 1024, 1) == tile_by_rule(SHRINK._replace(together=1))
    assert table.sum(BF16, 1024, 2) == tile_by_rule(Key("sum", BF16, 1024, 0, 2))


WIDE = tile_by_rule(FORWARD)


@pytest.mark.parametrize("card", CLASSES, ids=lambda card: card.name)
def test_a_class_knows_its_smallest_tile(card: CardClass) -> None:
    tile = tile_by_rule(Key("forward", BF16, WIDEST_BLOCK, WIDEST_BLOCK, 1), card)
    assert isinstance(tile, Tile)
    assert card.smallest_rows == min(size.rows for size in (sizes_of(tile, BF16) if card.sized else (tile,)))


def test_few_tokens_get_the_smaller_tiles_that_were_fastest_for_them() -> None:
    """As measured on an H200 (bench/results/h200_a316ad7_small_tiles.json)."""
    assert isinstance(WIDE, Tile)

    def size(tokens: int, columns: int, tile: Tile = WIDE, dtype: torch.dtype = BF16, processors: int = 132) -> tuple[int, int]:
        found = for_tokens(tile, dtype, tokens, columns, processors)
        assert found == tile or found in sizes_of(tile, dtype)
        return found.rows, found.columns

    assert [size(tokens, 4096) for tokens in (128, 256, 512, 1024, 8192)] == [(64, 64), (64, 128), (128, 128), (128, 256), (128, 256)]
    assert [size(tokens, 14336) for tokens in (128, 256, 512, 8192)] == [(128, 128), (128, 256), (128, 256), (128, 256)]
    assert [size(tokens, 1024) for tokens in (128, 512, 1024, 2048)] == [(64, 64), (64, 64), (64, 128), (128, 128)]
    assert size(128, 4096, replace(WIDE, inner=128)) == (128, 256), "not measured: fp8's, and fp32's"
    assert size(128, 4096, tile_by_rule(FORWARD._replace(dtype=torch.float32)), torch.float32) == (128, 128)
    assert size(128, 4096, TILE) == (64, 128), "its inner is another"
    assert size(128, 4096, replace(WIDE, rows=64)) == (64, 256)


def test_smaller_tiles_keep_what_bits_follow_from() -> None:
    assert isinstance(WIDE, Tile)
    for tile in (WIDE, replace(WIDE, first=True), replace(WIDE, rows=64, columns=128)):
        sizes = sizes_of(tile, BF16)
        assert sizes[0] == tile and len({(size.rows, size.columns) for size in sizes}) == len(sizes) <= MOST_SIZES
        assert {(size.inner, size.first, size.promote) for size in sizes} == {(tile.inner, tile.first, tile.promote)}
    assert TileTable().gemm(FORWARD, 128, 132) == WIDE != TileTable(sized=True).gemm(FORWARD, 128, 132)


@pytest.mark.parametrize(("capability", "sized"), [(80, False), (89, False), (90, True), (100, False)])
def test_only_where_all_sizes_were_seen_to_give_the_same_bits(capability: int, sized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tile_files.table_of_gpu("no GPU of this name", capability).sized == sized
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "no GPU of this name")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 10))
    assert tile_files.table_of.__wrapped__(torch.device("cuda")).sized == sized


def test_the_users_table_lies_in_the_cache_and_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200 (made up)")
    shipped = tile_files.SHIPPED / gpu_file_name("NVIDIA H200 (made up)")
    assert shipped.name == "nvidia-h200-made-up.json" and not shipped.exists()
    monkeypatch.setattr(tile_files, "SHIPPED", tmp_path)
    (tmp_path / "tiles").mkdir()
    write(tmp_path / shipped.name, describe(FORWARD, Tile(128, 128, 64, 4, 4)), describe(SHRINK, SkinnyTile(64, 128, 3, 4)))
    write(tmp_path / "tiles" / shipped.name, describe(FORWARD, TILE))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    table = tile_files.table_of.__wrapped__(torch.device("cuda"))
    assert table.entries == {FORWARD: TILE, SHRINK: SkinnyTile(64, 128, 3, 4)}


def test_without_a_gpu_there_is_no_table() -> None:
    assert tile_files.table_of(torch.device("cpu")) == TileTable()


def test_every_shipped_table_can_be_read_and_says_no_more_than_the_rules_do_not() -> None:
    for path in tile_files.SHIPPED.glob("*.json"):
        entries = tile_files.merged([path]).entries
        assert entries and path == tile_files.SHIPPED / gpu_file_name(json.loads(path.read_text())["gpu"])
        for key, row in tile_files.read_rows(path).items():
            assert entries[key] != tile_by_rule(key)
            assert row["microseconds"] < 0.98 * row["rule_microseconds"], f"{key} wins by less than 2 %"


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"gpu": "x"}', '{"entries": 7}', '{"entries": ["x"]}', "\udcff"], ids=repr)
def test_a_broken_file_is_one_clear_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"t\.json.*Delete it") as told:
        tile_files.merged([path])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("key", "change", "rule"),
    [
        (FORWARD, {"kernel": "backward"}, "kernel must be one of forward, input_gradient"),
        (FORWARD, {"kernel": ["forward"]}, "kernel must be one of"),
        (FORWARD, {"dtype": "int8"}, "and dtype of bfloat16"),
        (FORWARD, {"columns": 4096.0}, "must be whole numbers"),
        (FORWARD, {"together": True}, "must be whole numbers"),
        (FORWARD, {"tile": None}, "its tile must have columns, inner, rows, stages, warps"),
        (FORWARD, {"tile": asdict(SkinnyTile(64, 64, 4, 8))}, "its tile must have"),
        (SHRINK, {"tile": asdict(TILE)}, "its tile must have columns, stages, tokens, warps"),
        (FORWARD, {"tile": asdict(TILE) | {"colour": 1}}, "its tile must have"),
        (FORWARD, {"tile": asdict(TILE) | {"rows": 256}}, "rows must be one of"),
        (FORWARD, {"tile": asdict(TILE) | {"rows": 32}}, "rows must be one of"),
        (SHRINK, {"tile": asdict(SkinnyTile(32, 64, 2, 4))}, "tokens must be one of"),
        (SHRINK, {"tile": asdict(SkinnyTile(128, 64, 2, 4))}, "tokens must be one of"),
        (FORWARD, {"tile": asdict(TILE) | {"columns": 48}}, "columns must be a power of two"),
        (FORWARD, {"tile": asdict(TILE) | {"inner": 512}}, "inner must be a power of two"),
        (FORWARD, {"dtype": "float32", "tile": asdict(TILE) | {"columns": 256}}, "columns must be a power of two from 16 to 128"),
        (FORWARD, {"tile": asdict(TILE) | {"warps": 3}}, "warps must be 4 or 8"),
        (FORWARD, {"tile": asdict(TILE) | {"stages": 0}}, "stages 1 to 8"),
        (FORWARD, {"tile": asdict(TILE) | {"band": 0}}, "band must be 1"),
        (FORWARD, {"tile": asdict(TILE) | {"columns": 16, "halves": True}}, "halves need 32"),
        (FORWARD, {"tile": asdict(TILE) | {"first": 1}}, "first cannot be 1"),
        (FORWARD, {"tile": asdict(TILE) | {"stages": True}}, "stages cannot be True"),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_take_is_refused(key: Key, change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    good = describe(key, TILE if key == FORWARD else SkinnyTile(64, 64, 4, 8))
    assert tile_files.merged([write(tmp_path / "good.json", good)]).entries
    with pytest.raises(ConfigError, match=rule):
        tile_files.merged([write(tmp_path / "bad.json", good | change)])


def test_the_digest_is_of_what_the_keys_get_wherever_it_comes_from() -> None:
    keys = keys_of(1024, (4096, 512), BF16, BF16)
    assert FORWARD in keys and SHRINK in keys
    by_rule = digest(TileTable(), keys)
    assert len(by_rule) == 16 and by_rule == digest(TileTable(), [*reversed(keys), *keys])
    assert by_rule == digest(TileTable({FORWARD: tile_by_rule(FORWARD)}), keys), "a table that says what the rule says"
    assert by_rule == digest(TileTable({FORWARD._replace(columns=99): TILE}), keys), "an entry for another base"
    assert len({by_rule, digest(TileTable(), keys, (TILE,)), digest(TileTable(), keys, (replace(TILE, warps=2),))}) == 3, "attention's too"
    for key in keys:
        tile = tile_by_rule(key)
        assert digest(TileTable({key: replace(tile, stages=tile.stages + 1)}), keys) != by_rule
    assert digest(TileTable(), keys_of(1024, (4096, 512), BF16, torch.float8_e4m3fn)) != by_rule
