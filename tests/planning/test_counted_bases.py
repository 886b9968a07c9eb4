"""What hybrids and mixtures take of a GPU's memory and time, beside what their own code and our kernels allocate and multiply."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Llama4TextConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from tests.kernels.interpreter import interpreted
from tests.tiny import SHAPE
from tlora.adapter_shape import expert_jobs
from tlora.job import JobSpec
from tlora.json_file import fields_of, value_of
from tlora.kernels.chunk_layout import list_chunks
from tlora.planning.base_parts import count_parts, counted_adapters
from tlora.planning.job_work import counting_jobs
from tlora.planning.memory import count_base, inverse_bytes, measure, rule_bytes
from tlora.planning.planned_job import PlannedJob
from tlora.shape.base_parts import BaseParts
from tlora.shape.memory import MemoryModel
from tlora.supermodel.load import outline
from tlora.supermodel.multiply_adds import active_weights
from tlora.supermodel.supermodel import SuperModel

with interpreted():
    from tlora.kernels import delta_kernels, pass_operations  # noqa: F401  (the second is found late by the function under test)

GPU = torch.device("cuda")


class Allocated(TorchDispatchMode):
    """Bytes of all tensors that operations make."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(made, torch.Tensor):
            self.num_bytes += made.untyped_storage().nbytes()
        return made


def test_the_rule_takes_what_is_counted_of_its_tokens_and_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that comes and all that backward allocates, and what forward keeps for it, with kernels that launch nothing: of 66
    tokens in one sample, and in 14.
    """
    heads, size = 4, 16
    q, k = (torch.zeros(66, 2, size, dtype=torch.float16) for _ in range(2))
    v, g = torch.zeros(66, heads, size, dtype=torch.float16), torch.zeros(66, heads)
    for name in ("system", "invert", "prepare", "scan", "output", "within", "scan_back", "output_back", "prepare_back", "fold"):
        monkeypatch.setattr(delta_kernels, f"{name}_kernel", defaultdict(lambda: lambda *_, **__: None))

    def allocated(lengths: tuple[int, ...]) -> int:
        tables = list_chunks(lengths, 64, torch.device("cpu"))
        _, inverse = delta_kernels.forward(q, k, v, g, g.half(), tables, True)
        assert inverse.numel() * inverse.element_size() == 66 * inverse_bytes(v), "however many samples there are"
        with Allocated() as found:
            delta_kernels.backward(torch.empty_like(v), q, k, v, g, g.half(), inverse, tables, True)
        return found.num_bytes

    long, short = allocated((66,)), allocated((5,) * 13 + (1,))
    token, chunk = rule_bytes(q, v)
    assert short - long == 13 * chunk, "one more for each sample more"
    assert 0.9 * long < 66 * token + (66 // 64 + 1) * chunk < 1.1 * long


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"], ids=["kernels", "plain"])
def test_short_samples_of_a_hybrid_take_chunks_of_their_own(dtype: str, tmp_path: Path) -> None:
    Qwen3_5TextConfig(**SHAPE, head_dim=16, linear_num_key_heads=8, linear_num_value_heads=16).save_pretrained(tmp_path)
    memory = measure(SuperModel(outline(str(tmp_path), dtype)), 0, GPU)

    def counted(*lengths: int, longest: int = 640) -> MemoryModel:
        samples = np.repeat(lengths, 50)
        data: Any = SimpleNamespace(train=SimpleNamespace(lengths=samples, longest_sequences=samples), eval=None)
        return counting_jobs(memory, [PlannedJob(JobSpec.model_validate({"name": "a", "data": "d"}), data, longest)], deterministic=False)

    long, short = counted(640), counted(16)
    assert counted(640, 16, longest=16) == short != counted(640, 16), "a smaller GPU gets these alone"
    assert counted(640, longest=16).samples_per_token == 0, "none comes here"
    assert long.activation_bytes(8192) == memory.activation_bytes(8192)
    more = max(phase.sample_bytes for phase in memory.phases) * 8192 * (1 / 16 - 1 / 64)
    assert more > 0 and short.activation_bytes(8192) >= memory.phases[-1].fixed_bytes + 8192 * memory.phases[-1].token_bytes(0) + more - 1
    assert 0 < short.most_tokens(1 << 30, 0) < long.most_tokens(1 << 30, 0)
    assert counting_jobs(short, [], deterministic=False).activation_bytes(8192) == memory.activation_bytes(8192), "of these jobs alone"
    assert short.alone() == memory


def test_a_token_is_multiplied_with_all_experts_of_llama_4_where_no_job_adapts_them(tmp_path: Path) -> None:
    """By the family's own code, which takes each token to each expert; what its block multiplies is counted as it runs."""
    config = Llama4TextConfig(**SHAPE, head_dim=16, num_local_experts=8, num_experts_per_tok=1, moe_layers=[1])
    config.save_pretrained(tmp_path)
    model = SuperModel(outline(str(tmp_path), "bfloat16"))
    block: Any = AutoModelForCausalLM.from_config(config).model.layers[1].feed_forward
    x_TH, (attention, experts) = torch.randn(1, 10, SHAPE["hidden_size"]), (active_weights(model, adapted) for adapted in (False, True))
    with FlopCounterMode(display=False) as flops:
        block(x_TH)
    beside = block.router.weight.numel() + sum(p.numel() for p in block.shared_expert.parameters())
    assert flops.get_total_flops() == 2 * 10 * (sum(attention.values()) + beside) and sum(attention.values()) == 8 * sum(experts.values())
    assert measure(model, 0, GPU, 16).layer_weights - measure(model, 0, GPU, 16, True).layer_weights == 7 * sum(experts.values()) // 2


