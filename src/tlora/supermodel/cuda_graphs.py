"""Training passes through the decoder as CUDA graphs: a micro-batch of a shape that came before is launched at once, without Python.

A shape is all that the host decides by: tokens, runs, samples, the width of S, whether any job uses dropout, which attention. What the
device reads, which tokens, whose they are and where the rows of their adapters lie, is copied over what the graph was captured with.
The first micro-batch of a shape runs as it is and compiles what is missing; the second is captured, which takes about twice as long.

Real lengths bring ever other numbers of tokens, and small micro-batches, which a GPU computes faster than Python launches them, would
wait for most of theirs to come again. `size_for` says to how many tokens such a micro-batch is padded instead: those of a graph
that there is or, where there is none, of a rough size, which soon has one. What a finer size, or the micro-batch's own, would have saved
of padding is counted. When that is as much as it takes to capture that size, micro-batches run at it until it is captured.

One way to execute passes that do not overlap. A second pass before the first one's backward has to run without graphs, or with graphs and
memory of its own, as each of the passes that a stage has open (`fast_path.py`).
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from tlora.kernels.device import own_stream
from tlora.libraries import no_collection
from tlora.shape.token_cost import GRAPH_PRICE
from tlora.supermodel.batch import PackedBatch

if TYPE_CHECKING:
    from tlora.kernels.pass_operations import PassState  # brings triton, which not every CPU install has

_MOST_CAPTURED, _MOST_COUNTED = 64, 4096  # shapes at a time
_UNCAPTURED = 1  # micro-batches of a shape that run as they are
_SMALLEST, _FINEST = 128, 16  # tokens: of the rough sizes, and between two fine ones

Backward = Callable[[Tensor], object]
"""Takes the gradient of the hidden states [T, H] back through the decoder, once."""
Decode = Callable[[PackedBatch, "PassState"], tuple[Tensor, Backward]]
"""Hidden states [T, H] of a batch, and the way back."""


class Source(Protocol):
    """`stage.StageInput`: `x_TH` is what it has now."""

    x_TH: Tensor | None

    def holding(self, x_TH: Tensor | None) -> AbstractContextManager[None]: ...


class Shape(NamedTuple):
    """Of a micro-batch: passes of one shape launch the same kernels. `launches` is `PassState.shape`."""

    tokens: int
    recomputed_layers: int
    launches: Hashable


@dataclass(frozen=True)
class _Ends:
    """Where the graphs of T tokens leave their hidden states and find the gradient of these, [T, H]."""

    hidden_TH: Tensor
    dhidden_TH: Tensor


@dataclass(frozen=True)
class _Captured:
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    ends: _Ends
    x_TH: Tensor | None  # of a stage, what its first layer reads; the graphs leave its gradient there

    def run(self, inputs: list[Tensor], x_TH: Tensor | None) -> tuple[Tensor, Backward]:
        """`x` [T, H]: what the stage before has sent, which gets its gradient; the graphs' own tokens may be more."""
        torch._foreach_copy_(self.inputs, inputs)
        if self.x_TH is not None and x_TH is not None:
            own_TH, tokens = self.x_TH.detach(), len(x_TH)
            own_TH[:tokens].copy_(x_TH.detach())
            own_TH[tokens:].zero_()
        self.forward.replay()
        return self.ends.hidden_TH, partial(self._run_backward, x_TH)

    def _run_backward(self, x_TH: Tensor | None, dhidden_TH: Tensor) -> None:
        self.ends.dhidden_TH.copy_(dhidden_TH)
        self.backward.replay()
        if self.x_TH is not None and x_TH is not None:
            assert self.x_TH.grad is not None, "the captured pass gave no gradient of what the stage before sends"
            x_TH.grad = self.x_TH.grad[: len(x_TH)].clone()


class _Turn:
    """Held by a pass from its forward to the end of its backward."""


@dataclass(frozen=True)
class _Pool:
    """Of memory. A `torch.cuda.MemPool` would abort the process if it were collected before a graph that holds memory of it; this is
    a name for what graphs keep, the first of them made for nothing else.
    """

    id: tuple[int, int]


