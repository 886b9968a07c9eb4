"""Checkpoints that transformers and bitsandbytes have packed in 4 bits: their own bits, adapters over them, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.bitsandbytes_values import bitsandbytes_values
from tests.engine.tiny_runs import job, run_spec, write_rows
from tests.supermodel.packed_bases import check_adapters, edit, save_plain, unpack
from tlora.engine.check import check
from tlora.errors import ConfigError, ModelError
from tlora.sharing.host_memory import Streaming
from tlora.supermodel.held_linear import HeldLinear
from tlora.supermodel.load import load_base, outline
from tlora.supermodel.shared_base import load_shared_base

KEY = "model.layers.0.self_attn.q_proj.weight"
STATE = f"{KEY}.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in bfloat16; its rows are two groups and a half long."""
    return save_plain(tmp_path_factory.mktemp("plain") / "base", hidden_size=160, head_dim=40)


def pack(plain: Path, directory: Path, **settings: Any) -> tuple[Path, dict[str, Tensor]]:
    """The base as transformers saves it packed, and by linear what bitsandbytes makes of it in fp32."""
    wanted = BitsAndBytesConfig(load_in_4bit=True, **settings)
    model: Any = AutoModelForCausalLM.from_pretrained(plain, quantization_config=wanted, dtype=torch.bfloat16)
    shutil.copytree(plain, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(directory)
    values: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if hasattr(state := getattr(getattr(module, "weight", None), "quant_state", None), "absmax"):
            values[name] = bitsandbytes_values(module.weight.data, state)
    return directory, values


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_values_are_bitsandbytes_own(kind: str, nested: bool, plain: Path, tmp_path: Path) -> None:
    packed, values = pack(plain, tmp_path / "packed", bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested)
    model = load_base(str(packed), "bfloat16").model
    held = {name: module for name, module in model.named_modules() if isinstance(module, HeldLinear)}
    assert held.keys() == values.keys() and len(held) == 14
    for name, linear in held.items():
        assert torch.equal(linear.look_up().dense(torch.bfloat16), values[name].bfloat16()), name
    assert torch.equal(model.lm_head.weight, AutoModelForCausalLM.from_pretrained(plain).lm_head.weight)
    counted, loaded = outline(str(packed), "bfloat16"), load_base(str(packed), "bfloat16")
    assert (counted.num_bytes, counted.num_parameters) == (loaded.num_bytes, loaded.num_parameters)


@pytest.mark.slow
def test_adapters_are_those_over_the_checkpoint_that_it_stands_for(plain: Path, tmp_path: Path) -> None:
    packed, values = pack(plain, tmp_path / "packed", bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    unpacked = unpack(packed, values, tmp_path / "unpacked")
    check_adapters(packed, unpacked, plain, tmp_path)


@pytest.mark.slow
def test_a_packed_base_is_packed_no_second_time(plain: Path, tmp_path: Path) -> None:
    packed, _ = pack(plain, tmp_path / "packed", bnb_4bit_quant_type="fp4")
    with pytest.raises(ConfigError, match=r"packed already \(bitsandbytes fp4\), and base_precision nf4 would .*Take base_precision out"):
        load_base(str(packed), base_precision="nf4")
    jobs = [job("a", str(write_rows(tmp_path / "d.jsonl", 8)))]
    (problem,) = check(run_spec(packed, tmp_path / "out", jobs, base_precision="nf4"), device="cpu").problems
    assert "packed already (bitsandbytes fp4)" in problem
    assert not check(run_spec(packed, tmp_path / "out", jobs), device="cpu").problems
    nf4, values = pack(plain, tmp_path / "nf4", bnb_4bit_quant_type="nf4")
    assert sum(isinstance(m, HeldLinear) for m in load_base(str(nf4), base_precision="nf4").model.modules()) == len(values)


def test_rows_that_are_no_whole_groups_are_neither_shared_nor_streamed(plain: Path, tmp_path: Path) -> None:
    packed, _ = pack(plain, tmp_path / "packed", bnb_4bit_quant_type="nf4")
    why = "a packed base in parts or streamed needs input widths that are multiples of its groups of 64, and model.layers.0.* has 160. Use"
    with pytest.raises(ModelError, match=why):
        load_shared_base(str(packed), "bfloat16", torch.device("cpu"), None, Streaming())


@pytest.mark.parametrize("damage", ["no scales", "no state", "short nibbles", "short scales", "other state", "cut file", "no tensor"])
def test_what_does_not_fit_together_is_one_message(damage: str, plain: Path, tmp_path: Path) -> None:
    packed, _ = pack(plain, tmp_path / "packed", bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    file = packed / "model.safetensors"
    tensors = load_file(file)
    match damage:
        case "no scales":
            del tensors[f"{KEY}.absmax"]
            part = f"{KEY} is packed by bitsandbytes, and cannot be read: lacks '{KEY}.absmax'"
        case "no state":
            del tensors[STATE]
            part = "q_proj.weight"
        case "short nibbles":
            tensors[KEY] = tensors[KEY][:-1].clone()
            part = "is not half a byte for each of [160, 160]"
        case "short scales":
            tensors[f"{KEY}.absmax"] = tensors[f"{KEY}.absmax"][:-1].clone()
            part = "399 scales for [160, 160] in groups of 64"
        case "other state":
            tensors[STATE] = torch.tensor(list(b'{"shape": 3}'), dtype=torch.uint8)
            part = f"{KEY} is packed by bitsandbytes, and cannot be read"
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


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"quant_method": "hqq", "bits": 4}, "its weights are quantised (hqq)"),
        ({"quant_method": "quanto"}, "its weights are quantised (quanto)"),
        ({"bits": 4}, "its weights are quantised (unknown method)"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes has packed its weights in 8 bits"),
    ],
)
def test_other_forms_are_refused_by_name(settings: dict[str, Any], part: str, plain: Path, tmp_path: Path) -> None:
    odd = Path(shutil.copytree(plain, tmp_path / "odd"))
    edit(odd / "config.json", quantization_config=settings)
    with pytest.raises(ModelError, match="Use the original model \\(base_precision: nf4 packs it in 4 bits at load\\)") as caught:
        load_base(str(odd))
    assert part in str(caught.value)
    assert any(isinstance(m, HeldLinear) for m in load_base(str(plain), base_precision="nf4").model.modules()), "the remedy works"
