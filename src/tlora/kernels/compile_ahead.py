"""Compiles the kernels of a run into Triton's cache before the first step, in a process of its own that needs no GPU.

Triton compiles a kernel when it is first launched, 1 to 3 s each, one after another. A run knows what it will launch as soon as it
knows its base and its jobs. This process makes the same launches on tensors without memory (torch's meta device), on all cores, while the
run loads its base; it stops each where a GPU would be needed. What is missing in the cache after that is compiled when it is met.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import operator
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from tlora.kernels import bank_chunks, delta_kernels, fused_linear, triton_conv, varlen_attention
from tlora.kernels.bank_chunks import CHUNK
from tlora.kernels.cards import CardClass
from tlora.kernels.chunk_layout import list_chunks
from tlora.kernels.compile_request import (
    AttentionRequest,
    CompileRequest,
    ConvolutionRequest,
    DeltaRequest,
    GroupRequest,
    HeadRequest,
    PackedRequest,
    read_order,
)
from tlora.kernels.delta_rule import CHUNK as DELTA_CHUNK
from tlora.kernels.device import class_of, compile_as, is_forced
from tlora.kernels.expert_launches import META, TOKENS, expert_launches, rows_launches
from tlora.kernels.fp8 import DTYPE, launch_quantize
from tlora.kernels.frozen import FrozenLinear, PlainWeight
from tlora.kernels.fused_adamw import NUM_OUTCOMES, NUM_SCALARS, FlatState, StepBuffers, launch_measure, launch_update
from tlora.kernels.fused_linear import LinearGroup
from tlora.kernels.head import Head
from tlora.kernels.lora_tables import ADDRESS_FIELDS, DA, DB, RANK, RUNS_STEP, A, B, LoraTables, Run, Slots, build_tables
from tlora.kernels.packed import dequantize
from tlora.kernels.packed_weight import PackedWeight
from tlora.kernels.tile_files import table_of_gpu
from tlora.kernels.tiles import MOST_SIZES, WIDEST_BLOCK, Tile, TileTable, keys_of, sizes_of
from tlora.kernels.triton_cross_entropy import fused_linear_cross_entropy
from tlora.kernels.varlen_attention import Rule, Saved, list_tiles, tiles_of
from tlora.processes import num_cores

Name = Literal["shrink x", "forward", "shrink dy", "input gradient", "sum dy", "sum x"]
_ATTENTION = ("forward", "dq", "dkv")


@dataclass(frozen=True)
class _Kernel:
    """One kernel of one group over one kind of micro-batch; with the tiles of `table`."""

    name: Name
    group: GroupRequest
    many: bool
    dropout: bool
    table: TileTable


def start(order: CompileRequest) -> subprocess.Popen[bytes] | None:
    """Compile in a background process, which ends by itself; exit status 0 means that every kernel is in the cache. None where an earlier
    process has left word there that it had compiled this order: each of its workers would take a core for a second, to find nothing to do.
    """
    if _word_of(order).exists():
        return None
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", __spec__.name], stdin=subprocess.PIPE, **quiet)  # type: ignore[call-overload]
    assert process.stdin is not None
    with process.stdin as pipe:
        pipe.write(json.dumps(asdict(order)).encode())
    return process


def compile_all(order: CompileRequest, workers: int) -> None:
    """Compile everything in `order` with as many processes. Raises what the compiler raises."""
    _without_a_gpu(order.capability)
    if is_forced() and (card := class_of(order.capability)) is not None:
        compile_as(card, order.capability)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        list(pool.imap_unordered(operator.call, launches_of(order), chunksize=1))


def launches_of(order: CompileRequest) -> list[Callable[[], object]]:
    """A launch of every kernel in `order`, with the tiles that GPUs of its class get, those that take longest to compile first."""
    dtype, table = getattr(torch, order.dtype), table_of_gpu(order.gpu, order.capability)
    launches: list[Callable[[], object]] = [partial(_compile, order, kernel) for kernel in _kernels(order, table)]
    launches += [partial(_compile_attention, dtype, attention, table.card, name) for attention in order.attentions for name in _ATTENTION]
    launches += [partial(launch, dtype) for launch in (_measure_step, _update_step, _copy_chunks)]
    launches += [partial(_compile_loss, dtype, order.head, gradient) for gradient in (True, False) if order.head]
    launches += [partial(_compile_dequantize, dtype, packed) for packed in order.packed]
    launches += [launch for experts in order.experts for launch in expert_launches(experts, dtype, table.card)]
    launches += [launch for router in order.routers for launch in rows_launches(router)]
    launches += [launch for rule in order.delta_rules for launch in _delta_launches(rule, dtype)]
    launches += [launch for convolution in order.convolutions for launch in _convolution_launches(convolution, dtype)]
    return launches


def _kernels(order: CompileRequest, table: TileTable) -> list[_Kernel]:
    """Those with the tiles of many tokens first, then GEMMs with smaller ones, each once."""
    dtype = getattr(torch, order.dtype)
    groups = _unlike(order.groups, table, dtype)
    kernels: list[_Kernel] = []
    for number, name in product(range(MOST_SIZES if table.sized else 1), get_args(Name)):
        for group in groups:
            sized = _with_sizes(table, group, dtype, number) if name in ("forward", "input gradient") else (table if number == 0 else None)
            if sized is not None:
                kernels += [_Kernel(name, group, many, drops, sized) for many in (False, True) for drops in sorted({False, order.dropout})]
    return kernels


def _with_sizes(table: TileTable, group: GroupRequest, dtype: torch.dtype, number: int) -> TileTable | None:
    """`table` with the `number`th size of each tile of the group's GEMMs; None where none has so many."""
    weight_dtype = DTYPE if group.fp8 else dtype
    sizes = {key: sizes_of(tile, weight_dtype) for key in keys_of(group.in_features, group.widths, dtype, weight_dtype)
             if isinstance(tile := table.find(key), Tile)}  # fmt: skip
    if number >= max(map(len, sizes.values())):
        return None
    return replace(
        table, sized=False, entries={**table.entries, **{key: of_key[min(number, len(of_key) - 1)] for key, of_key in sizes.items()}}
    )