class CudaGraphs:
    """Executes passes of one decoder, one after another.

    All of them, captured or not, run on one stream with memory of one pool: since they never overlap, their activations take no more
    room together than those of the largest.
    """

    def __init__(self, decode: Decode, like: Tensor, source: Source | None = None, others: Sequence[CudaGraphs] = ()) -> None:
        """`like` has the last dim, dtype and device of the hidden states. `source`: of a stage, where its first layer reads x. `others`:
        those of passes that are open beside these; what they have run is compiled.
        """
        self._decode, self._like, self._source, self._others = decode, like, source, others
        self._stream = own_stream(like.device, "passes", len(others))
        self._pool, self._keeper = self._open_pool()
        self._captured: OrderedDict[Shape, _Captured | None] = OrderedDict()  # None: it could not be
        self._counts: OrderedDict[Shape, int] = OrderedDict()  # how many passes of others went there and back
        self._padding: OrderedDict[Shape, int] = OrderedDict()  # tokens that graphs of larger ones computed too much for them
        self._ends = _Ends(like[:0], like[:0])
        self._bank_version = -1
        self.num_launched = 0
        """Passes that were launched or captured, and not replayed."""
        self._turn: weakref.ref[_Turn] | None = None

    def _sent(self) -> Tensor | None:
        """What the stage before has sent, [T, H], for the pass that begins."""
        return None if self._source is None else self._source.x_TH

    def _open_pool(self) -> tuple[_Pool, torch.cuda.CUDAGraph]:
        pool, keeper = _Pool(torch.cuda.graph_pool_handle()), torch.cuda.CUDAGraph()
        with self._into(keeper, pool):
            torch.zeros(1, device=self._like.device)  # a graph of nothing would be warned of
        return pool, keeper

    def release(self) -> None:
        """Give back the pool's memory, which the allocator cannot take from graphs; all shapes are captured anew. Between passes."""
        if self.busy:
            return
        self._keep_only(-1)
        self._ends = _Ends(self._like[:0], self._like[:0])
        del self._keeper
        torch.cuda.empty_cache()  # not in a capture, where it may not wait
        self._pool, self._keeper = self._open_pool()

    @property
    def busy(self) -> bool:
        """Whether a pass is between its forward and its backward: its activations lie where another one's would."""
        return self._turn is not None and self._turn() is not None

    @property
    def num_captured(self) -> int:
        """Shapes that have a graph."""
        return sum(graph is not None for graph in self._captured.values())

    def run(self, batch: PackedBatch, state: PassState, bank_version: int, recomputed_layers: int) -> tuple[Tensor, Backward]:
        """Hidden states of `batch`, which hold until the next pass, and the way back. Graphs hold addresses of the bank's rows: those of
        an earlier `bank_version` are dropped.
        """
        self._keep_only(bank_version)
        shape = Shape(len(batch.input_ids_T), recomputed_layers, state.shape)
        if shape in self._captured:
            self._captured.move_to_end(shape)
        elif self._has_run(shape) or any(each._has_run(shape) for each in self._others):
            self._counts.pop(shape, None)
            self._padding.pop(shape, None)
            self._captured[shape] = self._try_to_capture(batch, state)
            self.num_launched += 1
            if len(self._captured) > _MOST_CAPTURED:
                self._captured.popitem(last=False)
        captured = self._captured.get(shape)
        if captured is not None:
            return self._in_turn(*captured.run(_inputs(batch, state), self._sent()))
        hidden_TH, backward = self.run_uncaptured(batch, state)
        self.num_launched += 1

        def counted(dhidden_TH: Tensor) -> None:
            backward(dhidden_TH)
            if shape not in self._captured:
                _add(self._counts, shape, 1)  # not before: a way back that never ran has compiled nothing, and cannot be captured

        return hidden_TH, counted

    def _in_turn(self, hidden_TH: Tensor, backward: Backward) -> tuple[Tensor, Backward]:
        """The same pass; until `backward` has run or is no longer referenced, this is `busy`."""
        assert not self.busy, "another pass has not gone back yet"
        held = [_Turn()]
        self._turn = weakref.ref(held[0])

        def once(dhidden_TH: Tensor) -> None:
            try:
                backward(dhidden_TH)
            finally:
                held.clear()

        return hidden_TH, once

    def _keep_only(self, bank_version: int) -> None:
        if bank_version != self._bank_version:
            for of_shapes in (self._captured, self._counts, self._padding):
                of_shapes.clear()
            self._bank_version = bank_version

    def size_for(self, own: Shape, most: int, launch: int, shape_of: Callable[[int], Shape], bank_version: int) -> int:
        """Tokens up to which a micro-batch of shape `own` should be padded, `most` at most, or its own where it should not.

        `launch`: tokens that the device computes while one is launched from Python. `shape_of`: the shape with so many tokens.
        """
        self._keep_only(bank_version)
        most = min(most, launch // _SMALLEST * _SMALLEST)
        if own.tokens >= most or self._is_captured(own) or not self._varies(own):
            return own.tokens
        better = dict.fromkeys(s for s in (own, shape_of(min(fine_size(own.tokens), most))) if s not in self._captured)
        for shape in better:
            if self._padding.get(shape, 0) >= GRAPH_PRICE * (launch - shape.tokens):
                return shape.tokens
        rough = min(rough_size(own.tokens), most)
        for size in sorted({shape.tokens for shape in self._captured if own.tokens < shape.tokens <= most} | {rough}):
            shape = shape_of(size)
            if self._is_captured(shape):
                for other in better:
                    _add(self._padding, other, max(0, size - other.tokens))
                return size
            if size == rough and shape not in self._captured:
                return rough
        return own.tokens

    def _has_run(self, shape: Shape) -> bool:
        return self._counts.get(shape, 0) >= _UNCAPTURED or self._is_captured(shape)

    def _is_captured(self, shape: Shape) -> bool:
        return self._captured.get(shape) is not None

    def _varies(self, own: Shape) -> bool:
        """Whether there was another shape than `own`."""
        return any(shape != own for of_shapes in (self._captured, self._counts) for shape in of_shapes)

    def run_uncaptured(self, batch: PackedBatch, state: PassState) -> tuple[Tensor, Backward]:
        """The same, never captured nor from a graph: hooks in the decoder are called."""
        with self._aside():
            hidden_TH, backward = self._decode(batch, state)

        def aside(dhidden_TH: Tensor) -> None:
            with self._aside():
                backward(dhidden_TH)

        return self._in_turn(hidden_TH, aside)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the graphs' stream, with memory of their pool. Pools are a thread's own: backward stays in this one."""
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        pool = torch.cuda.use_mem_pool(self._pool)  # type: ignore[arg-type]
        with torch.cuda.stream(self._stream), pool, torch.autograd.set_multithreading_enabled(False):
            yield
        outside.wait_stream(self._stream)

    def _try_to_capture(self, batch: PackedBatch, state: PassState) -> _Captured | None:
        """A shape that cannot be captured, for want of memory say, runs as it is from then on."""
        try:
            return self._capture(batch, state)
        except RuntimeError as error:
            warnings.warn(f"a micro-batch was not captured as a CUDA graph and runs slower: {error}", RuntimeWarning, stacklevel=2)
            return None

    def _capture(self, batch: PackedBatch, state: PassState) -> _Captured:
        """Keeps the tables of this very pass, and copies of the batch's own tensors, for later ones to be copied over them."""
        keys_T = state.tables.keys_T
        own = replace(batch, input_ids_T=batch.input_ids_T.clone(), position_ids_T=batch.position_ids_T.clone())
        tables = replace(state.tables, keys_T=None if keys_T is None else keys_T.clone())
        experts = None if state.experts is None else replace(state.experts, routings={}, shrunk={})
        mine = replace(state, tables=tables, shrunk={}, experts=experts)
        x_TH = None if (sent_TH := self._sent()) is None else sent_TH.new_zeros(len(own.input_ids_T), sent_TH.shape[1]).requires_grad_()
        graphs, ends = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()), self._ends_of(len(own.input_ids_T))
        captured = _Captured(*graphs, _inputs(own, mine), ends, x_TH)
        held = nullcontext() if self._source is None else self._source.holding(x_TH)
        with held, torch.autograd.set_multithreading_enabled(False), no_collection():  # a graph that died meanwhile would spoil it
            with self._into(captured.forward, self._pool):
                hidden_TH, backward = self._decode(own, mine)
                captured.ends.hidden_TH.copy_(hidden_TH)
            with self._into(captured.backward, self._pool):
                backward(captured.ends.dhidden_TH)
        return captured

    def _ends_of(self, num_tokens: int) -> _Ends:
        """All graphs share the largest that there was: they never overlap."""
        if num_tokens > len(self._ends.hidden_TH):
            self._ends = _Ends(*(self._like.new_empty(num_tokens, self._like.shape[-1]) for _ in range(2)))
        return _Ends(self._ends.hidden_TH[:num_tokens], self._ends.dhidden_TH[:num_tokens])

    @contextmanager
    def _into(self, graph: torch.cuda.CUDAGraph, pool: _Pool) -> Iterator[None]:
        """What is launched within becomes `graph`. Unlike `torch.cuda.graph` it neither waits for the device nor empties the allocator's
        caches: capturing hides behind the micro-batch that runs meanwhile.
        """
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool.id, capture_error_mode="thread_local")  # type: ignore[arg-type]
            try:
                yield
            finally:
                graph.capture_end()


def rough_size(tokens: int) -> int:
    """The next power of two or three quarters of one, at least `_SMALLEST`."""
    power = max(_SMALLEST, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if tokens <= power * 3 // 4 and power > _SMALLEST else power


def fine_size(tokens: int) -> int:
    """The next of eight between two powers of two."""
    step = max(_FINEST, (1 << (tokens - 1).bit_length()) // 16)
    return -(-tokens // step) * step


def _add(counts: OrderedDict[Shape, int], shape: Shape, number: int) -> int:
    """What is counted for `shape` then. The counts that were added to longest ago are given up for it."""
    count = counts[shape] = counts.pop(shape, 0) + number
    if len(counts) > _MOST_COUNTED:
        counts.popitem(last=False)
    return count


def _inputs(batch: PackedBatch, state: PassState) -> list[Tensor]:
    """All that a pass reads on the device and that changes from one micro-batch of a shape to the next."""
    keys = [] if state.tables.keys_T is None else [state.tables.keys_T]
    experts = [] if state.experts is None else [state.experts.batch.buffer]
    chunks = [] if state.chunks is None else [state.chunks.buffer]
    return [batch.input_ids_T, batch.position_ids_T, *keys, state.tables.buffer, *state.attention.buffers, *experts, *chunks]
