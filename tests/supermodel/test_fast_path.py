"""The GPU path on tiny bases, through Triton's interpreter where there is no GPU: equal to the reference path, alone as together.

The path is switched on by `fast` for the super-models that a test makes, and by nothing else.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.supermodel.padding import Padding
from tests.tiny import FAMILIES, make_model, make_samples
from tests.tolerances import TRAINED, assert_close, relative_error
from tlora.adapters.state import AdapterState, init_state
from tlora.batching.recompute_plan import RecomputePlan
from tlora.job import LoraConfig, TrainConfig
from tlora.kernels import delta_rule
from tlora.kernels.device import as_if_on, launched_as
from tlora.objectives import Dpo
from tlora.shape.token_cost import HIDES_LAUNCHES, SLOW_HOST
from tlora.supermodel import losses as loss_module
from tlora.supermodel import supermodel
from tlora.supermodel.batch import BatchRow, PackedBatch, collate
from tlora.supermodel.fast_path import _sees_the_same_again, linears_in_passes
from tlora.supermodel.kernel_tiles import digest_on_plain_path
from tlora.supermodel.load import hidden_states, make_base
from tlora.supermodel.lora_linear import LoraLinear
from tlora.supermodel.recurrent_layers import _in_pass, why_not_in_passes
from tlora.supermodel.supermodel import JobLoss, SuperModel

with interpreted():  # the path imports them late, when the variable may not be set any more
    from tlora.kernels import pass_operations, recurrent_operations  # noqa: F401

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")]  # dynamo looks
CLOSE = 1e-4
"""Gradients and losses of two layers in fp32, kernels against the reference path."""

PART = ["q_proj", "v_proj", "down_proj"]
LORA = {
    "a": LoraConfig(r=4),
    "b": LoraConfig(r=20, target_modules=PART),
    "c": LoraConfig(r=70, target_modules=["o_proj", "up_proj"]),
    "d": LoraConfig(r=4, lora_dropout=0.2, target_modules=PART),
    "t": LoraConfig(r=4, target_modules=PART, trainable_token_indices=list(range(20, 80))),
}
FEW_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
ONE_LAYER = {"num_hidden_layers": 1, **FEW_HEADS}
QUICK: dict[str, dict[str, Any]] = {
    "llama-tied": ONE_LAYER,  # biases
    "gemma2": FEW_HEADS,  # windows in every other layer, soft caps, scaled embeddings
    "phi3": ONE_LAYER,  # linears that are joined already
}
"""The other families are made of the same parts."""

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No graph of another test; what is allocated is NaN before it is written."""
    torch._dynamo.reset()
    counters.clear()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if DEVICE.type == "cpu":
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def eager() -> Iterator[None]:
    """Layers run as they are: compiling takes longer than all the rest, and is looked at by the tests without this."""
    with torch.compiler.set_stance("force_eager"):
        yield


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def make_shared(family: str, fast: bool = True, **changes: Any) -> SuperModel:
    """A super-model with or without the path, whatever this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        if not fast:
            patch.setattr(supermodel, "why_not_fused", lambda *_: "this test takes the plain path")
        else:
            interpret(patch)
        shared = SuperModel(make_base(make_model(family, **changes).to(DEVICE), family), deterministic=True)
    assert (shared.fast_path is not None) == fast
    return shared


def lora_of(family: str, job_id: str) -> LoraConfig:
    lora = LORA[job_id]
    if family == "phi3" and lora.target_modules != "all-linear":
        return lora.model_copy(update={"target_modules": ["qkv_proj", "down_proj"]})
    return lora


def grown(shared: SuperModel, family: str, job_id: str) -> AdapterState:
    """A state in which B is not zero, so that all gradients are there from the first step on."""
    state = init_state(shared.layout(lora_of(family, job_id)), ord(job_id), torch.float32, DEVICE)
    noise = torch.randn(state.params.shape, generator=torch.Generator().manual_seed(ord(job_id)))
    return replace(state, params=state.params + 0.05 * noise.to(DEVICE))


def join(shared: SuperModel, family: str, job_id: str) -> None:
    """With an epsilon at which a step follows its gradient: of the usual one, rounding turns those of the smallest gradients around."""
    train = TrainConfig(learning_rate=1e-2, lr_scheduler_type="constant", adam_epsilon=1e-3, seed=ord(job_id))
    shared.join(job_id, lora_of(family, job_id), train, state=grown(shared, family, job_id))


def batch_of(job_ids: str, step: int = 0, pad_to: int = 0, keys: bool = True, count: int = 2) -> PackedBatch:
    rows: list[BatchRow] = []
    for job_id in job_ids:
        own = make_samples(count, seed=100 * step + ord(job_id), low=5, high=20)
        normalizer = float(sum(s.loss_weights[1:].sum() for s in own))
        key = (ord(job_id), step)
        rows += [BatchRow(job_id, s.input_ids, s.loss_weights, normalizer, (*key, i) if keys else None) for i, s in enumerate(own)]
    return collate(rows, DEVICE, pad_to)


@dataclass(frozen=True)
class Found:
    """Each job's mean loss, and its gradient."""

    losses: Mapping[str, float]
    grads: Mapping[str, Tensor]