def test_a_token_keeps_what_all_experts_of_llama_4_give_it_where_no_job_adapts_them(tmp_path: Path) -> None:
    kept: list[float] = []
    for count in (2, 8):
        Llama4TextConfig(**SHAPE, head_dim=16, num_local_experts=count, num_experts_per_tok=1, moe_layers=[1]).save_pretrained(tmp_path)
        model = SuperModel(outline(str(tmp_path), "bfloat16"))
        kept.append(measure(model, 0, GPU).phases[-1].kept_per_layer)
    of_one = 2 * sum(size.product[1] for size in model.experts.sizes.values())
    assert (kept[1] - kept[0]) * SHAPE["num_hidden_layers"] == pytest.approx(6 * of_one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"], ids=["kernels", "plain"])
def test_jobs_at_experts_of_llama_4_and_at_attention_alone_are_counted_as_they_are(dtype: str, tmp_path: Path) -> None:
    """A micro-batch may have tokens of the latter alone, each of which all experts take; a job's seconds are by its own kind."""
    config = Llama4TextConfig(
        **SHAPE | {"num_hidden_layers": 4}, head_dim=16, num_local_experts=8, num_experts_per_tok=1, moe_layers=[1, 3]
    )
    config.save_pretrained(tmp_path)
    model = SuperModel(outline(str(tmp_path), dtype))
    experts, attention, both = (measure(model, 0, GPU, 16, each) for each in (True, False, "some"))
    for tokens, layers in ((512, 0), (512, 3), (8192, 0)):
        peaks = [each.activation_bytes(tokens, layers) for each in (experts, attention, both)]
        assert peaks[0] < peaks[1] == peaks[2]
    assert measure(model, 0, GPU, 16, expert_jobs([True, False])) == both and both.layer_weights == experts.layer_weights

    parts = {each: count_parts(model, GPU, 16, each) for each in (True, False, "some")}
    mixed = value_of(BaseParts, json.loads(json.dumps(fields_of(parts["some"]))))
    for first, end in ((0, 4), (0, 2), (2, 4)):
        for adapted in (True, False):
            assert mixed.timed_weights_of(first, end, adapted) == parts[adapted].timed_weights_of(first, end, adapted)
        stage = mixed.stage_memory(first, end, 1, 2).activation_bytes(512)
        assert stage == max(parts[each].stage_memory(first, end, 1, 2).activation_bytes(512) for each in (True, False))
    assert mixed.timed_weights_of(0, 4, False) > mixed.timed_weights_of(0, 4, True) == mixed.timed_weights
    Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2).save_pretrained(tmp_path)
    model = SuperModel(outline(str(tmp_path), dtype))
    assert measure(model, 0, GPU, 16, "some") == measure(model, 0, GPU, 16, True), "where all take a token to as many"


def test_a_scheduler_counts_the_largest_adapters_of_jobs_that_it_knows(tmp_path: Path) -> None:
    orders = ({"r": 16}, {"r": 200}, {"r": 16, "target_parameters": ["down_proj"]})
    few, wide, experts = (JobSpec.model_validate({"name": "a", "data": {"path": "a.jsonl"}} | order) for order in orders)
    assert counted_adapters([few]) == (64, False) and counted_adapters([few, wide, experts]) == (256, "some")
    Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2).save_pretrained(tmp_path)
    model = SuperModel(outline(str(tmp_path), "bfloat16"))
    for jobs in ([few], [wide], [few, experts], [wide, experts]):
        rank, adapts_experts = counted_adapters(jobs)
        worker, counted = measure(model, 0, GPU, rank, adapts_experts), count_base(model, GPU, "auto", rank, adapts_experts)
        found = counted.fixed_bytes + 8192 * counted.token_bytes
        assert found == pytest.approx(worker.activation_bytes(8192), rel=1e-6), jobs
    tokens = [count_base(model, GPU, "auto", *counted_adapters([each])).token_bytes for each in (few, wide, experts)]
    assert tokens[1] - tokens[0] >= 2 * (256 - 64) * len(model.targets()) and tokens[2] > tokens[0]
