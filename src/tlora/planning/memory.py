"""How many bytes a run takes: counted from the base's own layers before it is loaded, measured on a GPU after that (`memory_probe.py`).

A CPU keeps what a forward over torch's meta device saves for backward. A GPU's compiled layers keep less: that is a formula here, an
estimate (`_estimate`), which the run replaces by what it measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor

from tlora.adapter_shape import ROW_ALIGNMENT, ExpertJobs
from tlora.errors import ModelError
from tlora.job import BasePrecision, LayoutSetting, LoraConfig, TrainConfig
from tlora.kernels.delta_rule import CHUNK as RULE_CHUNK
from tlora.kernels.device import can_be_asked, limit_elsewhere, may_run_kernels
from tlora.kernels.frozen import FrozenWeight, held_bytes
from tlora.kernels.grouped_lora import chunk_jobs
from tlora.kernels.library_attention import SampleLayout, lay_out_samples
from tlora.kernels.linear_cross_entropy import chunk_bytes
from tlora.kernels.packed_weight import PackedWeight
from tlora.shape import CPU_SHARE
from tlora.shape.memory import MOST_GPUS, BaseMemory, MemoryModel, Phase, StreamedBytes, base_memory
from tlora.sharing.host_memory import Streaming
from tlora.sharing.layout import BaseLayout, lay_out
from tlora.supermodel.assembly import why_in_parts
from tlora.supermodel.batch import BatchRow, collate
from tlora.supermodel.fast_path import fit_attention, fit_kernels, linears_in_passes
from tlora.supermodel.frozen_experts import counted_on_host
from tlora.supermodel.held_experts import held_experts
from tlora.supermodel.held_linear import precisions_on, quantized
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.load import Base, hidden_states, layers_of
from tlora.supermodel.lora_linear import ActiveBatch, LoraLinear
from tlora.supermodel.multiply_adds import active_weights, frozen_experts
from tlora.supermodel.plain_path import groups_on
from tlora.supermodel.recurrent_layers import why_not_in_passes
from tlora.supermodel.routers import why_not_alone
from tlora.supermodel.shared_base import by_layer, check_cut, expert_weights, held_in_parts, refuse_experts
from tlora.supermodel.structure import count_kept_outputs, find_calls
from tlora.supermodel.supermodel import SuperModel
from tlora.wording.dtypes import dtype_name

T = TypeVar("T")
_PROBE_TOKENS = 64
_CHUNK = 128  # tokens of a chunk of a grouped micro-batch: those of eight jobs with 1,024 tokens each
ACTIVATION_RANK = 64  # up to which a GPU's activations are counted where jobs come later
_RECURRENCE_COPIES = 22  # 2.5 to 2.8 GiB on an H200 for 8,192 tokens with 32 heads of 128: docs/adr/048-hybrids.md
_GPU_SHARE = 0.95  # of what is free; the rest is for the allocator and others


def measure(
    model: SuperModel, base_bytes: int, device: torch.device, rank: int = ROW_ALIGNMENT, adapts_experts: ExpertJobs = False
) -> MemoryModel:
    """Count on `model`, which must lie on the meta device, for a run on `device` with adapters of at most `rank`, of experts too or not.
    Where some are, and passes of others take a token to more experts, the peak is that of either.

    On a GPU an estimate, within 4 % of the peaks measured on Llama-3-8B (bench/results/h200_memory.json). On a CPU a slot of its own
    is used, with all linears adapted. Raises ModelError for a base whose layers do not fit together.
    """
    if adapts_experts == "some":
        most = measure(model, base_bytes, device, rank, True)
        if model.experts.visits(True) == model.experts.visits(False):
            return most
        return replace(most, phases=most.phases + measure(model, base_bytes, device, rank, False).phases)
    element, sums = model.base.head.weight_VH.element_size(), model.bank.sum_dtype.itemsize
    kernels = device.type == "cuda" and may_run_kernels(device)
    step_copies = 0 if kernels else 5
    layers, linears = len(layers_of(model.base.decoder)), model.targets().values()
    multiplied = sum(k * n for k, n in linears) + sum(active_weights(model, adapts_experts).values())
    weights, features = multiplied // max(1, layers), sum(k + n for k, n in linears) // max(1, layers)
    packed = [w for w in _weights(model) if isinstance(w, PackedWeight)]
    unpacked = sum(w.shape[0] * w.shape[1] for w in packed) // max(1, layers)
    if kernels and takes_fast_path(model):
        estimate = _estimate(model, device, rank, adapts_experts)
        return MemoryModel(base_bytes, estimate, layers, element, sums, step_copies, weights, features, unpacked)
    head = model.base.head.weight_VH
    name = "memory probe"
    model.join(name, _probe_lora(model, rank, adapts_experts), TrainConfig(max_steps=1))
    few, many = _fitting(model, lambda: [_saved_bytes(model, name, n, device) for n in (_PROBE_TOKENS, 2 * _PROBE_TOKENS)])
    model.leave(name)
    widest = max((s for shape in model.targets().values() for s in shape), default=0)
    moving = 3 * widest * element + 4 * head.shape[1] * element  # gradients in flight around the widest linear, and at the head
    if groups_on(device, model.deterministic):  # a part of dA or dB and its copy in full precision, for every chunk
        moving += widest * (element + sums) * max(rank, ROW_ALIGNMENT) // _CHUNK
    recurrence = _recurrence_bytes(model) if device.type == "cuda" and model.base.recurrent else 0
    kept = (many - few) / _PROBE_TOKENS
    scratch = chunk_bytes(model.base.head, device) + max(_linear_scratch(model), _expert_scratch(model, device, adapts_experts))
    phase = Phase(scratch, kept + moving + recurrence, 0.0, kept / max(1, layers), RULE_CHUNK * recurrence, RULE_CHUNK)
    counted = (weights, features, unpacked) if device.type == "cuda" else (0, 0, 0)  # on a CPU a token costs the same in any micro-batch
    return MemoryModel(base_bytes, (phase,), 0, element, sums, step_copies, *counted)


def measure_in_parts(
    model: SuperModel, base_bytes: int, device: torch.device, rank: int = ROW_ALIGNMENT, adapts_experts: ExpertJobs = False
) -> MemoryModel:
    """As `measure`, of a base that GPUs share or that is streamed, of which `base_bytes` lie on the device: a mixture's layers are not
    compiled there.
    """
    with held_in_parts(model.model):
        return measure(model, base_bytes, device, rank, adapts_experts)


def _fitting(model: SuperModel, run: Callable[[], T]) -> T:
    """What `run` over the base without numbers gives. Raises ModelError where a layer does not take what the one before it gives."""
    try:
        return run()
    except RuntimeError as error:
        dtype = model.base.head.weight_VH.dtype
        remedy = "Compare it with the original's" + (", or set dtype: float32" if dtype.itemsize == 2 else "")
        name = dtype_name(dtype)
        why = f"by its config.json, its layers do not fit together in {name}: {str(error).strip().splitlines()[0]}"
        raise ModelError(f"base_model {model.base.name}: {why}. {remedy}") from None


def takes_fast_path(model: SuperModel) -> bool:
    """Whether a base on the meta device would take a GPU's compiled layers there (`fast_path.why_not_fused`)."""
    base, linears = model.base, {m.name: m for m in model.model.modules() if isinstance(m, LoraLinear)}
    if model.deterministic and expert_modules(model.model) and why_not_alone(base, model.experts, torch.device("cuda")) is not None:
        return False  # it computes each sample by itself
    dtype, on_kernels = base.head.weight_VH.dtype, linears_in_passes(base, linears, model.deterministic)
    widths = [width for m in on_kernels.values() for width in (m.in_features, m.out_features)]
    return bool(layers_of(base.decoder)) and fit_kernels(dtype, widths) and _is_compiled(base, dtype)