def gradients(shared: SuperModel, family: str, job_ids: str, pad_to: int = 0) -> Found:
    for job_id in job_ids:
        join(shared, family, job_id)
    batch = batch_of(job_ids)
    losses = shared.forward_backward(batch.padded(max(pad_to, len(batch.input_ids_T))))
    found = Found({job_id: loss.mean for job_id, loss in losses.items()}, {job_id: shared.bank.take_grad(job_id) for job_id in job_ids})
    for job_id in job_ids:
        shared.leave(job_id)
    return found


def check_family(family: str, job_ids: str, **changes: Any) -> None:
    """Losses and gradients as by the reference path; of the last job alone, elsewhere and behind other padding, bitwise.

    Alone it comes first, when nobody has ever had an adapter at the linears that it leaves out.
    """
    shared, last = make_shared(family, **changes), job_ids[-1]
    alone = gradients(shared, family, last, pad_to=70)
    found = gradients(shared, family, job_ids)
    expected = gradients(make_shared(family, fast=False, **changes), family, job_ids)
    for job_id in job_ids:
        assert found.losses[job_id] == pytest.approx(expected.losses[job_id], rel=CLOSE)
        assert_close(found.grads[job_id], expected.grads[job_id], CLOSE, f"gradient of {job_id}")
    assert alone.losses[last] == found.losses[last] and torch.equal(alone.grads[last], found.grads[last])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name == "gemma2" else pytest.mark.slow) for name in QUICK])
def test_a_family_equals_the_reference_path_and_itself_alone(family: str) -> None:
    check_family(family, "ab", **QUICK[family])


@pytest.mark.usefixtures("eager")
def test_trained_rows_of_the_embedding_equal_the_reference_path_and_themselves_alone() -> None:
    """The first layer's x has a gradient then, and the head is another for that job."""
    check_family("llama-tied", "at", **ONE_LAYER)


HYBRID: dict[str, Any] = {**FEW_HEADS, "hidden_size": 32, "linear_num_value_heads": 16, "linear_num_key_heads": 8}
"""A layer of the gated delta rule and one of attention; the linear that gives a decay for each head of v has 16 outputs."""


