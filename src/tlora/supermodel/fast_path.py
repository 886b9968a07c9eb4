"""What a GPU adds to a base: linears that read the same x run as one, each decoder layer is compiled once, passes have numbers.

Any family: which linears share an input is seen by running the model, and layers are found as the decoder's one list of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

from tlora.adapters.bank import AdapterBank
from tlora.batching.recompute_plan import RecomputePlan
from tlora.cache_directory import share_compiled_kernels
from tlora.kernels.cards import HOPPER
from tlora.kernels.chunk_layout import list_chunks
from tlora.kernels.delta_rule import CHUNK
from tlora.kernels.device import card_of, describe_class, launched_as, why_plain
from tlora.kernels.frozen import BaseWeights, PlainWeight
from tlora.kernels.lora_tables import ADDRESS_FIELDS, RUNS_STEP, Run, Slots, build_tables, rank_width
from tlora.shape.token_cost import HIDES_LAUNCHES, SLOW_HOST
from tlora.supermodel.attention import chunk_of
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.cuda_graphs import Backward, CudaGraphs, Shape
from tlora.supermodel.expert_jobs import kernel_batch
from tlora.supermodel.experts import Experts
from tlora.supermodel.frozen_experts import counted_on_host
from tlora.supermodel.held_experts import held_experts
from tlora.supermodel.inject import expert_modules
from tlora.supermodel.kernel_tiles import digest_of_passes
from tlora.supermodel.load import Base, hidden_states, layers_of
from tlora.supermodel.lora_linear import Context, LinearsOfOneInput, LoraLinear
from tlora.supermodel.recurrent_layers import why_not_in_passes
from tlora.supermodel.routers import take_passes, why_not_alone
from tlora.supermodel.structure import find_groups, find_unread

if TYPE_CHECKING:
    from tlora.kernels.fused_linear import LinearGroup  # these bring triton, which not every CPU install has
    from tlora.kernels.pass_operations import ExpertPass, PassState

_LARGEST_HEAD = 256  # `kernels.varlen_attention.LARGEST_HEAD`, which brings triton
_MOST_KINDS = 64  # compilations of one layer's code: Gemma 4 has six kinds of layers, each with and without backward, and torch stops at 8
_HINT = 8192  # tokens: as many as a GPU's micro-batch has at most
_BEHIND = 2**31 - 1  # where empty runs lie, of which a batch has one at least: behind all tokens


def why_not_fused(base: Base, linears: Mapping[str, LoraLinear], experts: Experts, device: torch.device, deterministic: bool) -> str | None:
    """Why a pass over `base` on `device` does not take the fused kernels; None where it does."""
    if base.why_one_by_one:
        return f"samples go one by one: {base.why_one_by_one}"
    if (why := why_plain(device)) is not None:
        return why
    if (why := why_not_in_passes(base.model, base.head.weight_VH.dtype)) is not None:
        return why
    if held_experts(base.model):
        return "experts are packed, shared or streamed, so that layers are not compiled"
    if (name := counted_on_host(base.model)) is not None:
        return f"{name} reads on the host how many tokens each expert has"
    if not fit_kernels(base.head.weight_VH.dtype, ()):
        return f"the base is in {str(base.head.weight_VH.dtype).removeprefix('torch.')}"
    for name, linear in linears_in_passes(base, linears, deterministic).items():
        if not fit_kernels(linear.form.dtype, widths := (linear.in_features, linear.out_features)):
            return f"the kernels take widths that are multiples of 16, and {name} has {widths[0]} to {widths[1]}"
    if not fit_attention(base):
        return f"the kernels take attention heads of up to {_LARGEST_HEAD}, and this base has larger ones"
    why = why_not_alone(base, experts, device) if deterministic and expert_modules(base.model) else None
    return why and f"a deterministic run computes each sample by itself where {why}"  # in company they give a row other bits


def describe_kernels(base: Base, linears: Mapping[str, LoraLinear], experts: Experts, device: torch.device, deterministic: bool) -> str:
    """`fused, sm_89, 99 KB`, or `plain: ` and why."""
    why = why_not_fused(base, linears, experts, device, deterministic)
    return f"plain: {why}" if why is not None else f"fused, {describe_class(card_of(device) or HOPPER, device)}"


def fit_attention(base: Base) -> bool:
    """Whether all heads are small enough for the attention kernels: Gemma 4's global ones, of 512, are not, and take the plain path."""
    sizes = [size for module in base.model.modules() if isinstance(size := getattr(module, "head_dim", None), int)]
    return max(sizes, default=0) <= _LARGEST_HEAD