def _is_compiled(base: Base, dtype: torch.dtype) -> bool:
    if held_experts(base.model) or counted_on_host(base.model) is not None:
        return False
    return fit_attention(base) and why_not_in_passes(base.model, dtype) is None


def _recurrence_bytes(model: SuperModel) -> int:
    """Of a token in backward of a recurrence on a GPU, which computes forward again: copies in fp32 of the widest x of its layer."""
    layers = tuple(f"{layer}." for layer in model.base.recurrent)
    inner = [k for name, (k, _) in model.targets().items() if name.startswith(layers)]
    return _RECURRENCE_COPIES * 4 * max(inner, default=0)


def _estimate(model: SuperModel, device: torch.device, rank: int, adapts_experts: bool) -> tuple[Phase, ...]:
    """Bytes of a micro-batch on compiled layers, from the linears' widths.

    A layer keeps the output of each linear (of those that end a block, the residual that they are added to; where a norm or experts come
    between, that as well), attention's output and log-sum-exp, and each linear's x @ A. Norms and activations are made again in backward,
    but not those of queries and keys: what they read is kept, and what attention reads. Phases: head and loss hold a chunk of logits, the
    hidden states and their gradient; a layer's backward four times its widest x (the activation's product, and the gradients of that and of
    its factors), and five of its hidden states; products over a group of packed weights hold these as they are multiplied, and two of the
    widest x: the product and its gradient, or the factors' gradients. A recurrent layer keeps its convolution's and its rule's output and
    the inverses of the rule's chunks, and in backward makes the rule's states again: a phase of its own, which grows with the number of
    samples too.
    """
    ours = adapts_experts or model.deterministic  # whose experts are the kernels' in all passes
    calls = _fitting(model, lambda: find_calls(model.base))
    outputs = count_kept_outputs(model.base, {m.name: m for m in model.model.modules() if isinstance(m, LoraLinear)})
    head, queries = model.base.head, [q_THD.shape for q_THD, *_ in calls.attentions]
    element, hidden, layers = head.weight_VH.element_size(), head.weight_VH.shape[1], len(layers_of(model.base.decoder))
    shapes = list(model.targets().values())
    attention = sum(element * heads * size + 4 * heads for _, heads, size in queries) / layers  # layers may differ in both
    recurrent = sum(weight_CW.shape[0] for _, weight_CW, *_ in calls.convolutions)
    read = [[x.shape[1:].numel() for x in args[:3]] for args in calls.delta_rules]
    if 0 < recurrent < sum(map(sum, read)):  # transformers below 5.23 repeats queries and keys for the values' heads: copies, kept as well
        recurrent += sum(q + k for q, k, _ in read)
    recurrent += sum(v for *_, v in read)
    inverses = sum(inverse_bytes(v_TGV) for _, _, v_TGV, *_ in calls.delta_rules)
    given = sum(n for _, n in shapes) + recurrent + calls.beside_linears + outputs
    layer = (element * given + inverses) / layers + attention
    shrunk = element * len(shapes) * 2 * rank  # two adapters to a tile: two blocks of x @ A
    experts, again = (element * each for each in _expert_elements(model, device, ours))
    # A recomputed layer's stay, too: x @ A of each row of experts, and where the rows lie, twice in 64 bits for a block of two parameters.
    rows = sum((element * max(rank, ROW_ALIGNMENT) + 8) * size.per_token for size in model.experts.sizes.values()) if ours else 0
    kept = layers * layer + shrunk + experts + rows
    saved = layer - element * hidden + (experts / layers if again else 0)  # a recomputed layer keeps its input
    widest = element * max(k for k, _ in shapes)
    backward = 4 * widest + 5 * element * hidden + again / layers
    linears, own_experts = _linear_scratch(model), _expert_scratch(model, device, adapts_experts)
    found = [
        Phase(chunk_bytes(head, device), kept + 2 * element * hidden, saved, kept / layers, at_head=True),
        Phase(own_experts, kept + backward, saved, kept / layers),
        *([Phase(linears, kept + backward - 2 * widest, saved, kept / layers)] if linears else []),
    ]
    for each, chunk in {rule_bytes(q, v) for q, _, v, *_ in calls.delta_rules}:  # one for each of 64 tokens, and one for each sample
        token = kept + 5 * element * hidden + each + 2 * chunk / RULE_CHUNK
        found.append(Phase(max(linears, own_experts), token, saved, kept / layers, chunk, RULE_CHUNK))
    return tuple(found)


