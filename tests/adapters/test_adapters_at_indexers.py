"""Adapters that PEFT puts at indexers too (DeepSeek-V3.2, GLM-5, MiniMax-M3): continued as PEFT continues them, or refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny_runs import CHATML, job, make_tokenizer, run_spec, write_rows
from tests.numerics.peft_oracle import fp64_throughout, peft_modules, sample_loss
from tests.numerics.test_indexed_attention import LATENT, LIMIT
from tests.numerics.two_jobs import samples
from tests.numerics.world import Job
from tests.planted import planted
from tests.tiny import make_model
from tests.tolerances import LOGITS, TRAINED, assert_close
from tlora.adapters import peft as files
from tlora.adapters.peft import CONFIG_FILE, WEIGHTS_FILE, load_params, save_adapter
from tlora.adapters.state import fresh_state
from tlora.adapters.targets import in_indexer
from tlora.engine.check import check
from tlora.errors import ModelError
from tlora.job import JobSpec, LoraConfig, TrainConfig
from tlora.planning.start import adopt_adapter_config
from tlora.supermodel.batch import collate
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.numbers import are, quantity

EVERY = [*LATENT, "wk", "wq_b", "weights_proj"]  # of attention; PEFT's all-linear adapts routers too, which stay frozen here
CASES = {
    "deepseek-v3.2": ("deepseek-v3.2", EVERY, torch.float64),
    "deepseek-v3.2 by pattern": ("deepseek-v3.2", r".*\.(wk|wq_b|q_b_proj|o_proj)", torch.float64),
    "glm-5": ("glm-5", EVERY, torch.float32),  # products of experts take no fp64
    "minimax-m3": ("minimax-m3", ["q_proj", "v_proj"], torch.float64),
    "minimax-m3 all": ("minimax-m3", "all-linear", torch.float64),
}
TRAIN = TrainConfig(learning_rate=3e-3, batch_size=3, weight_decay=0.1, max_grad_norm=0.3, lr_scheduler_type="constant")
ORDER = JobSpec.model_validate({"name": "a", "data": "-"})


def made(family: str, targets: Any, dtype: torch.dtype, **settings: Any) -> Any:
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make_model(family, dtype)
        model.set_attn_implementation("eager")
        return peft.get_peft_model(model, config)


def stepped(model: Any, work: Job) -> Any:
    """After a step of AdamW that begins."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, TRAIN.learning_rate, weight_decay=TRAIN.weight_decay)
    for index in work.batch(0):
        sample_loss(model, work, 0, index).backward()
    torch.nn.utils.clip_grad_norm_(trained, TRAIN.max_grad_norm)
    optimizer.step()
    return model


def saved(model: Any, directory: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):  # that the base has no directory of its own
        model.save_pretrained(str(directory))
    return directory


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of PEFT, which looks for experts too
def test_it_goes_on_as_in_peft(case: str, tmp_path: Path) -> None:
    family, targets, dtype = CASES[case]
    work = Job("a", LoraConfig(), TRAIN, samples(1, (LIMIT, 17, 3)), steps=1)
    with fp64_throughout():
        start = saved(stepped(made(family, targets, dtype), work), tmp_path / "theirs")
        spec, notes = adopt_adapter_config(ORDER, start)
        inside = {name for name in load_file(start / WEIGHTS_FILE) if in_indexer(name)}
        left_out = f"{quantity(len(inside) // 2, 'layer')} of {start} {are(len(inside) // 2)} in indexers, and left out"
        assert inside and [left_out in note for note in notes] == [True]
        shared = SuperModel(make_base(make_model(family, dtype), family))
        layout = shared.layout(spec)
        shared.join("a", spec, TRAIN, state=fresh_state(layout, load_params(start, layout, dtype)))
        shared.forward_backward(collate([work.row(0, index) for index in work.batch(0)]))
        shared.optim_step(["a"])
        params = shared.leave("a").params
        base = make_model(family, dtype)
        base.set_attn_implementation("eager")
        theirs = stepped(peft.PeftModel.from_pretrained(base, str(start), is_trainable=True), work)
        modules = peft_modules(theirs)
        assert {shape.module for shape in layout.shapes} == {name for name in modules if not in_indexer(name)}
        for name, module in modules.items():
            if in_indexer(name):
                assert not module.get_delta_weight("default").any(), name
        for shape, a, b in layout.views(params):
            assert_close(shape.scale * (b.t() @ a), modules[shape.module].get_delta_weight("default"), TRAINED[dtype], shape.module)
        (tmp_path / "ours").mkdir()
        save_adapter(tmp_path / "ours", layout, params, spec, "base")
        plain = make_model(family, dtype)
        plain.set_attn_implementation("eager")
        ours = peft.PeftModel.from_pretrained(plain, str(tmp_path / "ours"))
        assert peft_modules(ours).keys() == {shape.module for shape in layout.shapes}
        ids = torch.arange(3, 3 + 100)[None]  # longer than what an indexer chooses
        with torch.no_grad():
            assert_close(ours(input_ids=ids).logits, theirs(input_ids=ids).logits.double(), LOGITS[dtype], "logits")


