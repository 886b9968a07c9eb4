"""Checkpoints that GPTQ and AWQ have packed: the numbers that went into them, adapters over them, and what is refused.

They are packed here with plain shifts, column by column, as the libraries lay them out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.supermodel.packed_bases import check_adapters, edit, save_plain, unpack
from tlora.errors import ConfigError, ModelError
from tlora.supermodel.held_linear import HeldLinear
from tlora.supermodel.load import load_base, load_config, outline
from tlora.supermodel.packed_format import format_of
from tlora.supermodel.tensor_files import find_tensors
from tlora.supermodel.weight_files import check_unused

STEM = "model.layers.0.self_attn.q_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
KINDS: dict[str, dict[str, Any]] = {
    "gptq": GPTQ,
    "gptq-64-asymmetric": GPTQ | {"group_size": 64, "sym": False},
    "gptq-32-v2": GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"},
    "gptq-rows-v2-asymmetric": GPTQ | {"group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq-rows": GPTQ | {"group_size": -1},
    "awq": AWQ,
    "awq-32": AWQ | {"group_size": 32, "version": "GEMM"},
    "awq-rows": AWQ | {"group_size": -1, "modules_to_not_convert": ["k_proj"]},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float16, as these libraries' scales are."""
    shape = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return save_plain(tmp_path_factory.mktemp("plain") / "base", torch.float16, **shape)


