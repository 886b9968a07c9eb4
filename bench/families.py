"""Which families of transformers can be trained over: each causal model with a tiny random config, as the table of docs/reference/bases.md.

    python -m bench.families [--only llama,mixtral] [--keep FILE] [--json FILE] [--write docs/reference/bases.md]

Each family goes through the proof of a load (packed samples give the logits of its own eager attention on each alone, NaN in one reaches no
other, masks alike at all distances). Then two jobs with `all-linear` take a step together and alone: the bytes have to be equal. Where a
family has experts, two more do so with all their parameters as targets. On a CPU in fp32, by transformers as it is installed here.
"""

from __future__ import annotations

import argparse
import json
import signal
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from bench.machine import facts, write
from bench.timm_towers import small_towers
from tlora.errors import TloraError
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.load import make_any_base
from tlora.supermodel.supermodel import SuperModel
from tlora.supermodel.text_model import auto_class, has_other_modalities, leave_out_other_modalities

BEGIN, END = "<!-- begin: python -m bench.families -->", "<!-- end -->"
SECONDS = 120  # of processor time, for one family
MOST_PARAMETERS = 900_000_000  # of towers for images, most of them; these are let go before anything is run
VOCABULARY = 131
NOT_ALONE = "together is not alone to the last bit"
FUSED = "is no module of fused parameters that asks transformers' ExpertsInterface"
TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    "head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "max_position_embeddings": 256, "n_positions": 256, "sliding_window": 7, "vocab_size": VOCABULARY, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "n_groups": 1, "state_size": 8, "ssm_state_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4, "mamba_chunk_size": 16,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 16,
}  # fmt: skip
COMPARED = {
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gemma4_text", "phi3", "olmo2", "olmo3", "cohere", "glm4", "deepseek_v3",
    "mixtral", "qwen3_moe", "gpt_oss", "gemma3", "gemma4", "mistral3", "qwen3_vl", "qwen2_5_vl", "qwen3_5_text", "qwen3_next", "lfm2",
    "granitemoehybrid", "glm4_moe", "minimax_m2", "qwen3_5_moe_text", "nemotron_h", "llama4_text", "llama4", "deepseek_v32", "glm_moe_dsa",
    "minimax_m3_vl_text", "stablelm", "nemotron", "qwen4_exp_text", "deepseek_v4", "jamba", "mpt",
    "falcon", "inkling_text", "modernbert-decoder", "bert", "gemma3n", "zaya",
}  # fmt: skip
"""With PEFT, by tests/gpu/test_gpu_families.py, tests/engine/test_text_models.py, tests/numerics (hybrids, chunked and indexed attention,
handed keywords, one by one, whole models), and with experts as targets by tests/supermodel/test_expert_targets.py.
"""
OPTIONAL = ("head_dim", "num_key_value_heads")  # without which some families make no model
LAYER_TYPES = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
DECODERS_IF_TOLD = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
"""Encoders whose config says whether they are decoders."""
_NARROW = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SCALED_ROPE = _PLAIN_ROPE | {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,  # beyond which queries are scaled
    "partial_rotary_factor": 0.5,
    "llama_4_scaling_beta": 0.5,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "llama4_text": {"num_experts_per_tok": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32},
    "falcon_h1": {"mamba_d_ssm": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    **{family: {"rotary_dim": 8} for family in ("gptj", "codegen")},
    "step3p5": {"sliding_window": 7},
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 32], "rope_parameters": _PLAIN_ROPE | {"mrope_section": [3, 3, 2]}},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_topk": 16, "index_kpool": 4, "index_head_dim": 16, "index_n_heads": 2},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 16},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "4/8"},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    **{family: {"is_decoder": True} for family in DECODERS_IF_TOLD},
    "rembert": {"is_decoder": True, "output_embedding_size": 64, "input_embedding_size": 64},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "mistral4": {"head_dim": 16, "rope_parameters": _SCALED_ROPE},
    **{family: {"vocabulary_map": {"<image>": 3, "IMGIMGBZ": 7}} for family in ("chameleon", "emu3")},
    **{family: {"unpadded_vocab_size": VOCABULARY - 7} for family in ("inkling_text", "inkling2_text")},
    "inkling2_loop_text": {
        "unpadded_vocab_size": VOCABULARY - 7,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 2),
        "swa_head_dim": 16,
        "num_hidden_layers": 4,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
    },
    "hy_v4_vl_text": {"rope_parameters": _PLAIN_ROPE | {"mrope_section": [2, 1, 1]}},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 4, **dict.fromkeys(("layer_types", "layers_block_type"), ["mamba", "hybrid"] * 2)},
    "t5gemma2_encoder": {"text_config": _NARROW | {"num_key_value_heads": 2, "head_dim": 16}, "vision_config": _NARROW},
    "blt": {
        **dict.fromkeys(("patcher_config", "global_config"), _NARROW),
        **dict.fromkeys(("encoder_config", "decoder_config"), _NARROW | {"hidden_size_global": 64}),
        "encoder_hash_byte_group_vocab": 99,
    },
    "timm_wrapper": {"hidden_size": 32, "model_args": {"embed_dim": 32}},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"], "adapter_out_dim": TINY["hidden_size"]},
    "dots3_note_audio_encoder": {"adapter_out_dim": TINY["hidden_size"]},
    "deepseek_ocr2_vision": {
        "sam_config": {"num_hidden_layers": 1, "global_attn_indexes": [0]},
        "encoder_config": {"num_hidden_layers": 1, "hidden_size": 896, "intermediate_size": 96, "num_attention_heads": 14},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 0]}},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
}
"""What a class's default leaves out, or would not fit the narrow widths, by the text model's type: Gemma 4's layers with experts have its
dense ones too. Both checkpoints of Llama 4 send a token to one expert.
"""
OTHER_TYPES = {"lfm2": ["conv", "full_attention"], "lfm2_moe": ["conv", "full_attention"]}  # in checkpoints, not in the class's default
TOWER: dict[str, Any] = {
    **dict.fromkeys(("depth", "num_hidden_layers", "n_layers", "conf_num_hidden_layers"), 1),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size"), TINY["hidden_size"]),
    "video_temporal_patch_size": 2,
}
State = Literal["trained", "refused", "not tried"]