@pytest.fixture
def takes_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no registers that the rule's kernels could spill, which is why runs in fp32 do not take them."""
    monkeypatch.setattr(delta_rule, "WIDEST_ELEMENT", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("eager", "takes_fp32")
def test_a_hybrid_equals_the_reference_path_and_itself_alone() -> None:
    check_family("qwen3.5", "ba", **HYBRID)


@pytest.mark.usefixtures("takes_fp32")
def test_the_digest_of_tiles_has_those_of_recurrences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all else of a pass is on the plain path, which computes these by kernels on a GPU."""
    from tlora.kernels import delta_kernels, triton_conv

    smaller = {4: replace(delta_kernels._BLOCKS[4], scan=32)}
    changes: list[tuple[Any, str, Any]] = [(delta_kernels, "_BLOCKS", smaller), (delta_kernels, "_FOLDED", 8), (triton_conv, "_TOKENS", 8)]
    plain = make_shared("qwen3.5", fast=False, **HYBRID)

    def digests() -> tuple[str | None, str | None]:
        with as_if_on("NVIDIA H200", 90):
            on_plain_path = digest_on_plain_path(plain.base, plain.experts, torch.device("cuda"))
        return make_shared("qwen3.5", **HYBRID).tiles, on_plain_path

    found = [digests()]
    assert plain.tiles is None, "a CPU has no kernels"
    for change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            found.append(digests())
    launched_as.cache_clear()
    assert None not in {digest for each in found for digest in each} and all(len(set(each)) == 4 for each in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("takes_fp32")
def test_recurrent_layers_are_compiled_once() -> None:
    shared = make_shared("qwen3.5", **HYBRID | {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]})
    join(shared, "qwen3.5", "a")
    shared.evaluate(batch_of("a", count=1))
    assert num_graphs() == 2, "one for both recurrent layers, and one for attention"


def test_recurrences_of_a_pass_hand_on_views_of_their_gradients() -> None:
    """A gradient that is copied once more for each recurrence costs as much as the convolution: an index gives one, a squeeze does not."""
    tokens, channels = 5, 6
    mixed = torch.zeros(1, tokens, channels, requires_grad=True)
    given = {"hidden_states": mixed.transpose(1, 2), "weight": torch.zeros(channels, 4), "activation": "silu"}
    rule: dict[str, Any] = {key: torch.zeros(1, tokens, 2, 4, requires_grad=True) for key in ("query", "key", "value")}
    rule |= {key: torch.zeros(1, tokens, 2, requires_grad=True) for key in ("g", "beta")}
    number = torch.zeros(1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        results = _in_pass("causal_conv1d_fn", given, number), _in_pass("torch_chunk_gated_delta_rule", rule, number)[0]
    names: set[str] = set()
    ahead = [result.grad_fn for result in results]
    while ahead:
        if (node := ahead.pop()) is not None:
            names.add(node.name())
            ahead += [behind for behind, _ in node.next_functions]
    assert "SqueezeBackward1" in names and not any("Select" in name or "Index" in name for name in names), names


def test_a_hybrid_in_fp32_takes_the_reference_path_and_says_why() -> None:
    shared = SuperModel(make_base(make_model("qwen3.5", **HYBRID), "qwen3.5"))
    why = why_not_in_passes(shared.model, torch.float32)
    assert why == "the kernels of the gated delta rule take 16 bits, and the base is in float32"
    assert why_not_in_passes(shared.model, torch.bfloat16) is None


def test_a_shared_experts_gate_is_left_to_pytorch() -> None:
    """It has one output, and no job adapts it: the rest of the base takes the kernels all the same."""
    model = SuperModel(make_base(make_model("qwen3-next", **HYBRID), "qwen3-next"))
    linears = {m.name: m for m in model.model.modules() if isinstance(m, LoraLinear)}
    left = set(linears) - set(linears_in_passes(model.base, linears, deterministic=False))
    assert left == {f"model.layers.{layer}.mlp.shared_expert_gate" for layer in (0, 1)}
    assert linears_in_passes(model.base, linears, deterministic=True) == linears, "a sample's bits there would depend on others"


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("job_ids", ["bda", *(pytest.param(ids, marks=pytest.mark.soak) for ids in ("ab", "d"))])
def test_a_pass_that_is_padded_for_a_graph_has_the_shape_that_was_predicted_and_its_bits(job_ids: str) -> None:
    shared = make_shared("llama", **ONE_LAYER)
    found: list[dict[str, Tensor]] = []
    for tokens in (0, 600):
        for job_id in job_ids:
            join(shared, "llama", job_id)
        batch = replace(batch_of(job_ids), most_tokens=2048)
        if tokens:
            padding = Padding(shared, tokens)
            shared.fast_path._graphs = [padding]  # type: ignore[union-attr, list-item]
        before = shared.passes.computed_tokens
        shared.forward_backward(batch)
        assert shared.passes.computed_tokens - before == (tokens or len(batch.input_ids_T))
        found.append({job_id: shared.bank.take_grad(job_id) for job_id in job_ids})
        for job_id in job_ids:
            shared.leave(job_id)
    [(own, most, launch)] = padding.asked
    assert own.tokens == len(batch.input_ids_T) and most == 2048
    weights = sum(k * n for k, n in shared.targets().values())
    assert launch == int(SLOW_HOST * HIDES_LAUNCHES / weights), "one layer"
    assert all(torch.equal(found[0][job_id], found[1][job_id]) for job_id in job_ids)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("family", "left_out"), [("llama", ["down_proj"]), ("gemma2", [])])
def test_a_layer_that_runs_again_leaves_out_what_only_its_output_needs(
    family: str, left_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out is NaN here. Behind gemma's down_proj there is a norm, whose backward reads it."""
    shared = make_shared(family, **FEW_HEADS)
    true = gradients(shared, family, "ad")
    ran: list[tuple[int, bool]] = []

    def note(*args: Any) -> Any:
        ran.append((args[3].first, args[5] is not None))
        return forward(*args)

    forward = pass_operations.forward
    monkeypatch.setattr(pass_operations, "forward", note)
    shared.recomputed_layers = 1
    found = gradients(shared, family, "ad")
    assert all(torch.equal(found.grads[job_id], true.grads[job_id]) for job_id in "ad") and found.losses == true.losses
    assert shared.fast_path is not None
    groups = {group.first: shared.fast_path._names[group.first].rpartition(".")[2] for group in shared.fast_path.groups}
    assert [groups[first] for first, again in ran if not again] == ["q_proj", "o_proj", "gate_proj", "down_proj"] * 2
    again = [groups[first] for first, again in ran if again]
    assert again == [name for name in ("q_proj", "o_proj", "gate_proj", "down_proj") if name not in left_out]


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_larger_micro_batch_recomputes_what_a_smaller_one_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout; no bit depends on it."""
    shared, again = make_shared("llama", **ONE_LAYER), list[int]()
    batches, found = (batch_of("d"), batch_of("d", pad_to=90)), list[list[Tensor]]()
    forward = pass_operations.forward
    monkeypatch.setattr(pass_operations, "forward", lambda *args: (again.append(args[5] is not None), forward(*args))[1])
    join(shared, "llama", "d")
    ran: list[list[bool]] = []
    for plan in (RecomputePlan(), RecomputePlan((len(batches[0].input_ids_T),))):
        shared.recompute = plan
        found.append([])
        for batch in batches:
            shared.forward_backward(batch)
            found[-1].append(shared.bank.take_grad("d"))
            ran.append([any(again)])
            again.clear()
    assert ran == [[False], [False], [False], [True]]
    assert all(bool(true.any()) and torch.equal(true, grad) for true, grad in zip(*found, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_compiled_with_dropout(family: str) -> None:
    check_family(family, "abd")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"), [("llama", ONE_LAYER), *(pytest.param(family, {}, marks=pytest.mark.soak) for family in FAMILIES)]
)
def test_recomputed_layers_change_no_bit_of_a_family(family: str, changes: dict[str, Any]) -> None:
    """Compiled, as they run on a GPU."""
    shared = make_shared(family, **changes)
    true = gradients(shared, family, "ab")
    shared.recomputed_layers = shared.num_layers
    found = gradients(shared, family, "ab")
    assert found.losses == true.losses and all(torch.equal(found.grads[job_id], true.grads[job_id]) for job_id in "ab")


def test_a_layer_that_runs_again_finds_what_earlier_layers_left_and_not_its_own() -> None:
    """As Gemma 4's layers find keys and values: torch.compile would take another mapping for another layer."""
    shared, seen = UserDict({"earlier": 1}), list[dict[str, int]]()

    def layer(x: int, *, kv: UserDict[str, int]) -> int:
        seen.append(dict(kv))
        kv["own"] = x + len(seen)
        return 2 * x

    again = _sees_the_same_again(layer, {"kv": shared})
    assert again(10) == 20 and dict(shared) == {"earlier": 1, "own": 11}
    shared["later"] = 3
    assert again(10) == 20 and dict(shared) == {"earlier": 1, "own": 11, "later": 3}
    assert seen == [{"earlier": 1}, {"earlier": 1}]


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("llama", [QKV, ("o_proj",), GATE_UP, ("down_proj",)]),
        ("llama-tied", [QKV, ("o_proj",), GATE_UP, ("down_proj",)]),
        ("qwen2", [QKV, ("o_proj",), GATE_UP, ("down_proj",)]),
        ("qwen3", [QKV, ("o_proj",), GATE_UP, ("down_proj",)]),
        ("gemma2", [QKV, ("o_proj",), GATE_UP, ("down_proj",)]),
        ("phi3", [("qkv_proj",), ("o_proj",), ("gate_up_proj",), ("down_proj",)]),
    ],
)
def test_linears_of_one_input_are_one_group(family: str, groups: list[tuple[str, ...]]) -> None:
    fast = make_shared(family).fast_path
    assert fast is not None
    names = iter(fast._names)
    found = [[next(names) for _ in group.widths] for group in fast.groups]
    assert next(names, None) is None
    assert [tuple(name.rpartition(".")[2] for name in group) for group in found] == groups * 2
    for group in found:
        assert len({name.rpartition(".")[0] for name in group}) == 1, f"{group} spans blocks"
    assert [group.passes_back for group in fast.groups] == [False] + [True] * (len(fast.groups) - 1)


