"""Checkpoints that compressed-tensors has packed in 4 bits: its own bits, adapters over them, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cases import in_every_run
from tests.kernels.interpreter import interpreted
from tests.supermodel.packed_bases import check_adapters, edit, save_plain, unpack
from tlora.errors import ModelError
from tlora.job import LoraConfig
from tlora.kernels.packed_weight import PackedWeight
from tlora.supermodel import kernels_ahead, supermodel
from tlora.supermodel.compressed_tensors_format import open_format
from tlora.supermodel.held_linear import HeldLinear
from tlora.supermodel.load import load_base, outline
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.tensor_files import find_tensors

with interpreted():
    from tlora.kernels import compile_ahead
    from tlora.kernels.compile_request import CompileRequest

KEY = "model.layers.0.self_attn.q_proj.weight"
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True}
ZERO: dict[str, Any] = INT4 | {"symmetric": False, "strategy": "group", "group_size": 32}
GROUP = INT4 | {"strategy": "group", "group_size": 128}
CHANNEL = INT4 | {"strategy": "channel"}
NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
SCHEMES = {"group": GROUP, "channel": CHANNEL, "nvfp4": NVFP4, "mxfp4": MXFP4, "zero": ZERO, "channel zero": CHANNEL | {"symmetric": False}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_plain(tmp_path_factory.mktemp("plain") / "base", hidden_size=128, intermediate_size=256, head_dim=32)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 60 and 44 numbers, whose last int32 is half full."""
    return save_plain(tmp_path_factory.mktemp("uneven") / "base", hidden_size=60, intermediate_size=44, head_dim=24)


def pack(plain: Path, directory: Path, weights: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",)) -> tuple[Path, dict[str, Tensor]]:
    """The base as compressed-tensors packs it, and by linear what it makes of that."""
    model: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore)))
    quantized = {name: module for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    for module in quantized.values():
        weight, is_nvfp4 = module.weight.detach(), weights["strategy"] == "tensor_group"
        groups = weight.unflatten(1, (-1, weights.get("group_size") or weight.shape[1]))
        if is_nvfp4:
            module.weight_global_scale.data = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        given = {"global_scale": module.weight_global_scale} if is_nvfp4 else {}
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args, **given)
        module.weight_scale.data = scale.to(module.weight_scale.dtype)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    shutil.copytree(plain, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, directory / "model.safetensors", {"format": "pt"})
    compressor.update_config(str(directory))
    compressor.decompress_model(model)
    return directory, {name: module.weight.detach() for name, module in quantized.items()}