def inverse_bytes(v_TGV: Tensor) -> int:
    """Of a token, what a gated delta rule by kernels keeps for its backward beside its inputs: a row of each head's inverse, in fp32."""
    return 4 * RULE_CHUNK * v_TGV.shape[1]


def rule_bytes(q_THK: Tensor, v_TGV: Tensor) -> tuple[int, int]:
    """Of a token in backward of a gated delta rule by kernels, gradients (that of out too), w, u, new and its gradient, and each head's
    gradients of q and k in fp32; and of each chunk, the states and theirs, and the chunk's decay.
    """
    (keys, key_size), (heads, size), element = q_THK.shape[1:], v_TGV.shape[1:], v_TGV.element_size()
    token = element * (heads * (key_size + 5 * size) + 4 * keys * key_size) + 8 * heads * key_size
    return token, heads * (element * 2 * key_size * size + 4)


def _expert_elements(model: SuperModel, device: torch.device, adapted: bool) -> tuple[int, int]:
    """Of a token in all layers, what experts keep (x of each row, what each product gives) and, where they are in compiled layers, which
    can be made again, the gradients of it all. Kernels read the first product's x where it lies, and of experts that no job adapts the
    family's own operations keep what products give.
    """
    sizes, kernels, visits = model.experts.sizes, model.experts.fit_kernels(device), model.experts.visits(adapted)
    frozen = frozen_experts(model).values()
    given = math.ceil(sum(each.visits * each.out_features for each in frozen))
    again = given + math.ceil(sum(each.visits * each.in_features for each in frozen))
    rows = sum(visits[name] * sum(size.product) for name, size in sizes.items())
    copies = sum(visits[name] * size.product[0] for name, size in sizes.items() if not name.endswith("down_proj"))
    if not adapted:
        return given + sum(visits[name] * size.product[1] for name, size in sizes.items()), again + rows
    return (given + rows - copies, again + rows) if kernels else (given + rows, 0)