@dataclass(frozen=True, slots=True)
class Row:
    """Of one family. `adapted`: last parts of the names of the linears that `all-linear` adapts. `note`: why not, or what is trained of it.
    `experts`: those of parameters that `target_parameters` adapts, or why none are; nothing for a family without experts.
    """

    family: str
    kind: str
    state: State
    adapted: tuple[str, ...] = ()
    note: str = ""
    experts: str = ""


def families() -> dict[str, Any]:
    """Configs of all causal language models, and of the text models within checkpoints of several modalities, by their names."""
    kinds = {config.model_type: config for config in (*AutoModelForCausalLM._model_mapping, *AutoModelForImageTextToText._model_mapping)}
    return dict(sorted(kinds.items()))


def tiny(kind: Any) -> Any:
    """A config of `kind` with two narrow layers, or one of each type that its layers have; its text model's, where it has others, of which
    the towers have one layer.
    """
    whole = kind()
    try:
        text = whole.get_text_config()
    except ValueError:  # it has several
        return whole
    changes = {key: value for key, value in TINY.items() if _takes(text, key)} | _layers(text)
    changes |= _rope(text) if text is not whole else {}
    if "kv_lora_rank" in changes and "num_key_value_heads" in changes:  # latent attention has as many, and heads for positions apart
        changes["num_key_value_heads"], changes["head_dim"] = changes["num_attention_heads"], changes["qk_rope_head_dim"]
    changes |= SPECIAL.get(text.model_type, {})
    if text is whole:
        return kind(**changes)
    parts = {name: value for name, value in vars(whole).items() if isinstance(value, PretrainedConfig)}
    small = {name: {key: value for key, value in TOWER.items() if _takes(part, key)} for name, part in parts.items() if part is not text}
    inside = next(name for name, value in parts.items() if value is text)
    kinds = {name: parts[name].model_type for name in small}
    towers = {name: {**changed, **SPECIAL.get(kinds[name], {}), "model_type": kinds[name]} for name, changed in small.items()}
    return kind(**{inside: {**changes, "model_type": text.model_type}, **towers, **SPECIAL.get(whole.model_type, {})})


