"""What is trained can be planned: `check` and `plan` count every family without its weights, for a CPU and for GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from bench.families import families, tiny
from bench.timm_towers import small_towers
from tlora.errors import ModelError
from tlora.kernels.device import as_if_on
from tlora.planning.base_outline import describe_base
from tlora.supermodel.load import load_config, outline
from tlora.supermodel.multiply_adds import active_weights
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.text_model import auto_class
from tlora.supermodel.weight_files import check_weights

(FOUND,) = (Path(__file__).parents[2] / "bench/results").glob("cpu_*_families.json")
TRAINED = {row["family"]: row for row in json.loads(FOUND.read_text())["rows"] if row["state"] == "trained"}
IN_EVERY_RUN = ("llama", "dbrx", "longcat_flash", "unlimited_ocr", "xlstm")
"""The latter four: experts that look up, on the host, where tokens go, in rows of one matrix or each in one of its own, a tower that knows
no attention but its own, and layers that take no 16 bits.
"""


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.slow) for name in TRAINED])
@pytest.mark.filterwarnings("ignore")  # of transformers, about configs as tiny as these
@small_towers()
def test_a_family_that_is_trained_is_planned(family: str, passing_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    if family not in families():
        pytest.skip("not in this transformers")
    config = tiny(families()[family])
    auto_class(config).from_config(config, dtype=torch.float32).save_pretrained(passing_path)
    try:
        check_weights(str(passing_path), load_config(str(passing_path)))
    except ModelError:  # transformers writes other names than it reads (ShieldGemma 2)
        pytest.skip("its files are not read again")
    base = describe_base(str(passing_path), "float32", None, "cpu", "ignore")
    if TRAINED[family]["experts"]:
        model = SuperModel(outline(str(passing_path), "float32"))
        assert sum(active_weights(model, False).values()) > 0, "experts that multiply tokens with nothing"
        adapted = describe_base(str(passing_path), "float32", None, "cpu", "ignore", adapts_experts="some")
        assert adapted.parts.memory.activation_bytes(64) > 0
    assert base.parts.memory.activation_bytes(64) > 0

    for deterministic in (False, True):
        with as_if_on("NVIDIA H100 80GB HBM3", 90):
            if family == "xlstm":
                with pytest.raises(ModelError, match=r"in bfloat16: .* set dtype: float32"):
                    describe_base(str(passing_path), "bfloat16", None, "cuda", "ignore", deterministic=deterministic)
                continue
            base = describe_base(str(passing_path), "bfloat16", None, "cuda", "ignore", deterministic=deterministic)
            assert base.parts.memory.activation_bytes(64) > 0