def _linear_scratch(model: SuperModel) -> int:
    """What products over one group of linears (gate and up are the widest, two) need beyond the weights that are held."""
    return 2 * max((w.scratch_bytes for w in _weights(model)), default=0)


def _expert_scratch(model: SuperModel, device: torch.device, adapts_experts: bool) -> int:
    """What products over one expert, or a layer's by kernels, need beyond the weights that are held."""
    kernels = adapts_experts and model.experts.fit_kernels(device)
    return max((held.scratch_bytes(kernels) for held in held_experts(model.model)), default=0)


def _weights(model: SuperModel) -> list[FrozenWeight]:
    return [m.form for m in model.model.modules() if isinstance(m, LoraLinear)]


def possible_precisions(model: SuperModel, base_bytes: int, device: torch.device) -> dict[BasePrecision, int]:
    """What a base on the meta device that takes `base_bytes` there would take with its linears held in other precisions, the largest first;
    none where they are held in one already, by order or in the base's own files, or where the GPU cannot be asked.
    """
    is_held = any(isinstance(m, LoraLinear) and m.form.dtype.itemsize < 2 for m in model.model.modules())
    if is_held or getattr(model.base.model.config, "quantization_config", None) is not None or not can_be_asked(device):
        return {}
    bytes_of = {precision: bytes_in(precision, model, base_bytes) for precision in precisions_on(device, model.base.head.weight_VH.dtype)}
    return dict(sorted(bytes_of.items(), key=lambda item: -item[1]))


def bytes_in(precision: BasePrecision, model: SuperModel, base_bytes: int) -> int:
    """What `base_bytes` of a plain base would be with that `base_precision`, the scratch of one group of linears included."""
    plain = _weights(model)
    held = [quantized(weight.operand(), precision, weight.dtype) for weight in plain]
    saved = sum(held_bytes(weight) for weight in plain) - sum(held_bytes(weight) for weight in held)
    return base_bytes - saved + 2 * max((weight.scratch_bytes for weight in held), default=0)


def bytes_when_shared(model: SuperModel, base_bytes: int, world_size: int, slots: int = 2) -> int:
    """What `base_bytes` would be on each of `world_size` ranks that share the base: a part of every decoder layer, `slots` whole ones, and
    all that is in no layer. `model` is on the meta device.
    """
    layout = shared_layout(model, world_size)
    return base_bytes - layout.weight_bytes + layout.rank_bytes + min(slots, len(layout.layers)) * layout.slot_bytes


def shared_layout(model: SuperModel, world_size: int) -> BaseLayout:
    """Where the decoder layers of `model`, on the meta device, would lie if `world_size` ranks shared them, or one streamed them. Raises
    ModelError for a base whose weights cannot be cut by rows or are in parts in its files, for samples that go one by one, for experts,
    and for one without a list of layers.
    """
    base = model.base
    if base.why_one_by_one:
        raise ModelError(f"base_model {base.name}: its samples go one by one, for which it is held whole: {base.why_one_by_one}")
    refuse_experts(model.model, model.base.name)
    linears = {m.name: m for m in model.model.modules() if isinstance(m, LoraLinear)}
    if why := why_in_parts(model.model, [f"{name}.weight" for name in linears]):
        raise ModelError(f"base_model {model.base.name}: it cannot be shared or streamed: {why}. Load it whole")
    weights = {name: m.form for name, m in linears.items()} | expert_weights(model.model)
    check_cut(model.model, weights)
    return lay_out(by_layer(model.model, model.base.name, weights), world_size)


def bytes_when_streamed(model: SuperModel, base_bytes: int, device: torch.device) -> StreamedBytes:
    """Of a base of `base_bytes`, whose `model` is on the meta device. A CPU is its own host: all layers count there beside the slots."""
    layout = shared_layout(model, 1)
    beside = base_bytes - layout.weight_bytes + (0 if device.type == "cuda" else layout.rank_bytes)
    return StreamedBytes(layout.rank_bytes, layout.slot_bytes, len(layout.layers), beside)


def can_be_cut(model: SuperModel) -> bool:
    """Whether GPUs hold the base in parts, or one streams it, without an order: a mixture's layers are then compiled no more."""
    return not expert_modules(model.model) and may_be_cut(model)


