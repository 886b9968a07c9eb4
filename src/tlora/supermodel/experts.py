"""Experts of a mixture as LoRA targets: which parameters of a model can be adapted, and how its experts run while jobs adapt them.

transformers' experts ask its `ExpertsInterface` what computes them; there they get `kernels/experts.py`. Routers, gates and norms stay the
family's own. A family is proven when a model of it is taken: our path has to give what its own eager experts give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tlora.adapter_shape import ExpertSize
from tlora.adapters.bank import AdapterBank
from tlora.adapters.layout import AdapterLayout
from tlora.kernels.cards import CardClass
from tlora.kernels.compile_request import ExpertRequest
from tlora.kernels.device import may_run_kernels
from tlora.kernels.experts import ExpertAdapters, ExpertWeights, combine, dispatch, expert_linear, route
from tlora.kernels.multi_lora import LoraWeights
from tlora.kernels.reference import Segment
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.expert_jobs import JobRows, Source, jobs_in
from tlora.supermodel.held_experts import HeldExperts
from tlora.supermodel.lora_linear import Context
from tlora.supermodel.scaled_experts import adopt, all_tokens, is_scaled, why_left
from tlora.wording.dtypes import dtype_name

if TYPE_CHECKING:
    from tlora.kernels.expert_kernels import ExpertBatch  # brings triton, which not every CPU install has
    from tlora.supermodel.routers import RoutersSeen  # imports this

NAME = "tlora_experts"
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "moe_top_k")
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative; of 16 bits, where eager experts round each sum of slots:
_OF_16_BITS = 5e-2


class PassExperts:
    """How a block finds its pass on the kernels: by the numbers of its two parameters. Nothing here but these is another for another
    layer, or torch.compile would compile each by itself.
    """

    def __init__(self, context: Context, numbers: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> None:
        self.context, self.widths, self.dtype = context, widths, dtype
        self.up, self.down = (torch.tensor(number) for number in numbers)

    def run(self, module: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, pass_number: Tensor) -> Tensor:
        """As `ExpertBlock.run`, with what the jobs of the pass add."""
        operations: Any = torch.ops.tlora
        x_TH, weights_TK = _scaled(module, x_TH, weights_TK)
        routed, slots = operations.route_experts(experts_TK, self.up, pass_number), experts_TK.shape[1]
        y_SN = operations.expert_linear(x_TH.to(self.dtype), routed, self.widths[0], slots, self.up, self.up, pass_number)
        y_SH = operations.expert_linear(_activated(module, y_SN), routed, self.widths[1], 0, self.down, self.up, pass_number)
        return operations.combine_experts(_normed(module, y_SH), weights_TK, self.up, pass_number).to(x_TH.dtype)


@dataclass
class ExpertBlock:
    """One module of experts. `parameters`: dotted names of what can be adapted, in the module's own order. `before`: what computed it."""

    name: str
    module: Any
    before: str
    source: Source | None = None

    @property
    def up(self) -> str:
        return "gate_up_proj" if self.module.has_gate else "up_proj"

    @property
    def parameters(self) -> list[str]:
        names = [name for name, _ in (*self.module.named_parameters(recurse=False), *self.module.named_children())]
        return [name for name in names if name in (self.up, "down_proj")]

    @property
    def is_held(self) -> bool:
        """Whether it has weights that are no plain parameters: then no other code than ours computes with them in training."""
        return any(isinstance(getattr(self.module, name), HeldExperts) for name in self.parameters)

    @property
    def is_exchanged(self) -> bool:
        """Whether A of an adapter lies at the outputs, and B at the inputs: PEFT, which asks a module for `is_transposed`, reads parameters
        [E, in, out] of one that does not say so as [E, out, in].
        """
        return is_scaled(self.module)

    def size(self, parameter: str) -> ExpertSize:
        """As an adapter has it."""
        experts, rows, columns = getattr(self.module, parameter).shape
        inputs, outputs = (rows, columns) if self.module.is_transposed != self.is_exchanged else (columns, rows)
        return ExpertSize(inputs, outputs, experts, experts_per_token(self.module.config), self.is_exchanged)

    def jobs(self) -> dict[str, JobRows | None]:
        """What they add at each parameter in the pass that runs now."""
        return {name: self.source(f"{self.name}.{name}") for name in self.parameters} if self.source is not None else {}

    def weights(self, parameter: str) -> ExpertWeights:
        bias = getattr(self.module, f"{parameter}_bias") if self.module.has_bias else None
        return ExpertWeights(getattr(self.module, parameter), bias, self.module.is_transposed)

    def frozen(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """As the base computes it, without adapters."""
        own: Any = ALL_EXPERTS_FUNCTIONS.get_interface(self.before, type(self.module).forward.__wrapped__)  # type: ignore[attr-defined]
        return own(self.module, x_TH, experts_TK, weights_TK)

    def run(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, jobs: dict[str, JobRows | None]) -> Tensor:
        """With what `jobs` add at each parameter."""
        x_TH, weights_TK = _scaled(self.module, x_TH, weights_TK)
        first = next((rows for rows in jobs.values() if rows is not None), None)
        if first is not None and first.batch is not None:
            return self._run_kernels(x_TH, experts_TK, weights_TK, first.batch, first.anchor)
        ends = first.ends if first is not None else (x_TH.shape[0],)
        anchor = None if first is None else first.anchor
        up, down = self.weights(self.up), self.weights("down_proj")
        routing = route(experts_TK, ends, up.weight.shape[0])
        adapters = {name: _adapters(rows, routing, up.weight.shape[0], self.is_exchanged) for name, rows in jobs.items()}
        y_SN = expert_linear(dispatch(x_TH.to(up.weight.dtype), routing), lambda: up, routing, adapters.get(self.up), anchor)
        y_SH = expert_linear(_activated(self.module, y_SN), lambda: down, routing, adapters.get("down_proj"), anchor)
        return combine(_normed(self.module, y_SH), weights_TK, routing).to(x_TH.dtype)

    def _run_kernels(self, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor, batch: ExpertBatch, anchor: Tensor | None) -> Tensor:
        """The same. x is read where it lies, and nothing waits for the device."""
        from tlora.kernels import expert_kernels as kernels

        up, down = self.weights(self.up), self.weights("down_proj")
        experts, dtype = up.weight.shape[0], up.weight.dtype
        routing = kernels.route(experts_TK, batch, experts, kernels.tile_rows_for(experts_TK.numel(), experts, dtype))
        rows = {name: batch.rows(f"{self.name}.{name}") for name in self.parameters}
        y_SN = kernels.expert_linear(x_TH.to(dtype), partial(_dense, up), routing, rows[self.up], True, anchor)
        y_SH = kernels.expert_linear(_activated(self.module, y_SN), partial(_dense, down), routing, rows["down_proj"], anchor=anchor)
        return kernels.combine(_normed(self.module, y_SH), weights_TK, routing).to(x_TH.dtype)


def _scaled(module: Any, x_TH: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """x and the weights of what experts give, where tokens are scaled before these."""
    return (x_TH * weights_TK, torch.ones_like(weights_TK)) if is_scaled(module) else (x_TH, weights_TK)


def _activated(module: Any, y_SN: Tensor) -> Tensor:
    """What the family's own code makes of the first product."""
    return module._apply_gate(y_SN) if module.has_gate else module.act_fn(y_SN)


def _normed(module: Any, y_SH: Tensor) -> Tensor:
    """What it makes of the second, before slots are combined."""
    return module.post_expert_norm(y_SH) if getattr(module, "has_post_expert_norm", False) else y_SH  # below 5.23 nothing is said of it


def hold_experts(model: nn.Module, name: str, held: HeldExperts) -> None:
    """Put `held` in the place of the parameter `name` of experts of `model`, whose module asks us from now on."""
    path, _, parameter = name.rpartition(".")
    module: Any = model.get_submodule(path)
    assert tuple(getattr(module, parameter).shape) == held.shape, f"{name}: {held.shape}"
    delattr(module, parameter)
    setattr(module, parameter, held)
    module.tlora_block = ExpertBlock(path, module, "eager")
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
    module.config._experts_implementation = NAME


def expert_parameters(model: nn.Module) -> dict[str, Any]:
    """All parameters [E, A, B] of experts that can be adapted, by their dotted names."""
    return {
        f"{name}.{parameter}": getattr(module, parameter)
        for name, module in _adaptable(model)
        for parameter in ExpertBlock(name, module, "").parameters
    }


def adaptable_modules(model: nn.Module) -> list[str]:
    """Names of the modules that these are in."""
    return [name for name, _ in _adaptable(model)]


def experts_per_token(config: Any) -> int:
    """To how many experts a token goes; 0 where the config does not say, or not for all layers alike."""
    parts = (config, *(part for part in vars(config).values() if isinstance(part, PretrainedConfig)))  # the latter of DBRX' layers
    found = (getattr(part, key, None) for part in parts for key in _PER_TOKEN)
    return next((value for value in found if isinstance(value, int)), 0)


def _adapters(rows: JobRows | None, routing: Any, experts: int, exchanged: bool) -> ExpertAdapters | None:
    if rows is None:
        return None
    segments: list[Segment] = []
    for run in routing.runs:
        slot = rows.slots[run.run] if run.run < len(rows.slots) else None
        if slot is not None:
            own, scale = slot
            rank = len(own) // experts
            first = own.start + run.expert * rank
            segments.append(Segment(run.s0, run.s1, first, first + rank, scale))
    own = rows.weights
    weights = LoraWeights(own.b_RN, own.a_RK, own.db_RN, own.da_RK) if exchanged else own
    return ExpertAdapters(weights, tuple(segments))


def _block_of(name: str, module: Any) -> ExpertBlock:
    """What there is of it; in a base of which other layers' experts alone are held, its own code computed it."""
    before = module.config._experts_implementation
    return getattr(module, "tlora_block", None) or ExpertBlock(name, module, "eager" if before == NAME else before)


def _experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The implementation that transformers calls by `NAME`."""
    passes = getattr(module, "tlora_passes", None)
    if passes is not None and passes.context.pass_number is not None:
        return passes.run(module, hidden_states, top_k_index, top_k_weights, passes.context.pass_number)
    block = _block_of("", module)
    jobs = block.jobs()
    if all(rows is None for rows in jobs.values()) and not block.is_held:
        return block.frozen(hidden_states, top_k_index, top_k_weights)
    return block.run(hidden_states, top_k_index, top_k_weights, jobs)


def _is_ours(module: Any) -> bool:
    """Whether it asks us in the pass that runs now, and we do not leave it to its own code."""
    passes = getattr(module, "tlora_passes", None)
    if module.config._experts_implementation != NAME:
        return False
    if passes is not None and passes.context.pass_number is not None:
        return True
    block = _block_of("", module)
    return block.is_held or any(rows is not None for rows in block.jobs().values())


class Experts:
    """All blocks of experts of a model whose parameters can be adapted. `sizes`: by the dotted names of the parameters.

    `why_not`: why those that it has cannot be, in a family whose own experts compute something else.
    """

    def __init__(self, model: nn.Module) -> None:
        self.blocks = [_block_of(name, module) for name, module in _adaptable(model)]
        self.why_not = _why_not(self.blocks) or why_left(model)
        self._dtype = self.blocks[0].module.down_proj.dtype if self.blocks else torch.float32
        usable = [] if self.why_not else self.blocks
        self.sizes = {f"{block.name}.{name}": block.size(name) for block in usable for name in block.parameters}

        here = [block.module.down_proj for block in usable if not block.module.down_proj[0].is_meta]
        self.on_kernels = bool(here) and self.fit_kernels(here[0][0].device)
        """Whether passes with jobs at experts compute these by the kernels, not by torch's own operations."""
        self.routers: RoutersSeen | None = None  # once it was asked what they compute

    def fit_kernels(self, device: torch.device) -> bool:
        """Whether they would on `device`: one that runs kernels, for parameters in 16 or 32 bits whose widths these take."""
        parameters = [getattr(block.module, name) for block in self.blocks for name in block.parameters]
        return bool(self.sizes) and all(_fits(p) for p in parameters) and may_run_kernels(device)

    def tiles(self, card: CardClass) -> tuple[object, ...]:
        """Of the kernels, where they compute experts: part of the bits of jobs at these; else nothing."""
        if not self.on_kernels:
            return ()
        from tlora.kernels.expert_kernels import all_tiles

        return all_tiles((width for widths in self.widths.values() for width in widths), self._dtype, card)

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """In and out features of each parameter."""
        return {name: (size.in_features, size.out_features) for name, size in self.sizes.items()}

    def visits(self, adapted: bool) -> dict[str, int]:
        """By how many experts of each parameter a token is multiplied in passes with a job that adapts experts, or without: those that it
        goes to, or all of them where the family's own code takes all tokens to each, and computes the pass.
        """
        held = {f"{block.name}.{name}" for block in self.blocks if block.is_held for name in block.parameters}
        return {
            name: size.experts if size.exchanged and not adapted and name not in held else size.per_token
            for name, size in self.sizes.items()
        }

    def install(self, source: Source) -> None:
        """From now on jobs' adapters are asked of `source` in each pass. Where there are none, experts run as before."""
        ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
        for block in self.blocks:
            block.source = source
            block.module.tlora_block = block
        self.take_over(True)

    def expect(self, layout: AdapterLayout, context: Context, alone: bool) -> None:
        """An adapter of `layout` joins, of which batches that are active in `context` tell. `alone`: no other path computes the model."""
        if any(shape.experts > 1 for shape in layout.shapes):
            self.install(partial(jobs_in, context, self.sizes if self.on_kernels else {}))
            self.take_over(alone)

    def take_passes(self, context: Context) -> None:
        """Passes on the kernels, which `context` knows by number, compute what jobs adapt here."""
        from tlora.kernels import expert_operations  # noqa: F401  (defines the operations)

        ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
        numbers = list(self.sizes)
        for block in self.blocks:
            up, down = (f"{block.name}.{name}" for name in (block.up, "down_proj"))
            own = numbers.index(up), numbers.index(down)
            widths = self.sizes[up].product[1], self.sizes[down].product[1]
            block.module.tlora_passes = PassExperts(context, own, widths, block.module.down_proj.dtype)

    def requests(self, device: torch.device) -> tuple[ExpertRequest, ...]:
        """What passes with jobs at experts launch on `device`, to be compiled ahead."""
        found: dict[ExpertRequest, None] = {}
        for block in self.blocks if self.fit_kernels(device) else ():
            for name in (block.up, "down_proj"):
                size, dtype = block.size(name), dtype_name(self._dtype)
                layout = block.module.is_transposed, bool(block.module.has_bias)
                if size.per_token:
                    request = ExpertRequest(*size.product, size.experts, size.per_token, *layout, name == block.up, dtype)
                    found[request] = None
        return tuple(found)

    def look_ups(self) -> list[Callable[[], ExpertWeights]]:
        """The weights of each of `sizes`."""
        return [partial(block.weights, name) for block in self.blocks for name in block.parameters]

    def adapted_by(self, bank: AdapterBank, batch: PackedBatch) -> bool:
        """Whether a job of `batch` adapts any."""
        return any(bank.slot(span.job_id, name) for name in self.sizes for span in batch.spans)

    def take_over(self, ours: bool) -> None:
        """Whether transformers asks us from now on, or what it asked before."""
        always = any(block.is_held for block in self.blocks)  # layers share one config
        for block in self.blocks:
            block.module.config._experts_implementation = NAME if ours or always else block.before

    @contextmanager
    def adapted(self, layout: AdapterLayout, params_P: Tensor) -> Iterator[None]:
        """Within it all tokens have the adapter of `layout` at experts, in the base's dtype as PEFT folds it."""
        rows: dict[str, JobRows] = {}
        for shape, a_RK, b_RN in layout.views(params_P):
            if shape.module in self.sizes:
                a, b = (rows_.to(self._dtype) for rows_ in (a_RK, b_RN))
                rows[shape.module] = JobRows((), ((range(shape.rows), shape.scale),), LoraWeights(a, b, a[:0], b[:0]))
        self.install(rows.get)
        try:
            yield
        finally:
            for block in self.blocks:
                block.source = None


def _dense(weights: ExpertWeights) -> ExpertWeights:
    """With a plain tensor, as kernels read it."""
    return replace(weights, weight=weights.weight.dense()) if isinstance(weights.weight, HeldExperts) else weights


def _fits(parameter: nn.Parameter | HeldExperts) -> bool:
    sound = isinstance(parameter, HeldExperts) or parameter.is_contiguous()
    widths = parameter.shape[1] % 16 == parameter.shape[2] % 16 == 0
    return sound and widths and parameter.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _adaptable(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules of several experts that transformers computes by its `ExpertsInterface`, and those that are made to ask us as these do."""
    adopt(model, _is_ours, _experts_forward)
    for name, module in model.named_modules():
        found: Any = module
        if not all(hasattr(found, key) for key in ("has_gate", "has_bias", "is_transposed", "config")):
            continue
        parameters = [getattr(found, key, None) for key in ("gate_up_proj" if found.has_gate else "up_proj", "down_proj")]
        if all(isinstance(p, nn.Parameter | HeldExperts) and len(p.shape) == 3 and p.shape[0] > 1 for p in parameters):
            yield name, found


@torch.no_grad()
def _why_not(blocks: list[ExpertBlock]) -> str | None:
    """The proof, by the first module of each class; none of a model without numbers."""
    here = [block for block in blocks if not block.module.down_proj[0].is_meta]  # other stages' are not
    for block in {type(block.module): block for block in reversed(here)}.values():
        size, weight = block.size(block.up), getattr(block.module, block.up)[0]
        generator = torch.Generator().manual_seed(0)
        scaled = is_scaled(block.module)
        tokens, slots = 7, 1 if scaled else min(2, size.experts)
        x_TH = torch.randn(tokens, block.weights("down_proj").out_features, generator=generator).to(weight)
        experts_TK = torch.stack([torch.randperm(size.experts, generator=generator)[:slots] for _ in range(tokens)]).to(weight.device)
        weights_TK = torch.rand(tokens, slots, generator=generator).to(weight)
        eager: Any = all_tokens if scaled else type(block.module).forward.__wrapped__  # type: ignore[attr-defined]
        try:
            wanted, got = eager(block.module, x_TH, experts_TK, weights_TK), block.run(x_TH, experts_TK, weights_TK, {})
        except (TypeError, ValueError, AttributeError, RuntimeError, LookupError, AssertionError) as error:
            return f"{type(block.module).__name__} cannot run sorted by expert ({' '.join(str(error).split())[:200]})"
        difference = float((got.double() - wanted.double()).norm() / wanted.double().norm())
        if not difference <= _TOLERANCE.get(weight.dtype, _OF_16_BITS):
            return f"{type(block.module).__name__} computes something else than its parameters say (relative difference {difference:.1e})"
    return None