def test_a_base_whose_widths_are_off_16_takes_the_reference_path() -> None:
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        odd = SuperModel(make_base(make_model(intermediate_size=88).to(DEVICE), "odd"))
        double = SuperModel(make_base(make_model(dtype=torch.float64).to(DEVICE), "fp64"))
    assert odd.fast_path is None and double.fast_path is None


def test_without_a_gpu_and_the_interpreter_there_is_no_such_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert SuperModel(make_base(make_model(), "llama")).fast_path is None


def _storage_bytes(model: torch.nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in (*model.parameters(), *model.buffers())}
    return sum(storages.values())


def test_the_base_keeps_its_weights_names_and_memory() -> None:
    plain, shared = make_model("llama-tied").to(DEVICE), make_shared("llama-tied")
    assert _storage_bytes(shared.model) == _storage_bytes(plain)
    mine, its = plain.state_dict(), shared.model.state_dict()
    assert mine.keys() == its.keys() and all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.usefixtures("eager")
def test_outside_a_batch_the_model_is_the_base() -> None:
    shared, reference = (make_shared("llama", fast, **ONE_LAYER) for fast in (True, False))
    join(shared, "llama", "a")
    shared.forward_backward(batch_of("a"))
    ids = torch.arange(3, 20, device=DEVICE)
    with torch.no_grad():
        found, expected = (hidden_states(m.base, ids, torch.arange(17, device=DEVICE), (17,)) for m in (shared, reference))
    assert not found.requires_grad and torch.equal(found, expected)