def _unlike(groups: Sequence[GroupRequest], table: TileTable, dtype: torch.dtype) -> list[GroupRequest]:
    """One group of each set that launches the same kernels: sizes are arguments, tile shapes are compiled in."""
    group_by_kind: dict[object, GroupRequest] = {}
    for group in groups:
        keys = keys_of(group.in_features, group.widths, dtype, DTYPE if group.fp8 else dtype)
        tiles = frozenset((key.kernel, key.together, table.find(key)) for key in keys)
        # By pointer a block that a sum ends within takes masks, which are compiled in too.
        ends = tuple(size % WIDEST_BLOCK for size in (group.in_features, *group.widths)) if table.card.loads == "pointers" else ()
        group_by_kind.setdefault((len(group.widths), group.bias, group.fp8, tiles, ends), group)
    return list(group_by_kind.values())


def _without_a_gpu(capability: int) -> None:
    """Make Triton's launches stop where the compiled kernel would be loaded onto a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    class NoDevice:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _device: int) -> int:
            return 0

    def launch(function: Any, grid: object, *arguments: object, **options: object) -> None:
        _compile_launcher(function.run(*arguments, grid=grid, warmup=True, **options))

    driver.set_active(NoDevice())  # type: ignore[arg-type]
    JITFunction.__getitem__ = lambda self, grid: partial(launch, self, grid)  # type: ignore[method-assign]


def _compile_launcher(kernel: Any) -> None:
    """The C code that hands a kernel's arguments to the driver, which Triton compiles when a kernel is first launched, 0.3 s each. Where
    that is not possible, for want of a C compiler or of the driver's library, the run says so or compiles it itself.
    """
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

    with suppress(Exception):
        CudaUtils()
        CudaLauncher(kernel.src, kernel.metadata)


def _compile(order: CompileRequest, kernel: _Kernel) -> None:
    """Launch it; Triton skips what its cache already holds."""
    group, dtype = kernel.group, getattr(torch, order.dtype)
    empty = partial(torch.empty, dtype=dtype, device=META)
    scale_N = torch.empty(sum(group.widths), dtype=torch.float32, device=META) if group.fp8 else None
    linears = LinearGroup(0, group.widths, group.in_features, order.programs, scale_N, kernel.table)
    tables = _tables(order, kernel)
    weights = [torch.empty(width, group.in_features, dtype=DTYPE if group.fp8 else dtype, device=META) for width in group.widths]
    biases = [empty(width) for width in group.widths] if group.bias else []
    x, dys = empty(TOKENS, group.in_features), [empty(TOKENS, width) for width in group.widths]
    s = empty(TOKENS, len(group.widths) * order.width)
    match kernel.name:
        case "shrink x":
            fused_linear.shrink([x], linears, tables, A)
        case "forward":
            if group.fp8:
                _compile_quantize([x], None)
            fused_linear.multiply(x, weights, biases, s, linears, tables)
        case "shrink dy":
            fused_linear.shrink(dys, linears, tables, B)
        case "input gradient":
            if group.fp8:
                _compile_quantize(dys, scale_N)
            fused_linear.multiply_back(dys, weights, s, linears, tables)
        case "sum dy":
            fused_linear.add_sums(dys, s, linears, tables, DB)
        case "sum x":
            fused_linear.add_sums([x], s, linears, tables, DA)


def _compile_quantize(xs: Sequence[Tensor], column_scale_K: Tensor | None) -> None:
    """The products do it in torch where tensors have no memory."""
    tokens, width = len(xs[0]), sum(x.shape[1] for x in xs)
    launch_quantize(xs, column_scale_K, torch.empty(tokens, width, dtype=DTYPE, device=META), torch.empty(tokens, device=META))


def _compile_attention(dtype: torch.dtype, order: AttentionRequest, card: CardClass, name: str) -> None:
    """One of the three kernels, in the same way."""
    empty = partial(torch.empty, dtype=dtype, device=META)
    shape, kv_shape = (TOKENS, order.heads, order.head_size), (TOKENS, order.kv_heads, order.head_size)
    q, k, v, lse = empty(shape), empty(kv_shape), empty(kv_shape), torch.empty(order.heads, TOKENS, device=META)
    plan, rule, tiles = list_tiles((TOKENS,), META), Rule(1.0, order.window, float(order.softcap)), tiles_of(order.head_size, dtype, card)
    saved = Saved(empty(shape), q, k, v, empty(shape), lse)
    match name:
        case "forward":
            sinks = None if order.sinks is None else torch.empty(order.heads, dtype=getattr(torch, order.sinks), device=META)
            varlen_attention.launch_forward(q, k, v, plan, rule, tiles.forward, sinks)
        case "dq":
            varlen_attention.launch_dq(saved, plan, rule, tiles.dq)
        case "dkv":
            varlen_attention.launch_dkv(saved, lse, plan, rule, tiles.dkv)


def _delta_launches(request: DeltaRequest, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Forward and backward."""
    empty = partial(torch.empty, dtype=dtype, device=META)
    keys = (TOKENS, request.key_heads, request.key_size)
    q, k, v = empty(keys), empty(keys), empty(TOKENS, request.value_heads, request.value_size)
    g, beta = torch.empty(v.shape[:2], dtype=getattr(torch, request.decay_dtype), device=META), empty(v.shape[:2])
    tensors, rest = (q, k, v, g, beta), (list_chunks((TOKENS,), DELTA_CHUNK, META), request.normalize)
    inverse = torch.empty(*v.shape[:2], DELTA_CHUNK, device=META)
    return [partial(delta_kernels.backward, empty(v.shape), *tensors, inverse, *rest), partial(delta_kernels.forward, *tensors, *rest)]