def may_be_cut(model: SuperModel) -> bool:
    """Whether GPUs can hold the base in parts, and one can stream it, where a run orders it."""
    try:
        shared_layout(model, 1)
    except ModelError:
        return False
    return True


def bytes_by_gpus(model: SuperModel, device: torch.device, layout: LayoutSetting = "auto") -> list[int]:
    """What the base takes on each of 1, 2, ... GPUs: whole on one, unless it shall be streamed, and in parts on several; whole on each if
    it cannot be cut. `model` is on the meta device. Raises ModelError for such a one that shall be streamed.
    """
    base_bytes = model.base.num_bytes
    if layout != "streamed" and not can_be_cut(model):
        return [base_bytes] * MOST_GPUS
    alone = bytes_when_streamed(model, base_bytes, device).on_device(Streaming().slots) if layout == "streamed" else base_bytes
    return [alone, *(bytes_when_shared(model, base_bytes, count) for count in range(2, MOST_GPUS + 1))]


def count_base(
    model: SuperModel,
    device: torch.device,
    layout: LayoutSetting = "auto",
    rank: int = ACTIVATION_RANK,
    adapts_experts: ExpertJobs = False,
) -> BaseMemory:
    """What a scheduler must know of the base's bytes on GPUs such as `device`, for jobs with adapters of up to `rank`, of experts too or
    not. `model` is on the meta device. Raises ModelError.
    """
    count = measure_in_parts if layout in ("shared", "streamed") and may_be_cut(model) else measure
    memory = count(model, model.base.num_bytes, device, rank, adapts_experts)
    streams = device.type == "cuda" and can_be_cut(model)
    streamed = bytes_when_streamed(model, model.base.num_bytes, device).on_device(Streaming().slots) if streams else 0
    return base_memory(memory, bytes_by_gpus(model, device, layout), streamed)


def _probe_lora(model: SuperModel, rank: int, adapts_experts: bool) -> LoraConfig:
    """All linears where they may be adapted (those of blocks of experts may not), and all parameters of experts that can be, or none."""
    experts = tuple(f"{block}." for block in expert_modules(model.model))
    names = [n for n in model.targets() if not n.startswith(experts)]
    parameters = sorted({name.rsplit(".", 1)[-1] for name in model.experts.sizes}) if adapts_experts else []
    return LoraConfig(r=max(rank, ROW_ALIGNMENT), target_modules=names, target_parameters=parameters or None)


def _saved_bytes(model: SuperModel, name: str, num_tokens: int, device: torch.device) -> int:
    """What a pass on `device` saves for backward, counted without numbers."""
    row = BatchRow(name, np.zeros(num_tokens, np.int32), np.ones(num_tokens, np.float32))
    batch = collate([row], "meta")
    own = {p.untyped_storage()._cdata for p in model.model.parameters()} | {b.untyped_storage()._cdata for b in model.model.buffers()}
    seen: dict[int, Tensor] = {}  # holds the tensors, or a freed one's address would come again

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            seen[tensor.untyped_storage()._cdata] = tensor
        return tensor

    active = ActiveBatch(batch, model.passes.weights, model.bank, {}, torch.zeros((), device="meta", requires_grad=True))
    samples: tuple[int, ...] | SampleLayout = batch.lengths
    if groups_on(device, model.deterministic):
        active, samples = replace(active, jobs=chunk_jobs([num_tokens])), lay_out_samples(batch.lengths, device, batch.input_ids_T.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), model.context.enter(active):
        hidden_states(model.base, batch.input_ids_T, batch.position_ids_T, samples)
    return sum(t.untyped_storage().nbytes() for t in seen.values())


def memory_limit(device: torch.device, ordered: int | Literal["auto"] = "auto") -> int:
    """Bytes that a run may take on `device` before the base is loaded: as ordered, or what is free now; on a GPU that is not here no more
    than that has.
    """
    own = limit_elsewhere() if device.type == "cuda" else None
    if ordered != "auto":
        return ordered if own is None else min(ordered, own)
    if own is not None:
        return own
    if device.type == "cuda":
        return int(_GPU_SHARE * torch.cuda.mem_get_info(device)[0])
    return int(CPU_SHARE * psutil.virtual_memory().available)


def more_memory(device: torch.device, limit_bytes: int, ordered: int | Literal["auto"]) -> str:
    """The remedy where `limit_bytes` do not do: the order may be raised, a GPU that has no more may not."""
    return "take a larger GPU" if device.type == "cuda" and limit_bytes != ordered else "raise memory_limit"