@pytest.mark.usefixtures("eager")
def test_evaluation_has_no_dropout_and_leaves_no_trace() -> None:
    losses: list[float] = []
    grads: list[Tensor] = []
    for fast in (True, False):
        model = make_shared("llama", fast, **ONE_LAYER)
        join(model, "llama", "d")
        model.forward_backward(batch_of("d"))
        losses.append(model.evaluate(batch_of("d", step=3))["d"].mean)
        losses.append(model.evaluate(batch_of("d", step=3, keys=False))["d"].mean)
        grads.append(model.bank.take_grad("d"))
    assert losses[0] == losses[1] and losses[0] == pytest.approx(losses[2], rel=CLOSE)
    assert_close(grads[0], grads[1], CLOSE)
    assert not pass_operations._states, "a pass is still held"


@pytest.mark.usefixtures("eager")
def test_a_pass_that_raises_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = make_shared("llama", **ONE_LAYER)
    join(shared, "llama", "a")
    expected = shared.evaluate(batch_of("a"))["a"].mean
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no loss today"):

        def refuse(*_: object) -> None:
            raise RuntimeError("no loss today")

        patch.setattr(loss_module, "linear_cross_entropy", refuse)
        shared.forward_backward(batch_of("a"))
    assert not pass_operations._states and shared.context.pass_number is None
    assert shared.evaluate(batch_of("a"))["a"].mean == expected


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_pair_and_its_reference_are_those_of_the_reference_path() -> None:
    """DPO with dropout, beside jobs without an objective: the reference pass knows neither adapters nor dropout."""
    chosen, rejected = make_samples(2, seed=4, low=5, high=20)
    ids = np.concatenate([chosen.input_ids, rejected.input_ids])
    weights, lengths = np.concatenate([chosen.loss_weights, rejected.loss_weights]), (len(chosen.input_ids), len(rejected.input_ids))
    samples = [BatchRow(job_id, s.input_ids, s.loss_weights, 9.0) for job_id, s in zip("ab", make_samples(2), strict=True)]
    batch = collate([samples[0], BatchRow("d", ids, weights, 1.0, (1, 2, 3), lengths), samples[1]], DEVICE, pad_to=96)
    found: list[tuple[dict[str, JobLoss], dict[str, Tensor]]] = []
    for fast in (True, False):
        shared = make_shared("llama", fast=fast, **ONE_LAYER)
        for job_id in "abd":
            join(shared, "llama", job_id)
        found.append((shared.forward_backward(batch, {"d": Dpo(0.3)}), {job_id: shared.bank.take_grad(job_id) for job_id in "abd"}))
    (fast_losses, fast_grads), (losses, grads) = found
    for job_id in "abd":
        assert fast_losses[job_id].mean == pytest.approx(losses[job_id].mean, rel=CLOSE)
        assert_close(fast_grads[job_id], grads[job_id], CLOSE, f"gradient of {job_id}")
    margin = float(losses["d"].metrics["rewards/margins"])
    assert abs(margin) > 1e-3 and float(fast_losses["d"].metrics["rewards/margins"]) == pytest.approx(margin, rel=1e-2)