def test_patterns_that_mean_indexers_alone_are_left_out(tmp_path: Path) -> None:
    settings = {"rank_pattern": {"wk": 2, "o_proj": 3}, "alpha_pattern": {"wq_b": 7}}
    start = saved(made("deepseek-v3.2", ["wk", "wq_b", "o_proj"], torch.float32, **settings), tmp_path / "theirs")
    spec, _ = adopt_adapter_config(ORDER, start)
    assert (spec.target_modules, spec.rank_pattern, spec.alpha_pattern) == (["o_proj"], {"o_proj": 3}, {})
    layout = SuperModel(make_base(make_model("deepseek-v3.2"), "base")).layout(spec)
    assert {shape.rank for shape in layout.shapes} == {3} and load_params(start, layout, torch.float32).numel() == layout.numel


def spoilt(start: Path) -> Path:
    tensors: dict[str, Tensor] = load_file(start / WEIGHTS_FILE)
    tensors[max(name for name in tensors if in_indexer(name) and "lora_B" in name)][-1, -1] = 1e-3
    save_file(tensors, start / WEIGHTS_FILE)
    return start


def test_one_that_changes_what_an_indexer_chooses_is_refused(tmp_path: Path) -> None:
    """And the remedy makes a base."""
    start = spoilt(saved(made("deepseek-v3.2", ["wk", "o_proj"], torch.float32), tmp_path / "theirs"))
    spec, _ = adopt_adapter_config(ORDER, start)
    layout = SuperModel(make_base(make_model("deepseek-v3.2"), "base")).layout(spec)
    with pytest.raises(ModelError, match=r"layers.1.self_attn.indexer.wk.lora_B.weight is not zero: .*merge_and_unload\), and train over"):
        load_params(start, layout, torch.float32)
    merged: Any = peft.PeftModel.from_pretrained(make_model("deepseek-v3.2"), str(start)).merge_and_unload()
    SuperModel(make_base(merged, "merged")).layout(LoraConfig(target_modules=["o_proj"]))


def test_one_at_indexers_alone_is_refused(tmp_path: Path) -> None:
    start = saved(made("deepseek-v3.2", ["wk"], torch.float32), tmp_path / "theirs")
    spec, _ = adopt_adapter_config(ORDER, start)
    with pytest.raises(ModelError, match="'wk' is in an indexer, which chooses tokens without gradients"):
        SuperModel(make_base(make_model("deepseek-v3.2"), "base")).layout(spec)


def test_check_says_what_is_left_out(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(tmp_path / "base")
    model = make_model("deepseek-v3.2", vocab_size=len(tokenizer) + 3)
    model.save_pretrained(tmp_path / "base")
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["wk", "o_proj"], task_type="CAUSAL_LM"))
    start = saved(theirs, tmp_path / "theirs")
    own = json.loads((start / CONFIG_FILE).read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
    (start / CONFIG_FILE).write_text(json.dumps(own))
    order = job("a", {"path": str(write_rows(tmp_path / "d.jsonl", 8)), "max_length": LIMIT}, adapter_path=str(start))
    found = check(run_spec(tmp_path / "base", tmp_path / "out", [order]), device="cpu")
    assert not found.problems and any("2 layers of" in each and "are in indexers" in each for each in found.jobs[0].warnings)
    spoilt(start)
    [problem] = check(run_spec(tmp_path / "base", tmp_path / "out", [order]), device="cpu").jobs[0].problems
    assert "is not zero: it changes which tokens an indexer chooses" in problem


# -- planted bugs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["_check_indexers", "in_indexer"])
def test_planted_bugs_are_seen(change: str, tmp_path: Path) -> None:
    """One that takes any adapter, and one that takes none."""
    start = saved(made("deepseek-v3.2", ["wk", "o_proj"], torch.float32), tmp_path / "theirs")
    layout = SuperModel(make_base(make_model("deepseek-v3.2"), "base")).layout(adopt_adapter_config(ORDER, start)[0])
    load_params(start, layout, torch.float32)
    with planted((files, change, lambda *_: False)):
        if change == "in_indexer":
            with pytest.raises(ModelError, match="has a tensor for a layer that this job does not train"):
                load_params(start, layout, torch.float32)
        else:
            load_params(spoilt(start), layout, torch.float32)