@pytest.mark.parametrize(
    "ignore", in_every_run([(("lm_head",),), (("lm_head", "re:.*mlp.*", "model.layers.1.self_attn.q_proj"),)], 1), ids=["head", "more"]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_are_compressed_tensors_own(scheme: str, ignore: tuple[str, ...], plain: Path, tmp_path: Path) -> None:
    packed, values = pack(plain, tmp_path / "packed", SCHEMES[scheme], ignore)
    loaded, counted = load_base(str(packed), "bfloat16"), outline(str(packed), "bfloat16")
    held = {name: module for name, module in loaded.model.named_modules() if isinstance(module, HeldLinear)}
    assert held.keys() == values.keys() and len(held) == (14 if len(ignore) == 1 else 7)
    for name, linear in held.items():
        assert values[name].dtype == torch.bfloat16
        assert torch.equal(linear.look_up().dense(torch.bfloat16), values[name]), name
    assert torch.equal(loaded.model.lm_head.weight, AutoModelForCausalLM.from_pretrained(plain).lm_head.weight)
    assert (counted.num_bytes, counted.num_parameters) == (loaded.num_bytes, loaded.num_parameters)
    assert {n for n, m in counted.model.named_modules() if isinstance(m, HeldLinear)} == held.keys()


@pytest.mark.parametrize("scheme", ["channel", "channel zero"])
def test_rows_that_fill_no_whole_int32(scheme: str, uneven: Path, tmp_path: Path) -> None:
    packed, values = pack(uneven, tmp_path / "packed", SCHEMES[scheme])
    loaded, counted = load_base(str(packed)), outline(str(packed))
    for name, value in values.items():
        assert torch.equal(loaded.model.get_submodule(name).look_up().dense(torch.bfloat16), value), name
    assert counted.num_bytes == loaded.num_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("scheme", ["group", pytest.param("zero", marks=pytest.mark.slow), "nvfp4"])
def test_every_code_with_every_scale(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """All finite scales of 16 bits, with all zero points, and of fp8 under many global scales; 0 times a code keeps its sign."""
    args, key, globals_ = QuantizationArgs(**SCHEMES[scheme]), "x.weight", list[float]()
    if scheme != "nvfp4":
        scales = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
        codes = 0x76543210 | torch.tensor([0, 0x88888888 - (1 << 32)])
        size = SCHEMES[scheme]["group_size"]
        words = codes.to(torch.int32).repeat(size // 16)
    else:
        scales = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
        words, size = (torch.arange(8) * 34 + 16).to(torch.uint8), 16
        between = 1 + torch.arange(1, 256, 2) / 256  # of two neighbours in bfloat16: there an fp32 quotient's last bit shows
        globals_ = [1234.567, *(torch.tensor([1.125, 1.375, 1.75])[:, None] / between).flatten().tolist()]
    scales = scales[scales.float().isfinite()][:, None]
    if scheme == "nvfp4":
        variants = [{"_global_scale": torch.tensor([number])} for number in globals_]
    else:
        zeros = [(0x11111111 * zero + 2**31) % 2**32 - 2**31 for zero in range(16 if scheme == "zero" else 0)]
        points = [{"_zero_point": torch.full((-(-len(scales) // 8), 1), zero, dtype=torch.int32)} for zero in zeros]
        variants = [{"_shape": torch.tensor([len(scales), size])} | more for more in points or [{}]]
    for variant in variants:
        tensors = {f"{key}_packed": words.repeat(len(scales), 1), f"{key}_scale": scales}
        tensors |= {key + end: tensor for end, tensor in variant.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "x.safetensors")
        layout = "nvfp4-pack-quantized" if scheme == "nvfp4" else "pack-quantized"
        given = {name.removeprefix("x."): tensor for name, tensor in tensors.items()}
        expected = BaseCompressor.get_value_from_registry(layout).decompress(given, QuantizationScheme(targets=["Linear"], weights=args))
        form = open_format({"format": layout, "config_groups": {"0": {"targets": ["Linear"], "weights": SCHEMES[scheme]}}}, "x")
        found = form.find(find_tensors([tmp_path / "x.safetensors"]))[key]
        assert len(set(words.view(torch.uint8).tolist())) == 8
        for computes in (dtype, torch.float32):
            dense = found.read(computes).dense(computes)
            assert dense.dtype == computes and torch.equal(dense, expected["weight"].to(computes))
            assert torch.equal(dense.signbit(), expected["weight"].signbit())


def test_mxfp4_with_every_code_and_every_scale(tmp_path: Path) -> None:
    """As the library has it, and as the OCP defines it: (-1)^sign x 2^(scale - 127) x {0, 0.5, 1, 1.5, 2, 3, 4, 6}."""
    key, scales = "x.weight", torch.arange(256).to(torch.uint8)[:, None]
    words = (torch.arange(16) % 8 * 34 + 16).to(torch.uint8)
    tensors = {f"{key}_packed": words.repeat(256, 1), f"{key}_scale": scales}
    save_file(tensors, tmp_path / "x.safetensors")
    layout = "mxfp4-pack-quantized"
    given = {name.removeprefix("x."): tensor for name, tensor in tensors.items()}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**MXFP4))
    theirs: Any = BaseCompressor.get_value_from_registry(layout).decompress(given, scheme)["weight"]
    form = open_format({"format": layout, "config_groups": {"0": {"targets": ["Linear"], "weights": MXFP4}}}, "x")
    found = form.find(find_tensors([tmp_path / "x.safetensors"]))[key].read(torch.bfloat16).dense(torch.bfloat16)
    codes = [code for word in words.tolist() for code in (word & 15, word >> 4)]
    assert set(codes) == set(range(16)) and found.shape == (256, 32)
    sizes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    defined = [[math.ldexp((-1) ** (code >> 3) * sizes[code & 7], scale - 127) for code in codes] for scale in range(255)]
    assert torch.equal(found[:255], torch.tensor(defined, dtype=torch.float64).bfloat16())
    for mine, true in ((found.signbit(), theirs.signbit()), (found.isnan(), theirs.isnan()), (found.nan_to_num(), theirs.nan_to_num())):
        assert torch.equal(mine, true)
    assert not bool(found[255].isfinite().any()), "255 means NaN"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_adapters_are_those_over_the_checkpoint_that_it_stands_for(scheme: str, plain: Path, tmp_path: Path) -> None:
    packed, values = pack(plain, tmp_path / "packed", SCHEMES[scheme])
    unpacked = unpack(packed, values, tmp_path / "unpacked")
    check_adapters(packed, unpacked, plain, tmp_path)


def test_kernels_of_all_widths_are_compiled_ahead(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale for a row, groups are as long as the inputs are wide."""
    packed, _ = pack(plain, tmp_path / "packed", SCHEMES["channel zero"])
    ordered: list[CompileRequest] = []
    monkeypatch.setattr(supermodel, "why_not_fused", lambda *_: None)
    monkeypatch.setattr(kernels_ahead, "request_for", lambda *_: CompileRequest("a GPU", 90, 1, "bfloat16", 16, False, ()))
    monkeypatch.setattr(compile_ahead, "start", ordered.append)
    SuperModel(outline(str(packed))).compile_ahead(torch.device("cuda"), [LoraConfig(r=4)])
    forms = [m.form for m in load_base(str(packed)).model.modules() if isinstance(m, HeldLinear)]
    kinds = {(form.group, form.value_dtype, form.zero is not None) for form in forms if isinstance(form, PackedWeight)}
    (order,) = ordered
    assert {(each.group, getattr(torch, each.value_dtype), each.zero) for each in order.packed} == kinds
    assert {group for group, _, _ in kinds} == {128, 256} and len(order.packed) == 2


@pytest.mark.parametrize(
    "damage", ["scales", "shape", "short codes", "short scales", "other shape", "zero points", "order", "no codes", "cut file", "no tensor"]
)
def test_what_does_not_fit_together_is_one_message(damage: str, plain: Path, tmp_path: Path) -> None:
    packed, _ = pack(plain, tmp_path / "packed", GROUP)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    part = f"{KEY} is packed by compressed-tensors, and cannot be read: "
    match damage:
        case "scales" | "shape":
            end = "_scale" if damage == "scales" else "_shape"
            del tensors[KEY + end]
            part += f"lacks '{KEY}{end}'"
        case "short codes":
            tensors[f"{KEY}_packed"] = tensors[f"{KEY}_packed"][:, :-1].clone()
            part += "[128, 15] in torch.int32 is not half a byte for each of [128, 128]"
        case "short scales":
            tensors[f"{KEY}_scale"] = tensors[f"{KEY}_scale"][:-1].clone()
            part += "scales [127, 1] in torch.bfloat16 for [128, 128] in groups of 128"
        case "other shape":
            tensors[f"{KEY}_shape"] = torch.tensor([3])
            part += "the shape [3] is no matrix"
        case "zero points" | "order":
            end = "_zero_point" if damage == "zero points" else "_g_idx"
            tensors[KEY + end] = torch.zeros(128, dtype=torch.int32)
            part += f"it has {KEY}{end}"
        case "no codes":
            del tensors[f"{KEY}_packed"]
            part = f"1 tensor is missing or of another shape, {KEY} first"
        case "no tensor":
            tensors = load_file(plain / "model.safetensors")
            part = "no tensor of its files is packed"
        case _:
            part = "cut off or damaged"
    if damage == "cut file":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_base(str(packed))
    assert part in str(caught.value) and "\n" not in str(caught.value), caught.value


@pytest.mark.parametrize("damage", ["none", "short", "scaleless"])
def test_zero_points_that_do_not_fit(damage: str, plain: Path, tmp_path: Path) -> None:
    packed, _ = pack(plain, tmp_path / "packed", ZERO)
    file, name = packed / "model.safetensors", f"{KEY}_zero_point"
    tensors = load_file(file)
    match damage:
        case "none":
            del tensors[name]
            part = f"lacks '{name}'"
        case "short":
            tensors[name] = tensors[name][:-1].clone()
            part = "zero points [15, 4] in torch.int32 for [128, 4] scales"
        case _:
            tensors[name] = tensors[name].to(torch.int64)
            part = "zero points [16, 4] in torch.int64"
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_base(str(packed))
    assert f"{KEY} is packed by compressed-tensors, and cannot be read: {part}" in str(caught.value), caught.value


@pytest.mark.parametrize("damage", ["global scale", "codes", "scales"])
def test_nvfp4_that_does_not_fit_together(damage: str, plain: Path, tmp_path: Path) -> None:
    packed, _ = pack(plain, tmp_path / "packed", NVFP4)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    match damage:
        case "global scale":
            tensors[f"{KEY}_global_scale"] = torch.ones(2)
            part = f"{KEY}_global_scale is not one number in fp32"
        case "codes":
            tensors[f"{KEY}_packed"] = tensors[f"{KEY}_packed"][0].clone()
            part = f"{KEY}_packed is [64], and no matrix"
        case _:
            tensors[f"{KEY}_scale"] = tensors[f"{KEY}_scale"].bfloat16()
            part = "scales [128, 8] in torch.bfloat16 for [128, 128] in groups of 16"
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_base(str(packed))
    assert part in str(caught.value) and "\n" not in str(caught.value), caught.value


W4 = {"targets": ["Linear"], "weights": GROUP}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"format": "float-quantized"}, "format float-quantized"),
        ({"format": "mixed-precision"}, "format mixed-precision"),
        ({"kv_cache_scheme": TOKENS}, "kv_cache_scheme"),
        ({"transform_config": {"config_groups": {"r": {}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"config_groups": {"0": W4 | {"input_activations": TOKENS}}}, "input_activations quantised too"),
        ({"config_groups": {"0": W4 | {"targets": ["re:.*mlp.*"]}}}, "targets ['re:.*mlp.*']"),
        ({"config_groups": {"0": W4 | {"weights": GROUP | {"actorder": "group"}}}}, "actorder group"),
        ({"config_groups": {"0": W4 | {"weights": NVFP4 | {"symmetric": False}, "format": "nvfp4-pack-quantized"}}}, "symmetric False"),
        ({"config_groups": {"0": W4 | {"weights": GROUP | {"num_bits": 8}}}}, "num_bits 8"),
        ({"config_groups": {"0": W4 | {"weights": GROUP | {"type": "float"}}}}, "type float"),
        ({"config_groups": {"0": W4 | {"weights": GROUP | {"strategy": "block"}}}}, "strategy block"),
        ({"config_groups": {"0": W4 | {"weights": GROUP | {"group_size": -1}}}}, "group_size -1"),
        ({"config_groups": {"0": W4 | {"weights": NVFP4 | {"group_size": 32}, "format": "nvfp4-pack-quantized"}}}, "group_size 32"),
        ({"config_groups": {"0": W4 | {"weights": MXFP4 | {"group_size": 16}, "format": "mxfp4-pack-quantized"}}}, "group_size 16"),
        ({"config_groups": {"0": W4, "1": W4}}, "a quantization_config that is not one group of linears"),
        ({"config_groups": {}}, "a quantization_config that is not one group of linears"),
        ({"config_groups": 3}, "a quantization_config that is not one group of linears"),
        ({"config_groups": {"0": {"targets": ["Linear"]}}}, "a quantization_config that is not one group of linears"),
        ({"ignore": ["re:("]}, "a quantization_config that is not one group of linears"),
    ],
    ids=str,
)
def test_other_schemes_are_refused_by_name(changes: dict[str, Any], part: str, plain: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(plain, tmp_path / "odd"))
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": W4}} | changes
    edit(odd / "config.json", quantization_config=settings)
    with pytest.raises(ModelError, match=r"Use the original model \(base_precision: nf4 packs it in 4 bits at load\)") as caught:
        load_base(str(odd))
    assert f"compressed-tensors has packed it with {part}" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("order", ["weight", "static", None, False])
def test_an_order_of_calibration_alone_changes_no_weight(order: str | bool | None, plain: Path, tmp_path: Path) -> None:
    packed, values = pack(plain, tmp_path / "packed", GROUP)
    settings = json.loads((packed / "config.json").read_text())["quantization_config"]
    settings["config_groups"]["group_0"]["weights"]["actorder"] = order
    edit(packed / "config.json", quantization_config=settings)
    name = KEY.removesuffix(".weight")
    assert torch.equal(load_base(str(packed)).model.get_submodule(name).look_up().dense(torch.bfloat16), values[name])