def pair_of(job_id: str, seed: int) -> BatchRow:
    chosen, rejected = make_samples(2, seed=seed, low=5, high=20)
    ids = np.concatenate([chosen.input_ids, rejected.input_ids])
    weights, lengths = np.concatenate([chosen.loss_weights, rejected.loss_weights]), (len(chosen.input_ids), len(rejected.input_ids))
    return BatchRow(job_id, ids, weights, 1.0, None, lengths)


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_references_of_one_pass_are_each_jobs_own() -> None:
    """Of "a" and "b" adapters, over other linears and of other ranks; of "d" the base: alone as together in bits, as the reference path."""
    objective, continued = Dpo(0.3), "ab"

    def run(job_ids: str, fast: bool) -> dict[str, tuple[float, Tensor]]:
        shared = make_shared("llama", fast=fast, **ONE_LAYER)
        for job_id in job_ids:
            join(shared, "llama", job_id)
            if job_id in continued:
                shared.set_reference(job_id, shared.state(job_id).params * 0.5)
        batch = collate([pair_of(job_id, ord(job_id)) for job_id in job_ids], DEVICE, pad_to=128)
        losses = shared.forward_backward(batch, dict.fromkeys(job_ids, objective))
        return {job_id: (losses[job_id].mean, shared.bank.take_grad(job_id)) for job_id in job_ids}

    together, plain = run("adb", fast=True), run("adb", fast=False)
    for job_id in "abd":
        ((loss, grad),) = run(job_id, fast=True).values()
        assert together[job_id][0] == loss and torch.equal(together[job_id][1], grad), job_id
        assert loss == pytest.approx(plain[job_id][0], rel=CLOSE)
        assert_close(grad, plain[job_id][1], CLOSE, f"gradient of {job_id}")