def linears_in_passes(base: Base, linears: Mapping[str, LoraLinear], deterministic: bool) -> dict[str, LoraLinear]:
    """Those that a pass computes by the kernels: all but linears of blocks of experts, which no job adapts, whose widths are off 16.
    PyTorch computes these, as a shared expert's gate, which has one output; none in a deterministic run, where a row's bits would depend on
    others.
    """
    blocks = () if deterministic else tuple(f"{block}." for block in expert_modules(base.model))
    return {
        name: linear
        for name, linear in linears.items()
        if not (
            name.startswith(blocks)
            and isinstance(linear.form, PlainWeight)
            and not fit_kernels(linear.form.dtype, (linear.in_features, linear.out_features))
        )
    }


def fit_kernels(dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Whether linears of `widths` (in and out features) in `dtype` are what the kernels take."""
    return dtype != torch.float64 and all(width % 16 == 0 for width in widths)


class FastPath:
    """The groups of linears of one base, and the passes of its batches on them. `tiles` is a digest of the kernels' tile shapes."""

    def __init__(self, base: Base, linears: Mapping[str, LoraLinear], context: Context, deterministic: bool, experts: Experts) -> None:
        from tlora.kernels.fused_linear import make_group

        if base.recurrent:
            import tlora.kernels.recurrent_operations  # noqa: F401  (the operations are known from then on)

        share_compiled_kernels()
        self._base, self._context, self._deterministic = base, context, deterministic
        here = [m for name, m in linears.items() if base.stage is None or name.startswith(tuple(f"{layer}." for layer in base.stage.names))]
        work = sum(linear.in_features * linear.out_features for linear in here)
        linears = linears_in_passes(base, linears, deterministic)
        self._experts = experts if experts.on_kernels else None
        if self._experts is not None:
            self._experts.take_passes(context)
        # Experts are ours in all passes then, and routers: the family's own code gives a row other bits in company.
        self._repeats_experts = deterministic and bool(expert_modules(base.model))
        if self._repeats_experts:
            take_passes(base.model, context)
        self.recompute = RecomputePlan()  # layers from the first on that backward runs again instead of keeping what they made
        self._recomputed_layers = 0  # by the pass whose forward runs now
        self.largest_rank = 0  # that there was or will be: S is as wide from the start, so that nothing is compiled when it comes or goes
        self._names: list[str] = []  # of all linears, group by group: the order of the tables
        self.groups: list[LinearGroup] = []
        self._chunks = sorted({chunk_of(module) for module in base.model.modules()} - {0})
        device, unread = base.head.weight_VH.device, find_unread(base, linears)
        for members in find_groups(base, linears):
            widths = tuple(linears[name].out_features for name in members)
            together = [linears[name] for name in members]
            scales = [m.frozen.weight.row_scale_N for m in together] if together[0].form.row_scale_N is not None else []
            weight_scale_N = torch.cat([scale_N for scale_N in scales if scale_N is not None]) if scales else None
            group = make_group(len(self._names), widths, together[0].in_features, device, weight_scale_N)
            self.groups.append(replace(group, feeds_backward=not unread.issuperset(members)))
            shared = LinearsOfOneInput(list(widths), len(self.groups) - 1)
            for place, member in enumerate(together):
                member.shared, member.place = shared, place
            self._names += members
        if base.stage is None or base.stage.layers.is_first:
            self.groups[0] = replace(self.groups[0], passes_back=False)  # before it there is the embedding
        self.tiles = digest_of_passes(base, self.groups, list(linears.values()), experts, self._repeats_experts)
        self._module_keys = np.array([linears[name].module_key for name in self._names], np.int32)
        base.model.get_input_embeddings().register_forward_hook(self._begin_graph)
        self._known: dict[tuple[int, str], tuple[object, tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        layers = [layer for number, layer in enumerate(layers_of(base.decoder)) if base.stage is None or number in base.stage.layers]
        self.num_layers = len(layers)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_KINDS)
        for number, layer in enumerate(layers):
            layer.forward = self._compiled(layer.forward, number, device)
        # What experts compute is not known, and other GPUs than Hopper's were not measured: nothing is padded there.
        measured = not expert_modules(base.model) and launched_as(device).sized
        self._launch_tokens = int(SLOW_HOST * HIDES_LAUNCHES * self.num_layers / work) if measured else 0
        # A graph has the addresses of weights; those of a shared base change with the slots. It is large enough to do without.
        captured = device.type == "cuda" and base.layers is None and not _experts_wait(base, device)
        self._graphs: list[CudaGraphs] = []
        if captured:
            self._graphs.append(self._new_graphs())

    @property
    def runs_experts(self) -> bool:
        """Whether passes may have jobs that adapt experts."""
        return self._experts is not None

    @property
    def launched_passes(self) -> int:
        """How many there were, where passes may be graphs, that were no replay: they took longer than they will."""
        return sum(graphs.num_launched for graphs in self._graphs)

    def release_memory(self) -> None:
        """Give back what is kept for passes to come."""
        for graphs in self._graphs:
            graphs.release()

    def _new_graphs(self) -> CudaGraphs:
        stage = self._base.stage
        return CudaGraphs(self.run, self._base.head.weight_VH, None if stage is None else stage.input, self._graphs)

    def _free_graphs(self) -> CudaGraphs | None:
        """Those of no open pass. Of a stage, which has several passes open at a time, each has graphs and memory of its own."""
        free = next((graphs for graphs in self._graphs if not graphs.busy), None)
        if free is None and self._graphs and self._base.stage is not None:
            self._graphs.append(free := self._new_graphs())
        return free

    def _begin_graph(self, _module: nn.Module, _args: object, embedded: Tensor) -> Tensor:
        """The first layer's x needs a gradient like the others': a layer without one would be compiled twice."""
        return embedded.requires_grad_() if self._context.pass_number is not None and torch.is_grad_enabled() else embedded

    def _compiled(self, forward: Callable[..., Any], number: int, device: torch.device) -> Callable[..., Any]:
        """A layer's `forward`, compiled for passes, with the number of tokens left open: one compilation serves all of them.

        In a deterministic one neither a timing nor the length of the first batch chooses between forms of a reduction, which round
        differently: all are compiled as for `_HINT` tokens. Inductor still times forms of elementwise kernels, so that these round each
        operation as eager PyTorch does: where a product and a sum may become one FMA, a row's bits depend on the form, and in some forms on
        where in the batch the row lies.
        """
        if device.type == "cuda":
            options: Any = {"deterministic": True, "emulate_precision_casts": True} if self._deterministic else {}
            fast: Any = torch.compile(forward, backend="inductor", options=options)
        else:
            fast = torch.compile(forward, backend="aot_eager")

        def layer(*args: Any, **kwargs: Any) -> Any:
            # A SwiGLU's product is cheap to make again from what is saved anyway, though backward then writes it out: 11 GiB less at 8B.
            with functorch_config.patch(ban_recompute_materialized_backward=False):
                return fast(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._context.pass_number is None:
                return forward(*args, **kwargs)
            _leave_token_count_open(_HINT if self._deterministic else None, *args, *kwargs.values())
            if number < self._recomputed_layers and torch.is_grad_enabled():
                contexts = partial(self._contexts_of, self._context.pass_number)
                again = _sees_the_same_again(layer, kwargs)
                return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
            return layer(*args, **kwargs)

        return run

    @staticmethod
    def _contexts_of(pass_number: Tensor) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """In which a layer runs in the pass's forward, and again in its backward."""
        from tlora.kernels.pass_operations import recomputing

        return nullcontext(), recomputing(pass_number)

    def begin(self, batch: PackedBatch, weights: BaseWeights, bank: AdapterBank | None, dropout: Mapping[str, float]) -> PassState:
        """What the kernels of one pass over `batch` look up, with the adapters of its jobs; without a bank the base alone."""
        from tlora.kernels.packed_attention import padded, plan_attention
        from tlora.kernels.pass_operations import PassState

        device, lengths = batch.input_ids_T.device, padded(batch.lengths)
        runs = [Run(span.t0, span.t1, span.lengths, dropout.get(span.job_id, 0.0)) for span in batch.spans]
        empty = [Run(_BEHIND, _BEHIND, ())] * (RUNS_STEP - len(runs) % RUNS_STEP)
        empty[-1] = Run(_BEHIND, _BEHIND, (0,) * (len(lengths) - sum(len(run.lengths) for run in runs)))
        tables = build_tables([*runs, *empty], self._slots(batch, bank, len(empty)), len(batch.input_ids_T), batch.keys_T, device)
        self.largest_rank = max(self.largest_rank, bank.largest_rank if bank is not None else 0)
        tables = replace(tables, width=rank_width(self.largest_rank))
        groups = self.groups
        if self._context.tokens is not None:  # the embedding learns
            groups = [replace(groups[0], passes_back=True), *groups[1:]]
        attention = plan_attention(lengths, device, self._deterministic, self._chunks)
        chunks = list_chunks(lengths, CHUNK, device) if self._base.recurrent else None
        return PassState(groups, self._names, weights, tables, attention, self._expert_pass(batch, bank), chunks)

    def _expert_pass(self, batch: PackedBatch, bank: AdapterBank | None) -> ExpertPass | None:
        """None where experts are the base's own: no job of `batch` adapts any, and bits need not repeat in company."""
        if self._experts is None or not (self._repeats_experts or (bank is not None and self._experts.adapted_by(bank, batch))):
            return None
        from tlora.kernels.pass_operations import ExpertPass

        return ExpertPass(kernel_batch(batch, bank, self._experts.sizes), tuple(self._experts.sizes), self._experts.look_ups())

    def decode(
        self, batch: PackedBatch, weights: BaseWeights, bank: AdapterBank | None, dropout: Mapping[str, float], train: bool
    ) -> tuple[Tensor, Backward | None]:
        """Hidden states [T, H] of `batch` with the adapters of `bank` (None: the base alone), and in training what takes their gradient
        back; then perhaps with more padding. A pass over a whole base that overlaps another one runs without a graph.
        """
        state = self.begin(batch, weights, bank, dropout)
        if not train or bank is None:
            with torch.no_grad():
                return self._decode(batch, state), None
        if (graphs := self._free_graphs()) is None:
            return self.run(batch, state)
        if self._base.decoder._forward_hooks or self._context.tokens is not None:  # a graph calls no hooks
            return graphs.run_uncaptured(batch, state)
        tokens = len(batch.input_ids_T)
        own = Shape(tokens, self._recomputed(tokens), state.shape)
        size = graphs.size_for(own, batch.most_tokens, self._launch_tokens, partial(self._shape_with, batch, state), bank.version)
        if size > tokens:
            batch = batch.padded(size)
            state = self.begin(batch, weights, bank, dropout)
        return graphs.run(batch, state, bank.version, self._recomputed(len(batch.input_ids_T)))

    def _recomputed(self, tokens: int) -> int:
        """Layers of those here: what is planned may be for a stage that has more."""
        return min(self.recompute.layers(tokens), self.num_layers)

    def _shape_with(self, batch: PackedBatch, state: PassState, tokens: int) -> Shape:
        """Of `batch`, whose pass is `state`, with padding up to `tokens`."""
        from tlora.kernels.packed_attention import attention_shape, padded

        lengths = padded(batch.padded_lengths(tokens))
        attention = attention_shape(lengths, batch.input_ids_T.device, self._deterministic, self._chunks)
        launches = (*state.tables.shape_with(len(lengths)), *attention, state.experts_shape)
        return Shape(tokens, self._recomputed(tokens), launches)

    def run(self, batch: PackedBatch, state: PassState) -> tuple[Tensor, Backward]:
        """The same, launched from Python at once, here and now."""
        self._recomputed_layers = self._recomputed(len(batch.input_ids_T))
        hidden_TH = self._decode(batch, state)

        def backward(dhidden_TH: Tensor) -> None:
            with self._entered(state):  # layers that are computed again look it up
                hidden_TH.backward(dhidden_TH)

        return hidden_TH.detach(), backward

    @contextmanager
    def _entered(self, state: PassState) -> Iterator[None]:
        """In the pass, whose experts may be ours."""
        ours = self._experts if state.experts is not None else None
        if ours is not None:
            ours.take_over(True)
        try:
            with self._context.enter_pass(state.number):
                yield
        finally:
            if ours is not None:
                ours.take_over(False)

    def _decode(self, batch: PackedBatch, state: PassState) -> Tensor:
        with self._entered(state):
            return hidden_states(self._base, batch.input_ids_T, batch.position_ids_T, state.number)

    def _slots(self, batch: PackedBatch, bank: AdapterBank | None, num_empty: int) -> Slots:
        """Where each run's adapter lies at each linear; then come empty runs, which have none."""
        count = len(self._names)
        empty = np.zeros((count, ADDRESS_FIELDS), np.int64), np.zeros(count, np.int32), np.zeros(count, np.float32)
        runs = [self._slots_of(span.job_id, bank) if bank is not None and span.job_id in bank else empty for span in batch.spans]
        runs += [empty] * num_empty
        rows, starts, scales = (np.stack(parts, 1) for parts in zip(*runs, strict=True))
        weights = [None if bank is None else bank.weights(name) for name in self._names]
        return Slots(rows, starts, scales, self._module_keys, weights)

    def _slots_of(self, job_id: str, bank: AdapterBank) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Addresses and rank [L, 5], first rows [L], scales [L]; made anew when a tensor may have moved."""
        addresses = bank.addresses(job_id)
        known = self._known.get((id(bank), job_id))
        if known is None or known[0] is not addresses:
            slots = [addresses.get(name) for name in self._names]
            rows = np.array([(s.a, s.b, s.da, s.db, s.rank) if s else (0,) * ADDRESS_FIELDS for s in slots], np.int64)
            starts = [bank.linear(name).used[job_id].start if s else 0 for name, s in zip(self._names, slots, strict=True)]
            scales = np.array([s.scale if s else 0.0 for s in slots], np.float32)
            known = self._known[id(bank), job_id] = (addresses, (rows, np.array(starts, np.int32), scales))
        return known[1]


def _experts_wait(base: Base, device: torch.device) -> bool:
    """Whether there are experts whose grouped product reads on the host how many tokens each has: torch's own kernel takes bf16 alone, on
    compute capabilities 9 and 10.
    """
    grouped = base.head.weight_VH.dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return bool(expert_modules(base.model)) and not grouped


def _sees_the_same_again(layer: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """`layer` with `kwargs`, which may run twice. What it leaves in a mapping for later layers, as Gemma 4's do with keys and values, is
    left the first time alone: compiled for a mapping that has them already, it would keep other tensors for backward.
    """
    shared = {name: value for name, value in kwargs.items() if isinstance(value, MutableMapping)}
    first = {name: copy(value) for name, value in shared.items()}

    def run(*args: Any) -> Any:
        own = {name: copy(value) for name, value in first.items()}
        out = layer(*args, **{**kwargs, **own})
        while shared:
            name, value = shared.popitem()
            value.update(own[name])
        return out

    return run


def _leave_token_count_open(hint: int | None, *values: Any) -> None:
    """Tell torch.compile that dim 1 of tensors [1, T, ...] varies, of which the first is a layer's x, and to choose as for T = `hint`."""
    tensors = [tensor for value in values for tensor in (value if isinstance(value, tuple) else (value,)) if isinstance(tensor, Tensor)]
    long = [tensor for tensor in tensors if tensor.ndim > 1 and tensor.shape[1] > 1]
    for tensor in long:
        if hint is not None and tensor.shape[1] == long[0].shape[1]:
            torch._dynamo.mark_dynamic(tensor, 1, hint_override=hint)
        else:
            torch._dynamo.maybe_mark_dynamic(tensor, 1)
