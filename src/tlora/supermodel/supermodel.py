"""The super-model: one frozen base, a bank of adapters, and four verbs. Jobs join and leave between two micro-batches.

It owns weights, gradients and optimizer state. Data, order, evaluation, files and fairness between jobs are the engine's.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn

from tlora.adapters.adamw import StepStats, weights_fit
from tlora.adapters.bank import AdapterBank
from tlora.adapters.layout import AdapterLayout, make_layout
from tlora.adapters.state import AdapterState, init_state
from tlora.adapters.targets import left_out, saved_names
from tlora.batching.recompute_plan import RecomputePlan, same_for_all
from tlora.errors import ConfigError
from tlora.job import BasePrecision, LoraConfig, TrainConfig
from tlora.objectives import UnitLoss
from tlora.shape.length_limits import check_length
from tlora.shape.stages import LayerRange
from tlora.sharing.host_memory import Streaming
from tlora.sharing.layer_stream import FetchStats
from tlora.sharing.peers import Sharing
from tlora.supermodel.base_config import length_limits
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.experts import Experts
from tlora.supermodel.fast_path import FastPath, describe_kernels, why_not_fused
from tlora.supermodel.inject import expert_modules, find_linears, inject, resolve_targets, sizes
from tlora.supermodel.job_by_job import make_optimizer
from tlora.supermodel.kernel_tiles import digest_on_plain_path
from tlora.supermodel.kernels_ahead import compile_ahead
from tlora.supermodel.load import Base, load_base
from tlora.supermodel.lora_linear import Context, base_weights
from tlora.supermodel.losses import JobLoss, Pass, sum_losses
from tlora.supermodel.new_tokens import NewTokens, with_rows
from tlora.supermodel.optimizer_steps import MeasuredSteps, PartStep, StepError
from tlora.supermodel.part_passes import PartPasses, by_targets
from tlora.supermodel.plain_path import PlainPath, groups_on
from tlora.supermodel.shared_base import load_shared_base
from tlora.supermodel.stage import StagePass, without_padding
from tlora.supermodel.stage_base import load_stage
from tlora.supermodel.transposed_linears import are_transposed
from tlora.wording.dtypes import dtype_name


@dataclass
class _Resident:
    lora: LoraConfig
    train: TrainConfig
    total_steps: int
    state: AdapterState
    version: int  # another one after each step


class SuperModel(nn.Module):
    """A frozen base shared by any number of adapters.

    With `deterministic`, each sample is computed by itself and gradients are added in sample order: an adapter's bytes are then
    those of training it alone, with any other jobs in the batch.
    """

    def __init__(self, base: Base, deterministic: bool = False) -> None:
        super().__init__()
        self.base, self.deterministic = base, deterministic
        self.model = base.model
        linears = find_linears(base.model)
        weight = base.head.weight_VH
        self.context = Context()
        self.new_tokens, self.experts = NewTokens(base, self.context), Experts(base.model)
        places = {**sizes(linears), **self.experts.widths, self.new_tokens.name: (self.new_tokens.size[1], 0)}
        self.bank = AdapterBank(places, weight.dtype, weight.device)
        self.references = AdapterBank(places, weight.dtype, weight.device, frozen=True)
        """The adapters that jobs' objectives compare with; jobs that have none there compare with the base alone."""
        self.limits = length_limits(base.model, bool(base.why_one_by_one))
        self._linears = inject(base.model, linears, self.context)
        self.plain_path, self.fast_path = PlainPath(base, self.context, deterministic), None
        if (why := why_not_fused(base, self._linears, self.experts, weight.device, deterministic)) is None:
            self.fast_path = FastPath(base, self._linears, self.context, deterministic, self.experts)
        elif base.stage is not None and groups_on(weight.device, deterministic):  # all jobs would go by operators, sample by sample
            raise ConfigError(f"a base in stages needs the fused kernels on a GPU, and {why}. Take one GPU, or GPUs that hold it otherwise")
        self._residents: dict[str, _Resident] = {}
        self._versions = count()
        decode = (self.fast_path or self.plain_path).decode  # kernels compiled for the GPU, captured as graphs, or torch's own operations
        if self.fast_path is not None and not self.fast_path.runs_experts:
            decode = by_targets(decode, self.plain_path.decode, self.experts)
        self.passes = PartPasses(base, decode, base_weights(self._linears), self.bank, self.references, self._dropout_of, self.new_tokens)
        self.optimizer = make_optimizer(self.bank)

    @classmethod
    def from_pretrained(
        cls,
        base_model: str,
        dtype: str = "auto",
        device: str = "cpu",
        deterministic: bool = False,
        base_precision: BasePrecision | None = None,
        shared: Sharing | Streaming | LayerRange | None = None,
    ) -> SuperModel:
        """Load `base_model` (a directory or hub id). Raises ModelError, and ConfigError for a precision that `device` lacks.

        With `shared` this process is one of several on a host that load the base together: each holds a part of every decoder layer, and
        layers are fetched as they run. With `Streaming` the layers lie in this host's memory instead. Bits are those of a base of one's
        own. With a `LayerRange` it is a stage, which has these layers alone; behind the first `passes.upstream` is to be set. Raises
        RankError for what goes wrong between ranks, CapacityError for too little host memory.
        """
        if isinstance(shared, LayerRange):
            return cls(load_stage(base_model, dtype, torch.device(device), base_precision, shared), deterministic)
        if shared is not None:
            return cls(load_shared_base(base_model, dtype, torch.device(device), base_precision, shared), deterministic)
        return cls(load_base(base_model, dtype, device, base_precision), deterministic)

    @property
    def fetches(self) -> FetchStats | None:
        """What a shared base has fetched, and how long computing waited for it; None of a base of one's own. Waits for the device."""
        return None if self.base.layers is None else self.base.layers.stats()

    @property
    def device(self) -> torch.device:
        return self.bank.device

    @property
    def tiles(self) -> str | None:
        """Digest of the tile shapes of the GPU kernels for this base: part of every job's bits. None without kernels."""
        return self.fast_path.tiles if self.fast_path is not None else digest_on_plain_path(self.base, self.experts, self.device)

    def _dropout_of(self, job_id: str) -> float:
        """Of a job that adapts no layer of this stage, and so has not joined, none."""
        return self._residents[job_id].lora.lora_dropout if job_id in self._residents else 0.0

    @property
    def units_apart(self) -> bool:
        """Whether each unit of a batch (a sample, or a pair) is a pass by itself, which no neighbour's number of tokens reaches."""
        return self.fast_path is None and (self.deterministic or bool(self.base.why_one_by_one))

    @property
    def num_layers(self) -> int:
        """Decoder layers whose activations backward can compute again; 0 without a GPU's compiled layers."""
        return self.fast_path.num_layers if self.fast_path is not None else 0

    @property
    def recompute(self) -> RecomputePlan:
        """How many do so in a micro-batch of how many tokens, from the first on. Bits do not change with it, memory and speed do."""
        return self.fast_path.recompute if self.fast_path is not None else RecomputePlan()

    @recompute.setter
    def recompute(self, plan: RecomputePlan) -> None:
        if self.fast_path is not None:
            self.fast_path.recompute = plan

    @property
    def recomputed_layers(self) -> int:
        """The most that any micro-batch recomputes. Setting it makes all of them recompute so many."""
        return min(self.recompute.most_layers, self.num_layers)

    @recomputed_layers.setter
    def recomputed_layers(self, count: int) -> None:
        self.recompute = same_for_all(count)

    def compile_ahead(self, device: torch.device, loras: Sequence[LoraConfig]) -> subprocess.Popen[bytes] | None:
        """For a base on the meta device: start compiling what `loras` will launch on `device`. None where there is nothing to compile."""
        if device.type != "cuda" or why_not_fused(self.base, self._linears, self.experts, device, self.deterministic) is not None:
            return None
        return compile_ahead(self.base, self._linears, self.experts, device, loras, self.deterministic)

    def kernels_on(self, device: torch.device, deterministic: bool) -> str:
        """What passes on `device` run, or would: `fused, sm_89, 99 KB`, or `plain: ` and why."""
        return describe_kernels(self.base, self._linears, self.experts, device, deterministic)

    def expect(self, loras: Sequence[LoraConfig]) -> None:
        """Be ready for adapters as large as the largest of `loras`, so that no kernel is compiled when it joins."""
        if self.fast_path is not None:
            self.fast_path.largest_rank = max([self.fast_path.largest_rank, *(lora.largest_rank for lora in loras)])

    def layout(self, lora: LoraConfig) -> AdapterLayout:
        """Where the parameters of an adapter of this shape lie. Raises ModelError for targets that do not exist."""
        targets, modules = resolve_targets(self.model, self._linears, self.experts, lora), dict(self.model.named_modules())
        names = saved_names(targets.keys() - self.experts.sizes, modules, lora)
        return with_rows(make_layout(lora, targets, names, are_transposed(self.model, targets)), self.new_tokens.shape(lora))

    def left_out(self, lora: LoraConfig) -> list[str]:
        """In a line, what `all-linear` leaves as it is."""
        return left_out(sizes(self._linears), expert_modules(self.model), lora)

    def targets(self) -> dict[str, tuple[int, int]]:
        """Every linear that can be adapted: dotted name -> (in features, out features)."""
        return sizes(self._linears)

    def release_memory(self) -> None:
        """Give the device back all memory that is free; between passes. Passes to come take it anew."""
        gc.collect()  # what a pass that failed has left in cycles holds most of it
        if self.fast_path is not None:
            self.fast_path.release_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- the four verbs ------------------------------------------------------------------------------------------------

    def join(
        self, job_id: str, lora: LoraConfig, train: TrainConfig, total_steps: int | None = None, state: AdapterState | None = None
    ) -> None:
        """Give `job_id` a slot: a fresh adapter seeded with `train.seed`, or `state` from `leave` or a checkpoint.

        `total_steps` is the length of the learning-rate schedule in optimizer steps (default `train.max_steps`).
        Raises ConfigError, with nothing changed; among others for weights that are not finite: the bank never holds one.
        """
        if job_id in self._residents:
            raise ConfigError(f"job {job_id!r} has joined already. Let it leave first, or choose another name")
        total = total_steps or train.max_steps
        if total is None and train.lr_scheduler_type not in ("constant", "constant_with_warmup"):
            raise ConfigError(f"job {job_id!r}: the {train.lr_scheduler_type} schedule needs its length. Give total_steps or set max_steps")
        layout = self.layout(lora) if state is None else state.layout
        begun = state is not None
        state = state or init_state(layout, train.seed, self.bank.sum_dtype, self.device)
        state = state.to(self.device)
        if state.step == 0:
            self.new_tokens.fill(state)
        if begun:
            self._check_finite(job_id, "adapter", state.params)
        self.bank.add(job_id, layout)
        self.experts.expect(layout, self.context, alone=self.fast_path is None)
        try:
            self.bank.write(job_id, state.params)
            self.optimizer.add(job_id, state)
        except BaseException:
            self._give_slot_back(job_id)
            raise
        self._residents[job_id] = _Resident(lora, train, total or 0, state, next(self._versions))

    def set_reference(self, job_id: str, params_P: Tensor) -> None:
        """Let the objectives of `job_id` compare with a frozen adapter of its own shape instead of the base alone, until it leaves.
        `params_P` is flat, in the order of `state(job_id).params`, and copied.

        Raises ConfigError, with nothing changed, for another size and for weights that are not finite.
        """
        layout = self._residents[job_id].state.layout
        if params_P.shape != (layout.numel,):
            raise ConfigError(
                f"the reference of {job_id!r} has shape {tuple(params_P.shape)}; it must be flat, of {layout.numel} elements. "
                f"Give the params of an adapter of the shape of state({job_id!r})"
            )
        self._check_finite(job_id, "reference", params_P)
        if job_id not in self.references:
            self.references.add(job_id, layout)
        self.references.write(job_id, params_P)

    def _check_finite(self, job_id: str, what: str, params_P: Tensor) -> None:
        if not weights_fit(params_P, self.bank.dtype):
            dtype = dtype_name(self.bank.dtype)
            raise ConfigError(
                f"job {job_id!r}: its {what} holds NaN or Inf (in {dtype}), and weights must be finite. Start from a healthy checkpoint"
            )

    def leave(self, job_id: str) -> AdapterState:
        """Take `job_id` out and return its adapter and optimizer state; gradients not yet applied are dropped."""
        state = self._residents.pop(job_id).state
        self._give_slot_back(job_id)
        return state

    def forward_backward(self, batch: PackedBatch, objectives: Mapping[str, UnitLoss] | None = None) -> dict[str, JobLoss]:
        """Loss per job, and gradients added to each job's sums until its next `optim_step`.

        Jobs that `objectives` names minimise that; the others cross-entropy, the mean over the tokens of their global batch.
        """
        return sum_losses(self._forward_and_back(part, objectives or {}) for part in self._parts(batch, objectives or {}))

    def begin(self, batch: PackedBatch, objectives: Mapping[str, UnitLoss] | None = None) -> Pass:
        """The same in two halves: a pass whose `forward` gives the losses, and whose `backward` adds the gradients.

        Several passes may be open at a time, each with its activations. The first of them is the one that CUDA graphs can serve. Before
        an adapter of an open pass steps, leaves or moves (a join may move all), the pass must have gone back.
        """
        parts = [partial(self.passes.forward, part, objectives or {}, train=True) for part in self._parts(batch, objectives or {})]
        return Pass(parts, partial(self._adapter_versions, batch))

    def optim_step(self, job_ids: Iterable[str]) -> dict[str, StepStats]:
        """Clip, schedule and apply AdamW for each of `job_ids` on its own summed gradient, then forget the gradient.

        Waits for the device once for all of them. Raises StepError when a job's step raised; the others have stepped.
        """
        steps = self.measure_gradients(job_ids).update()
        stats = steps.read()
        if steps.errors:
            raise StepError(stats, steps.errors) from next(iter(steps.errors.values()))
        return stats

    # -- a step in parts, for a job that several super-models train ----------------------------------------------------

    def gradient(self, job_id: str) -> Tensor:
        """A copy of the gradient that `job_id` has summed since its last step: flat [P], in the order of `state(job_id).params`, in fp32
        (fp64 for an fp64 base), on `device`. Not clipped. Does not wait for the device.
        """
        return self.optimizer.gradient(job_id)

    def set_gradient(self, job_id: str, gradient_P: Tensor) -> None:
        """Replace the gradient that `job_id` has summed, for example by the sum of what `gradient` gave on several devices.

        Raises ConfigError, with nothing changed, for another size, dtype or device than that of `gradient`.
        """
        size, dtype = self._residents[job_id].state.layout.numel, self.bank.sum_dtype
        if (gradient_P.shape, gradient_P.dtype, gradient_P.device) != ((size,), dtype, self.device):
            raise ConfigError(
                f"a gradient of {job_id!r} has shape {tuple(gradient_P.shape)}, {gradient_P.dtype}, on {gradient_P.device}; "
                f"it must be flat, of {size} elements, {dtype}, on {self.device}. Give a tensor like that of gradient({job_id!r})"
            )
        self.optimizer.set_gradient(job_id, gradient_P.contiguous())

    def rewrite(self, job_id: str) -> None:
        """Compute with the weights that `state(job_id)` holds, after the caller has written them, for example from another super-model."""
        resident = self._residents[job_id]
        self.optimizer.write(job_id, resident.state.params)
        resident.version = next(self._versions)

    def measure_gradients(self, job_ids: Iterable[str]) -> MeasuredSteps:
        """The first half of `optim_step`: each job's gradient norm, whether it is finite, and how to clip it; nothing is changed.

        `update()` of the answer is the second half, without a wait, for a caller with other work for the device until it reads how it went.
        Between the halves these jobs do not train, leave or change their gradient; then they may train on at once, and before one steps
        again, leaves or is saved, the answer must have been read.
        """
        residents = {job_id: self._residents[job_id] for job_id in job_ids}
        for resident in residents.values():
            resident.version = next(self._versions)
        return self.optimizer.measure(residents)

    def begin_step(self, job_id: str) -> PartStep:
        """Of a job of which other processes have other modules: measure the gradient here, to be judged with theirs."""
        resident = self._residents[job_id]
        resident.version = next(self._versions)
        return self.optimizer.begin_part(job_id, resident)

    # -- evaluation and the rest ---------------------------------------------------------------------------------------

    def evaluate(self, batch: PackedBatch, objectives: Mapping[str, UnitLoss] | None = None) -> dict[str, JobLoss]:
        """Loss per job without gradients and without dropout."""
        return sum_losses(self.passes.forward(part, objectives or {}, train=False)[0] for part in self._parts(batch, objectives or {}))

    def state(self, job_id: str) -> AdapterState:
        """The live state of a resident job; `clone` it to keep it."""
        return self._residents[job_id].state

    def has(self, job_id: str) -> bool:
        """Whether the job has joined."""
        return job_id in self._residents

    def zero_grad_of(self, job_id: str) -> None:
        """Forget the gradients that `job_id` has summed since its last step."""
        self.bank.zero_grad(job_id)

    def _give_slot_back(self, job_id: str) -> None:
        self.bank.remove(job_id)
        if job_id in self.references:
            self.references.remove(job_id)
        self.optimizer.remove(job_id)

    def _forward_and_back(self, part: PackedBatch, objectives: Mapping[str, UnitLoss]) -> dict[str, JobLoss]:
        losses, backward = self.passes.forward(part, objectives, train=True)
        if backward is not None:
            backward()
        return losses

    def _adapter_versions(self, batch: PackedBatch) -> Hashable:
        residents = [self._residents.get(span.job_id) for span in batch.spans]
        return self.bank.version, tuple(resident and resident.version for resident in residents)

    def stage_passes(self, batch: PackedBatch, compared: Collection[str], train: bool) -> Iterator[StagePass]:
        """What a stage before the last computes of `batch`, one call after another: the passes of the last stage's `forward_backward` or
        `evaluate`, in its order. `compared`: jobs whose objectives compare with a reference. Jobs that adapt no layer of this stage
        need not have joined.
        """
        for part in self._split(batch):
            if jobs := {span.job_id for span in part.spans} & set(compared):
                yield StagePass(partial(self.passes.of_references, part, jobs), False)
            run = partial(without_padding, partial(self.passes.of_stage, part, train), len(part.input_ids_T))
            yield StagePass(run, train)

    def _parts(self, batch: PackedBatch, objectives: Mapping[str, UnitLoss]) -> Iterable[PackedBatch]:
        """What is computed at once: `batch`, or each of its units by itself. The kernels are deterministic as they are."""
        self._check(batch, objectives)
        return self._split(batch)

    def _split(self, batch: PackedBatch) -> Iterable[PackedBatch]:
        return batch.units() if self.units_apart else (batch,) if batch.spans else ()

    def _check(self, batch: PackedBatch, objectives: Mapping[str, UnitLoss]) -> None:
        longest = max((length for span in batch.spans for length in span.lengths), default=0)
        check_length(self.limits, longest)
        for span in batch.spans:
            if span.job_id not in self._residents:
                raise ConfigError(f"the batch holds samples of {span.job_id!r}, which has not joined. Call join first")
            wanted = objectives[span.job_id].sequences if span.job_id in objectives else 1
            if span.sequences != wanted:
                raise ConfigError(f"a unit of {span.job_id!r} has {span.sequences} sequences, and its objective takes {wanted}")