def life(shared: SuperModel) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Jobs that join, pause and leave over three steps, of other lengths and numbers of tokens: losses of "a", adapters, graphs so far."""
    losses: list[float] = []
    gone: dict[str, Tensor] = {}
    graphs: list[int] = []
    for step, (present, count) in enumerate([("a", 2), ("dacb", 1), ("ca", 1)]):
        for job_id in present:
            if job_id not in shared.bank:
                join(shared, "llama", job_id)
        if step == 2:
            gone["d"] = shared.leave("d").params.clone()
        losses.append(shared.forward_backward(batch_of(present, step, count=count, pad_to=40 * step))["a"].mean)
        assert all(s.applied for s in shared.optim_step(present).values())
        losses.append(shared.evaluate(batch_of("a", 9, count=1 + step % 2, keys=False))["a"].mean)
        graphs.append(num_graphs())
    return losses, gone | {job_id: shared.leave(job_id).params for job_id in "cab"}, graphs


@pytest.mark.parametrize("num_layers", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.slow
def test_jobs_join_and_leave_without_another_compilation_and_train_as_by_the_reference(num_layers: int) -> None:
    shape = ONE_LAYER | {"num_hidden_layers": num_layers}
    shared = make_shared("llama", **shape)
    starts = {job_id: grown(shared, "llama", job_id).params for job_id in "abcd"}
    losses, adapters, graphs = life(shared)
    assert graphs == [2] * 3, f"one for training and one for evaluation serve all layers: {graphs}"
    expected_losses, expected, _ = life(make_shared("llama", fast=False, **shape))
    assert losses == pytest.approx(expected_losses, rel=CLOSE)
    for job_id, params in adapters.items():
        error = relative_error(params - starts[job_id], expected[job_id] - starts[job_id])
        assert error <= TRAINED[torch.float32], f"weight change of {job_id}: {error:.1e}"


def test_layers_whose_config_names_each_ones_kind_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qwen's and Gemma's do. A layer that reads its own number would be another one for the compiler than all others.

    What the compiler reads of a layer is counted, which it does on the way forward; no code is made of it.
    """
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled(forward, backend="eager"))
    shared = make_shared("qwen3", num_hidden_layers=2, intermediate_size=32, layer_types=None)
    assert shared.model.config.layer_types == ["full_attention"] * 2
    join(shared, "qwen3", "b")
    shared.begin(batch_of("b")).forward()
    assert num_graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_layers_are_compiled_as_for_one_length(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler is told of T: Inductor chooses forms of reductions by it, and their bits would follow from the first batch."""
    compiled, told = torch.compile, set[int]()

    def look(module: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
        told.update(size.node.hint for size in inputs if isinstance(size, torch.SymInt))
        return module

    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled(forward, backend=look))
    with monkeypatch.context() as patch:
        interpret(patch)
        shared = SuperModel(make_base(make_model("llama", **ONE_LAYER).to(DEVICE), "llama"), deterministic)
    join(shared, "llama", "a")
    for pad_to in (48, 64):
        shared.forward_backward(batch_of("a", pad_to=pad_to))
    assert num_graphs() == 1 and told == ({8192} if deterministic else {48}), "T is its only open size"


@pytest.mark.slow
@pytest.mark.usefixtures("eager")
def test_a_returning_name_is_another_adapter() -> None:
    """What the path remembers of "a" must not outlive it, nor the tensors that grow as a larger job joins."""
    shared = make_shared("llama", **ONE_LAYER)
    first = gradients(shared, "llama", "a")
    gradients(shared, "llama", "c")
    join(shared, "llama", "b")
    again = gradients(shared, "llama", "a")
    assert again.losses == first.losses and torch.equal(again.grads["a"], first.grads["a"])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("resident", "width"), [("a", 16), ("ab", 32), ("abc", 128)])
def test_kernels_are_compiled_for_who_is_resident_not_for_who_is_in_the_batch(resident: str, width: int) -> None:
    """The largest rank counts, also of a job that has left: any other width would be a kernel that is compiled in mid-run."""
    shared = make_shared("llama", **ONE_LAYER)
    for job_id in resident:
        join(shared, "llama", job_id)
    assert shared.fast_path is not None
    state = shared.fast_path.begin(batch_of("a"), shared.passes.weights, shared.bank, {})
    assert state.tables.width == width
    state = shared.fast_path.begin(batch_of(resident), shared.passes.weights, shared.bank, {})
    assert state.tables.width == width
    for job_id in resident[1:]:
        shared.leave(job_id)
    state = shared.fast_path.begin(batch_of("a"), shared.passes.weights, shared.bank, {})
    assert state.tables.width == width


def test_kernels_of_this_module_are_those_of_the_interpreter() -> None:
    """Else the tests above would have run nothing, or something else."""
    assert type(pass_operations.forward.__globals__["gemm_kernel"]).__name__ == (
        "InterpretedFunction" if DEVICE.type == "cpu" else "JITFunction"
    )
