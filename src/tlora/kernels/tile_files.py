"""Reads tables of measured tiles: JSON files, one per GPU and place. Those of this package lie in `tile_tables`, those that `tlora tune`
wrote in the user's cache directory, and an entry of the user's goes before one of the package's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch

from tlora.cache_directory import cache_dir, gpu_file_name
from tlora.errors import ConfigError
from tlora.kernels.cards import HOPPER
from tlora.kernels.device import capability_of, class_of, is_forced, launched_as, tuned_as
from tlora.kernels.lora_tables import TILE
from tlora.kernels.tiles import KERNELS, AnyTile, Key, SkinnyTile, Tile, TileTable

SHIPPED = Path(__file__).with_name("tile_tables")
_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn")}
_REMEDY = "Delete it, and make it again with `tlora tune`"


def user_directory() -> Path:
    return cache_dir() / "tiles"


@functools.cache
def table_of(device: torch.device) -> TileTable:
    """The tiles of `device`, read once per process: a run keeps its tiles even if the files change. Raises ConfigError."""
    if device.type != "cuda":
        return TileTable(card=launched_as(device))
    if is_forced():
        launched_as(device)  # prepares the compiler
    return table_of_gpu(torch.cuda.get_device_name(device), capability_of(device))


def table_of_gpu(gpu: str, capability: int) -> TileTable:
    """The tiles of a GPU of that name, as the files have them now; `sized` where all sizes were seen to give the same bits. `capability`:
    90 for 9.0. Raises ConfigError.
    """
    table = merged([directory / gpu_file_name(tuned_as(gpu)) for directory in (SHIPPED, user_directory())])
    card = class_of(capability)
    return replace(table, sized=card is not None and card.sized, card=card or HOPPER)


def merged(paths: Iterable[Path]) -> TileTable:
    """The entries of all files that are there; of two for one key, the later file's. Raises ConfigError."""
    entries: dict[Key, AnyTile] = {}
    for path in paths:
        entries |= {key: _tile_of(key, row, path) for key, row in read_rows(path).items()}
    return TileTable(entries)


def read_rows(path: Path) -> dict[Key, dict[str, Any]]:
    """The file's rows by key, with all that they say; none where there is no file. Raises ConfigError for one that is damaged."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["entries"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"table of tiles {path} cannot be read ({type(error).__name__}: {error}). {_REMEDY}") from None
    if not isinstance(rows, list):
        raise _bad(path, rows, "its entries must be a list")
    row_by_key: dict[Key, dict[str, Any]] = {}
    for row in rows:
        key = _key_of(row, path)
        _tile_of(key, row, path)
        row_by_key[key] = row
    return row_by_key


def _key_of(row: Any, path: Path) -> Key:
    if not isinstance(row, dict):
        raise _bad(path, row, "an entry must be a mapping")
    numbers: list[Any] = [row.get(name) for name in ("columns", "inner", "together")]
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise _bad(path, row, "columns, inner and together must be whole numbers")
    if row.get("kernel") not in KERNELS or row.get("dtype") not in _DTYPES:
        raise _bad(path, row, f"kernel must be one of {', '.join(KERNELS)}, and dtype of {', '.join(_DTYPES)}")
    return Key(row["kernel"], _DTYPES[row["dtype"]], *numbers)


def _tile_of(key: Key, row: Mapping[str, Any], path: Path) -> AnyTile:
    kind = Tile if key.kernel in ("forward", "input_gradient") else SkinnyTile
    tile_row, known = row.get("tile"), {f.name: f for f in fields(kind)}
    needed = {name for name, f in known.items() if f.default is MISSING}
    if not isinstance(tile_row, dict) or not needed <= tile_row.keys() <= known.keys():
        raise _bad(path, row, f"its tile must have {', '.join(sorted(needed))}")
    wrong = [name for name, value in tile_row.items() if type(value) is not (int if known[name].type == "int" else bool)]
    if wrong:
        raise _bad(path, row, f"{wrong[0]} cannot be {tile_row[wrong[0]]!r}")
    tile = kind(**tile_row)
    if problem := _problem(tile, key):
        raise _bad(path, row, problem)
    return tile


def _problem(tile: AnyTile, key: Key) -> str | None:
    """What the kernels do not take."""
    if isinstance(tile, Tile):
        sizes, tokens = {"columns": tile.columns, "inner": tile.inner}, tile.rows
        if tile.halves and tile.columns < 32:
            return "halves need 32 columns or more"
        if tile.band < 1:
            return "band must be 1 or more"
    else:
        sizes, tokens = {"columns": tile.columns}, tile.tokens
    allowed = {"shrink": (TILE,), "sum": (16, 32, 64, 128)}.get(key.kernel, (64, 128))
    if tokens not in allowed:
        return f"{'rows' if isinstance(tile, Tile) else 'tokens'} must be one of {allowed}, and is {tokens}"
    widest = 128 if key.dtype == torch.float32 else 256  # fp32 beyond that does not run on tensor cores: triton_dot.py
    for name, size in sizes.items():
        if size not in (16, 32, 64, 128, 256) or size > widest:
            return f"{name} must be a power of two from 16 to {widest}, and is {size}"
    if tile.warps not in (4, 8) or not 1 <= tile.stages <= 8:
        return f"warps must be 4 or 8 and stages 1 to 8, and are {tile.warps} and {tile.stages}"
    return None


def _bad(path: Path, row: Any, rule: str) -> ConfigError:
    return ConfigError(f"table of tiles {path}: {rule}, in {json.dumps(row)[:200]}. {_REMEDY}")