Made = Callable[[str], tuple[Path, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def packed_once(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """`pack` of a kind, for tests that leave its files as they are."""
    directory = tmp_path_factory.mktemp("packed")
    return cache(lambda kind: pack(plain, directory / kind, KINDS[kind]))


Array = np.ndarray[Any, np.dtype[Any]]


def quantise(weight_NK: Array, group: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Codes [N, K], zero points and scales in float16 [N, K / group]; zero points reach from 0 to 15 where they can."""
    groups = weight_NK.reshape(len(weight_NK), -1, group)
    low, high = groups.min(2), groups.max(2)
    if symmetric:
        scale, zero = np.maximum(-low, high) / 7, np.full(low.shape, 8)
    else:
        zero = np.arange(low.size).reshape(low.shape) % 16
        scale = np.maximum(high, -low) / 8
    scale = scale.astype(np.float16)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)[:, :, None]) + zero[:, :, None], 0, 15)
    return codes.reshape(weight_NK.shape).astype(np.uint32), zero.astype(np.uint32), scale


def pack_in_words(codes: Array, order: tuple[int, ...]) -> Array:
    """int32 [rows, columns / 8] of codes [rows, columns]: the bits 4i of each have its column `order[i]`."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for place, column in enumerate(order):
        words |= codes[:, column::8] << np.uint32(4 * place)
    return words


def packed_tensors(weight: Tensor, settings: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """What the library saves of a weight, and its numbers in float16."""
    weight_NK = weight.float().numpy()
    group = settings["group_size"] if settings["group_size"] > 0 else weight_NK.shape[1]
    codes, zero, scale = quantise(weight_NK, group, settings.get("sym", False))
    ones = [np.repeat(each, group, 1) for each in (zero, scale)]
    values = (codes.astype(np.int32) - ones[0].astype(np.int32)).astype(np.float16) * ones[1]
    if settings["quant_method"] == "gptq":
        in_turn = tuple(range(8))
        found = {"qweight": pack_in_words(codes, in_turn).T, "qzeros": pack_in_words(zero.T, in_turn)}
        if settings["checkpoint_format"] == "gptq":
            found["qzeros"] = found["qzeros"] - np.uint32(0x11111111)  # each int32 as a whole, as GPTQModel does
    else:
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        found = {"qweight": pack_in_words(codes.T, order), "qzeros": pack_in_words(zero.T, order)}
    tensors = {name: torch.from_numpy(np.ascontiguousarray(words).view(np.int32)) for name, words in found.items()}
    tensors["scales"] = torch.from_numpy(np.ascontiguousarray(scale.T))
    if settings["quant_method"] == "gptq":
        tensors["g_idx"] = torch.arange(weight_NK.shape[1], dtype=torch.int32) // group
    return tensors, torch.from_numpy(values)


def pack(plain: Path, directory: Path, settings: dict[str, Any]) -> tuple[Path, dict[str, Tensor]]:
    """The base as the library saves it, and the numbers of its linears."""
    shutil.copytree(plain, directory)
    tensors, values = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    kept = tuple(settings.get("modules_to_not_convert") or ("none",))
    linears = [key for key, tensor in tensors.items() if tensor.ndim == 2 and "embed" not in key and "lm_head" not in key]
    for key in [key for key in linears if not key.removesuffix(".weight").endswith(kept)]:
        stem = key.removesuffix(".weight")
        found, values[stem] = packed_tensors(tensors.pop(key), settings)
        tensors |= {f"{stem}.{end}": tensor for end, tensor in found.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    edit(directory / "config.json", quantization_config=settings)
    return directory, values


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in ("gptq-32-v2", "gptq-rows", "awq-32") else ()) for kind in KINDS],
)
def test_values_are_those_that_were_packed(kind: str, packed_once: Made) -> None:
    packed, values = packed_once(kind)
    loaded, counted = load_base(str(packed)), outline(str(packed))
    held = {name: module for name, module in loaded.model.named_modules() if isinstance(module, HeldLinear)}
    assert held.keys() == values.keys() and len(held) == (6 if "rows" in kind and "awq" in kind else 7)
    for name, linear in held.items():
        assert torch.equal(linear.look_up().dense(torch.float16), values[name]), name
        assert len(values[name].unique()) > 100, "the test's numbers say nothing"
    wide = load_base(str(packed), "float32").model
    assert all(torch.equal(wide.get_submodule(name).look_up().dense(torch.float32), value.float()) for name, value in values.items())
    assert (counted.num_bytes, counted.num_parameters) == (loaded.num_bytes, loaded.num_parameters)
    assert {n for n, m in counted.model.named_modules() if isinstance(m, HeldLinear)} == held.keys()
    assert not check_unused(str(packed), load_config(str(packed)), "refuse")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "gptq-64-asymmetric", "awq-32"])
def test_adapters_are_those_over_the_checkpoint_that_it_stands_for(kind: str, plain: Path, packed_once: Made, tmp_path: Path) -> None:
    packed, values = packed_once(kind)
    unpacked = unpack(packed, values, tmp_path / "unpacked", torch.float16)
    check_adapters(packed, unpacked, plain, tmp_path)
    name = "GPTQ int4" if "gptq" in kind else "AWQ int4"
    with pytest.raises(ConfigError, match=rf"packed already \({name}\), and base_precision nf4 would .*Take base_precision"):
        load_base(str(packed), base_precision="nf4")


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gptq-64-asymmetric", "gptq-rows-v2-asymmetric")), "awq"]
)
def test_every_code_with_every_zero_point_and_scale(kind: str, tmp_path: Path) -> None:
    """All finite scales in float16. Differences and products are numpy's, each rounded to float16."""
    scales = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    scales = scales[np.isfinite(scales)]
    settings, rows = KINDS[kind] | {"group_size": -1}, len(scales)
    codes, zero = np.tile(np.arange(16, dtype=np.uint32), (rows, 1)), (np.arange(rows, dtype=np.uint32) * 7 // 3 % 16)[:, None]
    order = (0, 2, 4, 6, 1, 3, 5, 7) if kind == "awq" else tuple(range(8))
    qweight = pack_in_words(codes.T, order) if kind == "awq" else pack_in_words(codes, order).T
    qzeros = pack_in_words(zero.T, order) - np.uint32(0x11111111 if settings.get("checkpoint_format") == "gptq" else 0)
    found = {name: torch.from_numpy(np.ascontiguousarray(each).view(np.int32)) for name, each in (("qweight", qweight), ("qzeros", qzeros))}
    save_file({f"x.{name}": tensor for name, tensor in (found | {"scales": torch.from_numpy(scales[None])}).items()}, tmp_path / "x.st")
    form = format_of(type("Config", (), {"quantization_config": settings}), "x")
    assert form is not None
    dense = form.find(find_tensors([tmp_path / "x.st"]))["x.weight"].read(torch.float16).dense(torch.float16)
    with np.errstate(over="ignore"):
        true = (codes.astype(np.float16) - zero.astype(np.float16)) * scales[:, None]
    assert torch.equal(dense, torch.from_numpy(true)) and torch.equal(dense.signbit(), torch.from_numpy(np.signbit(true)))


@pytest.mark.parametrize(
    ("kind", "damage", "part"),
    [
        ("gptq", "no scales", "lacks '{stem}.scales'"),
        ("gptq", "no zeros", "lacks '{stem}.qzeros'"),
        ("gptq", "short scales", "scales [0, 128] in torch.float16 for [128, 128] in groups of 128"),
        ("gptq", "short zeros", "zero points [0, 16] in torch.int32 for [128, 128] in groups of 128"),
        ("gptq", "codes in bytes", "{stem}.qweight is [16, 128] in torch.int8, and no matrix in int32"),
        ("gptq", "order", "{stem}.g_idx orders the inputs by activations (desc_act)"),
        ("gptq", "other zeros", "zero points other than 8, and by config.json it is symmetric"),
        ("gptq", "no codes", "no tensor of its files is packed"),
        ("awq", "no scales", "lacks '{stem}.scales'"),
        ("awq", "short scales", "scales [0, 128] in torch.float16 for [128, 128] in groups of 128"),
        ("awq", "short zeros", "zero points [0, 16] in torch.int32 for [128, 128] in groups of 128"),
        ("awq", "codes in bytes", "{stem}.qweight is [128, 16] in torch.int8, and no matrix in int32"),
        ("awq", "no codes", "no tensor of its files is packed"),
    ],
)
def test_what_does_not_fit_together_is_one_message(
    kind: str, damage: str, part: str, plain: Path, packed_once: Made, tmp_path: Path
) -> None:
    packed = Path(shutil.copytree(packed_once(kind)[0], tmp_path / "packed"))
    tensors = load_file(packed / "model.safetensors")
    ends = {"scales": "scales", "zeros": "qzeros", "bytes": "qweight", "order": "g_idx"}
    name = f"{STEM}.{ends.get(damage.split()[-1], 'qweight')}"
    match damage.split()[0]:
        case "short":
            tensors[name] = tensors[name][:-1].clone()
        case "codes":
            tensors[name] = tensors[name].to(torch.int8)
        case "order":
            tensors[name] = tensors[name] + (torch.arange(128) == 5).int()
        case "other":
            tensors[name] = tensors[name] - 1
        case _ if damage == "no codes":
            tensors = load_file(plain / "model.safetensors")
        case _:
            del tensors[name]
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_base(str(packed))
    assert part.format(stem=STEM) in str(caught.value) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (GPTQ | {"desc_act": True}, "GPTQ has packed it with desc_act True"),
        (GPTQ | {"bits": 8}, "GPTQ has packed it with bits 8"),
        (GPTQ | {"sym": None}, "GPTQ has packed it with sym None"),
        (GPTQ | {"lm_head": True}, "GPTQ has packed it with lm_head True"),
        (GPTQ | {"pack_dtype": "int16"}, "GPTQ has packed it with pack_dtype int16"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ has packed it with format marlin"),
        (GPTQ | {"is_marlin_format": True}, "GPTQ has packed it with format marlin"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "GPTQ has packed it with other settings for some linears (dynamic)"),
        (GPTQ | {"group_size": 0}, "GPTQ has packed it with group_size 0"),
        (GPTQ | {"group_size": None}, "GPTQ has packed it with group_size None"),
        (GPTQ | {"modules_in_block_to_quantize": 3}, "GPTQ has packed it with modules_in_block_to_quantize 3"),
        (AWQ | {"bits": 3}, "AWQ has packed it with bits 3"),
        (AWQ | {"version": "gemv"}, "AWQ has packed it with version gemv"),
        (AWQ | {"backend": "llm-awq"}, "AWQ has packed it with version llm-awq"),
        (AWQ | {"zero_point": False}, "AWQ has packed it with zero_point False"),
        (AWQ | {"lm_head": True}, "AWQ has packed it with lm_head True"),
        (AWQ | {"group_size": 3}, "AWQ has packed it with group_size 3"),
        (AWQ | {"dynamic": {"-:.*down.*": {}}}, "AWQ has packed it with other settings for some linears (dynamic)"),
        (AWQ | {"modules_to_not_convert": "lm_head"}, "AWQ has packed it with modules_to_not_convert lm_head"),
    ],
    ids=str,
)
def test_other_settings_are_refused_by_name(settings: dict[str, Any], part: str, plain: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(plain, tmp_path / "odd"))
    edit(odd / "config.json", quantization_config=settings)
    with pytest.raises(ModelError, match=r"Use the original model \(base_precision: nf4 packs it in 4 bits at load\)") as caught:
        load_base(str(odd))
    assert f"base_model {odd}: {part}. Read are 4 bits" in str(caught.value) and "\n" not in str(caught.value)


def test_linears_that_a_config_names_alone_are_counted_packed(plain: Path, tmp_path: Path) -> None:
    parts = [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.down_proj"]]
    odd = Path(shutil.copytree(plain, tmp_path / "odd"))
    edit(odd / "config.json", quantization_config=GPTQ | {"modules_in_block_to_quantize": parts})
    held = {name for name, module in outline(str(odd)).model.named_modules() if isinstance(module, HeldLinear)}
    assert held == {f"model.layers.{n}.{name}" for n in range(1) for part in parts for name in part}