def _convolution_launches(request: ConvolutionRequest, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Forward and backward."""
    empty = partial(torch.empty, dtype=dtype, device=META)
    x, bias = empty(TOKENS, request.channels), empty(request.channels) if request.bias else None
    rest = x, empty(request.channels, request.taps), bias, torch.empty(TOKENS, dtype=torch.int32, device=META), request.silu
    return [partial(triton_conv.convolve, *rest), partial(triton_conv.convolve_back, empty(x.shape), *rest)]


def _compile_loss(dtype: torch.dtype, order: HeadRequest, gradient: bool) -> None:
    """The cross-entropy's kernel, for training or for an evaluation."""
    weight, labels = torch.empty(order.vocabulary, 16, dtype=dtype, device=META), torch.empty(TOKENS, dtype=torch.int64, device=META)
    head = Head(lambda: FrozenLinear(PlainWeight(weight)), softcap=1.0 if order.softcap else None)
    weights = torch.empty(TOKENS, device=META) if gradient else None
    fused_linear_cross_entropy(torch.empty(TOKENS, 16, dtype=dtype, device=META), head, labels, weights)


def _compile_dequantize(dtype: torch.dtype, order: PackedRequest) -> None:
    shape, value_dtype = (TOKENS, order.group), getattr(torch, order.value_dtype)
    weight, zero = (torch.empty(n, dtype=torch.uint8, device=META) for n in (TOKENS * order.group // 2, TOKENS))
    scale, table = (torch.empty(n, device=META) for n in (TOKENS, 16))
    dequantize(PackedWeight(weight, scale, (), shape, order.group, value_dtype, dtype, zero if order.zero else None), table, dtype)


def _step_of_one_chunk() -> tuple[FlatState, StepBuffers, Tensor, Tensor]:
    """State, buffers, scalars and outcome of an adapter's step, as `launch_measure` and `launch_update` take them."""
    state = FlatState(*(torch.empty(CHUNK, device=META) for _ in range(3)))
    rows = [torch.empty(count, dtype=torch.float64, device=META) for count in (NUM_SCALARS, NUM_OUTCOMES)]
    return state, StepBuffers.empty(1, torch.float32, META), rows[0], rows[1]


def _measure_step(_dtype: torch.dtype) -> None:
    state, buffers, scalars_S, outcome_4 = _step_of_one_chunk()
    launch_measure(state, buffers, True, scalars_S, outcome_4)


def _update_step(dtype: torch.dtype) -> None:
    state, buffers, scalars_S, outcome_4 = _step_of_one_chunk()
    launch_update(state, buffers, True, torch.empty(0, dtype=dtype, device=META), scalars_S, outcome_4)


def _copy_chunks(dtype: torch.dtype) -> None:
    """What a job that spans GPUs launches in addition to its steps."""
    state, buffers, _, _ = _step_of_one_chunk()
    bank_chunks.gather(buffers.chunks_C4, True, state.params)
    bank_chunks.scatter(buffers.chunks_C4, True, state.params)
    bank_chunks.write(buffers.chunks_C4, True, state.params, torch.empty(0, dtype=dtype, device=META))


def _tables(order: CompileRequest, kernel: _Kernel) -> LoraTables:
    """Of a micro-batch with one run or, for `many`, two in a tile, of which one has no dropout."""
    group, num = kernel.group, len(kernel.group.widths)
    lengths = (TOKENS // 2,) * 2 if kernel.many else (TOKENS,)
    ends = np.cumsum(lengths).tolist()
    runs = [Run(end - n, end, (n,), 0.5 if kernel.dropout and n == end else 0.0) for n, end in zip(lengths, ends, strict=True)]
    runs += [Run(TOKENS, TOKENS, ())] * (RUNS_STEP - len(runs))
    rows = np.zeros((num, RUNS_STEP, ADDRESS_FIELDS), np.int64)
    rows[:, :, RANK] = order.width
    empty = partial(torch.empty, dtype=getattr(torch, order.dtype), device=META)
    banks = [(empty(order.width, group.in_features), empty(order.width, width)) for width in group.widths]
    nothing = np.zeros((num, RUNS_STEP))
    slots = Slots(rows, nothing.astype(np.int32), nothing.astype(np.float32), np.zeros(num, np.int32), banks)
    return build_tables(runs, slots, TOKENS, torch.empty(TOKENS, dtype=torch.int32, device=META), META)


def _word_of(order: CompileRequest) -> Path:
    """The file in Triton's cache that says that everything in `order` has been compiled: by these sources, libraries and tiles."""
    import triton
    from triton import knobs

    content = hashlib.sha256(json.dumps([asdict(order), torch.__version__, triton.__version__]).encode())
    table = table_of_gpu(order.gpu, order.capability)
    content.update(repr((table.card, sorted(table.entries.items(), key=repr))).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        content.update(source.read_bytes())
    return Path(knobs.cache.dir) / f"ahead-{content.hexdigest()[:32]}.done"


@contextmanager
def _one_at_a_time(text: str) -> Iterator[None]:
    """Ranks of a run have the same order: the first compiles, the others then find all in the cache. Without locks, all compile."""
    from triton import knobs

    file = Path(knobs.cache.dir) / f"ahead-{hashlib.sha256(text.encode()).hexdigest()[:16]}.lock"
    with ExitStack() as held:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(held.enter_context(file.open("w")), fcntl.LOCK_EX)
        yield


def main() -> int:
    order = read_order(text := sys.stdin.read())
    with _one_at_a_time(text):
        if not (word := _word_of(order)).exists():  # another rank's process may have been first
            compile_all(order, min(16, num_cores()))
            with suppress(OSError):
                word.touch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