def _layers(text: Any) -> dict[str, Any]:
    """One of each type, so that none is left out of the proof."""
    types = {
        key: list(dict.fromkeys((OTHER_TYPES.get(text.model_type) if hasattr(text, key) else None) or getattr(text, key, None) or ()))
        for key in LAYER_TYPES
        if not isinstance(getattr(type(text), text.attribute_map.get(key, key), None), property)
    }
    count = max(2, *map(len, types.values()))
    if count == 2 and not any(len(kinds) > 1 for kinds in types.values()):
        return {}
    repeated = {key: (kinds * count)[:count] for key, kinds in types.items() if kinds}
    return {key: count for key in ("num_hidden_layers", "n_layer", "num_layers") if _takes(text, key)} | repeated


def _rope(text: Any) -> dict[str, Any]:
    """Of positions in several dimensions: as many frequencies as the narrow heads have."""
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, dict) or any(isinstance(each, dict) for each in rope.values()):  # the latter by kind of layer
        return {}
    count = int(TINY["head_dim"] * (rope.get("partial_rotary_factor") or 1.0)) // 2
    return {"rope_parameters": {**rope, "mrope_section": [count - 2 * (count // 3), count // 3, count // 3]}}


def _takes(config: Any, key: str) -> bool:
    if isinstance(getattr(type(config), key, None), property):
        return False
    try:
        return getattr(config, key, None) is not None or (key in OPTIONAL and hasattr(config, key))
    except RuntimeError:  # it may differ from layer to layer
        return True


@small_towers()
def look(family: str, kind: Any) -> Row:
    """Never raises: what a family's own code raises is a row."""
    name = kind.__name__
    try:
        config = tiny(kind)
        model_kind = auto_class(config)
        if model_kind is None:
            return Row(family, name, "refused", note="no causal head")
        with torch.device("meta"):
            size = sum(p.numel() for p in model_kind.from_config(config, dtype=torch.float32).parameters())
        if size > MOST_PARAMETERS:
            return Row(
                family, name, "not tried", note=f"no tiny model of it could be made (its config makes {size / 1e6:.0f} M parameters)"
            )
        torch.manual_seed(0)
        model = model_kind.from_config(config, dtype=torch.float32)
        leave_out_other_modalities(model)
    except _LateError:
        return Row(family, name, "not tried", note=f"takes more than {SECONDS} s")
    except Exception as error:  # a library's border: it depends on the family
        return Row(family, name, "not tried", note=f"no tiny model of it could be made ({_line(error)})")
    try:
        shared = SuperModel(make_any_base(model, family), deterministic=True)
        return _trained(family, type(model).__name__, shared)
    except _LateError:
        return Row(family, name, "not tried", note=f"takes more than {SECONDS} s")
    except TloraError as error:
        return Row(family, type(model).__name__, "refused", note=_line(error).removeprefix(f"base_model {family}: "))
    except Exception as error:  # the same border
        return Row(family, type(model).__name__, "refused", note=f"it ends with {_line(error)}")


def _trained(family: str, kind: str, shared: SuperModel) -> Row:
    adapters = {"a": LoraConfig(r=4), "b": LoraConfig(r=8, lora_dropout=0.1)}
    if not _together_is_alone(shared, adapters):
        return Row(family, kind, "refused", note=NOT_ALONE)
    adapted = sorted({shape.module.rsplit(".", 1)[-1] for shape in shared.layout(adapters["a"]).shapes})
    notes = ["its text model"] * has_other_modalities(shared.model.config) + ["one sample at a time"] * bool(shared.base.why_one_by_one)
    return Row(family, kind, "trained", tuple(adapted), ", ".join(notes), _experts(shared))


def _together_is_alone(shared: SuperModel, adapters: Mapping[str, LoraConfig]) -> bool:
    together = _step(shared, adapters)
    return all(torch.equal(_step(shared, {name: lora})[name], together[name]) for name, lora in adapters.items())


def _experts(shared: SuperModel) -> str:
    """Whether they train as targets: two jobs, of which one adapts them alone."""
    blocks = expert_modules(shared.model)
    if not blocks:
        return ""
    parameters = sorted({name.rsplit(".", 1)[-1] for name in shared.experts.sizes})
    if not parameters:
        inside = [shared.model.get_submodule(name) for name, _ in shared.model.named_modules() if name.rpartition(".")[2] == "experts"]
        return f"frozen: {shared.experts.why_not or f'{type(inside[0]).__name__} {FUSED}'}"
    adapters = {
        "a": LoraConfig(r=4, target_parameters=parameters, target_modules=[]),
        "b": LoraConfig(r=8, target_parameters=parameters[:1]),
    }
    try:
        return ", ".join(parameters) if _together_is_alone(shared, adapters) else f"frozen: {NOT_ALONE}"
    except _LateError:
        return f"frozen: take more than {SECONDS} s"
    except Exception as error:  # a library's border: it depends on the family
        return f"frozen: {_line(error)}"


def _step(shared: SuperModel, adapters: Mapping[str, LoraConfig]) -> dict[str, torch.Tensor]:
    """Each adapter after one optimizer step over three samples of its own."""
    rows: list[BatchRow] = []
    for name, lora in adapters.items():
        shared.join(name, lora, TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant", seed=ord(name)))
        rng = np.random.default_rng(ord(name))
        for i, length in enumerate((5, 19, 33)):
            ids = rng.integers(3, min(VOCABULARY, shared.base.vocab_size), length).astype(np.int32)
            rows.append(BatchRow(name, ids, np.ones(length, np.float32), 54.0, (1, 0, i)))
    shared.forward_backward(collate(rows))
    shared.optim_step(list(adapters))
    return {name: shared.leave(name).params for name in adapters}


class _LateError(Exception):
    pass


def _ring(*_: object) -> None:
    raise _LateError


def _line(error: Exception) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__}"[:900]


def rows(only: list[str]) -> Iterator[Row]:
    """One a family, as it is found out."""
    signal.signal(signal.SIGPROF, _ring)
    for family, kind in families().items():
        if only and family not in only:
            continue
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with warnings.catch_warnings(action="ignore"):
                yield look(family, kind)
        except _LateError:  # between two of its own handlers
            yield Row(family, kind.__name__, "not tried", note=f"takes more than {SECONDS} s")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _shown(family: str) -> str:
    return f"**{family}**" if family in COMPARED else family


def table(found: list[Row]) -> str:
    """In Markdown: what is trained, then what is refused by reason, then what was not tried."""
    trained = [row for row in found if row.state == "trained"]
    mixed = [row for row in trained if row.experts]
    lines = [
        f"{len(trained)} of {len(found)} families of transformers {transformers.__version__} are trained.",
        "",
        f"Of {len(mixed)} with experts {sum(not row.experts.startswith('frozen') for row in mixed)} train these as targets.",
        "",
        "| family | class | `all-linear` adapts | experts | |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {_shown(row.family)} | {row.kind} | {', '.join(row.adapted)} | {row.experts} | {row.note} |" for row in trained),
    ]
    for state, title in (("refused", "Refused"), ("not tried", "Not tried")):
        lines += ["", f"{title}:", "", "| family | why |", "| --- | --- |"]
        lines += [f"| {row.family} | {row.note.replace('|', '/')} |" for row in found if row.state == state]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families, with commas")
    parser.add_argument("--keep", type=Path, help="a file of --json, whose rows stand for the families that are not in --only")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found: list[Row] = []
    for row in rows([name for name in arguments.only.split(",") if name]):
        print(f"{row.family:30} {row.state:10} {row.note}", flush=True)
        found.append(row)
    if arguments.keep:
        tried = {row.family for row in found}
        before = [Row(**row) for row in json.loads(arguments.keep.read_text(encoding="utf-8"))["rows"] if row["family"] not in tried]
        found = sorted(found + before, key=lambda row: row.family)
    if arguments.json:
        write(arguments.json, facts(torch.device("cpu"), None) | {"rows": [asdict(row) for row in found]})
    if arguments.write:
        text = arguments.write.read_text(encoding="utf-8")
        head, rest = text.split(BEGIN)
        arguments.write.write_text(f"{head}{BEGIN}\n{table(found)}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
