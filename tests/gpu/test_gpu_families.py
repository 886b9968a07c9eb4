"""Families that people train, through `tlora.train` on tiny bases: an SFT and a DPO job beside one with dropout. The last two go one sample
at a time.

In bf16 they train; in fp32 the first two equal PEFT with `torch.optim.AdamW` in fp64. The same on a CPU for some of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
import transformers
from torch import Tensor

import tlora
from tests.data.chat_templates import CHATML, make_tokenizer
from tests.engine.tiny_runs import sentence
from tests.numerics.peft_oracle import delta_weight, make_peft, peft_modules, scheduler
from tests.tolerances import TRAINED, assert_close
from tlora.adapters.peft import load_params
from tlora.adapters.state import init_state
from tlora.data.dataset import Dataset, Sample
from tlora.data.prepare import Prepared, prepare
from tlora.data.request import prepare_requests
from tlora.job import JobSpec, RunSpec
from tlora.supermodel.load import outline
from tlora.supermodel.supermodel import SuperModel

SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
PER_LAYER = {"hidden_size_per_layer_input": 16, "head_dim": 32}
LAST_TWO_SHARE = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
}  # fmt: skip
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}
MAMBA = {"num_experts": 1, "mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
GROUPED = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 48}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 32, "sliding_window": 7}),
    "gemma3": (transformers.Gemma3TextConfig, {"head_dim": 32, **ALTERNATING}),
    "gemma4": (transformers.Gemma4TextConfig, {**ALTERNATING, **PER_LAYER, "global_head_dim": 64}),
    "gemma4-wide": (transformers.Gemma4TextConfig, {**ALTERNATING, **PER_LAYER, "head_dim": 256, "global_head_dim": 512}),
    "gemma4-shared": (transformers.Gemma4TextConfig, {**PER_LAYER, **LAST_TWO_SHARE, "global_head_dim": 64}),
    "phi3": (transformers.Phi3Config, {}),
    "olmo2": (transformers.Olmo2Config, {}),
    "olmo3": (transformers.Olmo3Config, ALTERNATING),
    "cohere": (transformers.CohereConfig, {}),
    "glm4": (transformers.Glm4Config, {"head_dim": 32}),
    "deepseek-v3": (transformers.DeepseekV3Config, {**LATENT, **GROUPED, "num_experts_per_tok": 3, "moe_intermediate_size": 96}),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (transformers.Qwen3MoeConfig, {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96}),
    "gpt-oss": (transformers.GptOssConfig, {**ALTERNATING, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": (transformers.GPT2Config, {}),
    "jamba": (transformers.JambaConfig, MAMBA),
    "mpt": (transformers.MptConfig, {"d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "expansion_ratio": 2}),
}
ON_A_CPU = ("llama", "gemma4", "gemma4-shared", "qwen3-moe", "deepseek-v3", "gpt-oss")  # in every run; all of them in `make soak`
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CASES = [
    *(pytest.param(family, "cuda", marks=NEEDS_GPU) for family in FAMILIES),
    *(pytest.param(family, "cpu", marks=[pytest.mark.slow] if family in ON_A_CPU else [pytest.mark.soak]) for family in FAMILIES),
]
STEPS, PAIRS, BETA = 3, 4, 0.2
TARGETS = {"deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]}
"""Where it is not all-linear: PEFT takes the dense layers' names for the experts' too."""


def save_base(directory: Path, family: str) -> None:
    """As most make one: `AutoModelForCausalLM.from_config(...).save_pretrained`."""
    kind, special = FAMILIES[family]
    tokenizer = make_tokenizer(CHATML)
    tokenizer.save_pretrained(directory)
    vocabulary = {"vocab_size": len(tokenizer) + 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if "hidden_size_per_layer_input" in special:
        vocabulary["vocab_size_per_layer_input"] = vocabulary["vocab_size"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(kind(**{**SHAPE, **vocabulary, **special}))
        with torch.no_grad():  # of the size that trained weights have: attention and experts then choose
            for name, p in model.named_parameters():
                p.mul_(3) if p.ndim > 1 else p.add_(torch.randn_like(p) * 0.1)
                if "gemma4" in family and name.endswith(("q_norm.weight", "k_norm.weight")):
                    p.mul_(len(p) ** -0.25)  # its scores are not divided by sqrt(size): fp32's rounding would decide whom a token sees
    model.save_pretrained(directory)


def write_pairs(path: Path) -> Path:
    rng = random.Random(3)
    rows = [{"prompt": sentence(rng, 1, 3), "chosen": f" {sentence(rng)}", "rejected": f" {sentence(rng)}"} for _ in range(PAIRS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_texts(path: Path) -> Path:
    rng = random.Random(4)
    path.write_text("".join(json.dumps({"prompt": sentence(rng, 1, 4), "completion": sentence(rng)}) + "\n" for _ in range(PAIRS)))
    return path


def order(directory: Path, dtype: str, family: str) -> RunSpec:
    """Each global batch is a job's whole data, so that the order of samples adds nothing but rounding."""
    shared: dict[str, Any] = {"batch_size": PAIRS, "max_steps": STEPS, "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    shared["adam_epsilon"] = 1e-5  # a gradient that is nearly 0 makes no whole step, whose sign rounding would choose
    shared["target_modules"] = TARGETS.get(family, "all-linear")
    texts, pairs = str(write_texts(directory / "texts.jsonl")), str(write_pairs(directory / "pairs.jsonl"))
    jobs = [
        {"name": "sft", "data": texts, "r": 8, "seed": 1},
        {"name": "dpo", "data": pairs, "r": 4, "objective": "dpo", "beta": BETA, "seed": 2},
        {"name": "dropout", "data": texts, "r": 16, "lora_dropout": 0.1, "seed": 3},
    ]
    specs = [JobSpec.model_validate(shared | job) for job in jobs]
    return RunSpec(base_model=str(directory / "base"), output_dir=str(directory / dtype), dtype=dtype, jobs=specs)  # type: ignore[arg-type]


def log_probabilities(model: Any, sample: Sample) -> Tensor:
    """Of the trained tokens of one sequence, weighted and summed."""
    ids = torch.from_numpy(sample.input_ids).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return -(F.cross_entropy(logits, ids[1:], reduction="none") * torch.from_numpy(sample.loss_weights[1:])).sum()


def answers(pair: Sample) -> list[Sample]:
    """The chosen and the rejected one."""
    cut = pair.lengths[0]
    return [Sample(pair.input_ids[part], pair.loss_weights[part]) for part in (slice(cut), slice(cut, None))]


def loss_of(model: Any, spec: JobSpec, data: Dataset) -> Tensor:
    samples = [data[i] for i in range(len(data))]
    if spec.objective == "sft":
        trained = sum(sample.trained for sample in samples)
        return -torch.stack([log_probabilities(model, sample) for sample in samples]).sum() / trained
    losses: list[Tensor] = []
    for pair in samples:
        chosen, rejected = (log_probabilities(model, answer) for answer in answers(pair))
        with torch.no_grad(), model.disable_adapter():
            before = [log_probabilities(model, answer) for answer in answers(pair)]
        losses.append(-F.logsigmoid(spec.beta * ((chosen - before[0]) - (rejected - before[1]))))
    return torch.stack(losses).mean()


def peft_train(base: str, spec: JobSpec, data: Dataset) -> dict[str, Tensor]:
    """Weight change of each module, in fp64 on the CPU."""
    layout = SuperModel(outline(base, "float32")).layout(spec)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model.set_experts_implementation("eager")  # torch's grouped product takes no fp64
    named = spec.model_copy(update={"target_modules": [shape.module for shape in layout.shapes]})
    adapted = make_peft(model, named, layout, init_state(layout, spec.seed, torch.float32).params)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    betas = (spec.adam_beta1, spec.adam_beta2)
    optimizer = torch.optim.AdamW(trained, spec.learning_rate, betas, spec.adam_epsilon, spec.weight_decay)
    schedule = scheduler(spec, optimizer, STEPS)
    for _ in range(STEPS):
        loss_of(adapted, spec, data).backward()
        torch.nn.utils.clip_grad_norm_(trained, spec.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: delta_weight(module) for name, module in peft_modules(adapted).items()}


def our_change(run: RunSpec, spec: JobSpec) -> dict[str, Tensor]:
    layout = SuperModel(outline(run.base_model, "float32")).layout(spec)
    params = load_params(Path(run.output_dir) / spec.name, layout, torch.float64)
    return {shape.module: shape.scale * (b_rN.t() @ a_rK) for shape, a_rK, b_rN in layout.views(params)}


@pytest.mark.parametrize(("family", "device"), CASES)
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")  # PEFT, of keys of its own for experts
def test_it_trains_in_bf16_and_equals_peft_in_fp32(family: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_CACHE", str(tmp_path / "cache"))
    save_base(tmp_path / "base", family)
    for dtype in ("bfloat16", "float32"):
        run = order(tmp_path, dtype, family)
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            results = tlora.train(run, device=device)
        assert {name: result.status for name, result in results.items()} == dict.fromkeys(("sft", "dpo", "dropout"), "done"), results
        losses = [result.train_loss for result in results.values()]
        assert np.isfinite(losses).all() and results["sft"].train_loss < results["sft"].train_loss_first, losses
    found = prepare(prepare_requests(run, SuperModel(outline(run.base_model, "float32")).base.vocab_size))
    for spec in run.jobs[:2]:
        data = found[spec.name]
        assert isinstance(data, Prepared)
        expected, ours = peft_train(run.base_model, spec, data.train), our_change(run, spec)
        assert expected.keys() == ours.keys()
        for name, change in expected.items():
            assert_close(ours[name], change, TRAINED[torch.float32], f"{family}: {spec.name}, {name}")
