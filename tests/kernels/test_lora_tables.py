"""The tables of a micro-batch against brute force over its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora.kernels.lora_tables import ADDRESS_FIELDS, RANK, TILE, LoraTables, Run, Slots, build_tables, rank_width

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Drawn:
    """Runs with gaps between them, and what of `Slots` is theirs."""

    runs: list[Run]
    slots: Slots
    num_tokens: int

    def build(self, keys: torch.Tensor | None = None) -> LoraTables:
        return build_tables(self.runs, self.slots, self.num_tokens, keys, CPU)


def make(samples: list[list[int]], gaps: list[int], ranks: list[list[int]], dropouts: list[float], tail: int = 0) -> Drawn:
    """`samples[s]` are run s's lengths, `gaps[s]` the tokens of no run before it, `ranks[l][s]` its rank at linear l."""
    runs: list[Run] = []
    t = 0
    for lengths, gap, dropout in zip(samples, gaps, dropouts, strict=True):
        runs.append(Run(t + gap, t + gap + sum(lengths), tuple(lengths), dropout))
        t = runs[-1].t1
    rng = np.random.default_rng(len(runs))
    shape = (len(ranks), len(runs))
    rows = rng.integers(0, 2**62, (*shape, ADDRESS_FIELDS))
    rows[:, :, RANK] = np.array(ranks).reshape(shape)
    keys = rng.integers(0, 2**31, len(ranks))
    slots = Slots(rows, rng.integers(0, 999, shape), rng.random(shape), keys, [None] * len(ranks))
    return Drawn(runs, slots, t + tail)


@st.composite
def batches(draw: st.DrawFn) -> Drawn:
    count = draw(st.integers(0, 8))
    samples = draw(st.lists(st.lists(st.integers(1, 90), min_size=1, max_size=5), min_size=count, max_size=count))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 63, 64, 130]), min_size=count, max_size=count))
    ranks = [draw(st.lists(st.integers(0, 256), min_size=count, max_size=count)) for _ in range(draw(st.integers(1, 4)))]
    dropouts = draw(st.lists(st.sampled_from([0.0, 0.1]), min_size=count, max_size=count))
    return make(samples, gaps, ranks, dropouts, draw(st.integers(int(count == 0), 200)))


def owners(drawn: Drawn) -> list[int | None]:
    """The run of each token."""
    found: list[int | None] = [None] * drawn.num_tokens
    for i, run in enumerate(drawn.runs):
        found[run.t0 : run.t1] = [i] * (run.t1 - run.t0)
    return found


@given(batches())
def test_a_tile_names_the_runs_whose_tokens_it_holds(drawn: Drawn) -> None:
    tables, owner = drawn.build(), owners(drawn)
    assert tables.tiles_X2.shape == (-(-drawn.num_tokens // TILE), 2)
    for x, (first, last) in enumerate(tables.tiles_X2.tolist()):
        inside = {run for run in owner[x * TILE : (x + 1) * TILE] if run is not None}
        assert set(range(first, last)) == inside
    pairs = [(x * TILE, run) for x, (first, last) in enumerate(tables.tiles_X2.tolist()) for run in range(first, last)]
    assert len(tables.items_I2) == len(tables.tiles_X2) + len(drawn.runs), "as many for every batch of one shape"
    assert tables.items_I2.tolist() == [*map(list, pairs), *[[0, -1]] * (len(tables.items_I2) - len(pairs))]
    wide = [owner[t : t + 2 * TILE] for t in range(0, drawn.num_tokens, 2 * TILE)]
    assert tables.runs_in_a_tile == max(len({run for run in tile if run is not None}) for tile in wide)


@given(batches())
def test_runs_and_samples_cover_their_tokens_in_order(drawn: Drawn) -> None:
    tables = drawn.build()
    assert tables.num_runs == len(drawn.runs)
    after = 0
    for run, (t0, t1, first, last) in zip(drawn.runs, tables.runs_S4.tolist(), strict=True):
        assert (t0, t1, first) == (run.t0, run.t1, after)
        own = tables.samples_P2[first:last].tolist()
        assert [t for s0, s1 in own for t in range(s0, s1)] == list(range(t0, t1))
        assert tuple(s1 - s0 for s0, s1 in own) == run.lengths
        after = last
    assert after == len(tables.samples_P2)


@given(batches())
def test_what_is_copied_arrives_whole(drawn: Drawn) -> None:
    """One buffer for all arrays: none may overlap the next, whatever their sizes."""
    tables, slots = drawn.build(), drawn.slots
    assert np.array_equal(tables.rows_LS5.numpy(), slots.rows_LS5) and tables.rows_LS5.dtype == torch.int64
    assert np.array_equal(tables.starts_LS.numpy(), slots.starts_LS) and tables.starts_LS.dtype == torch.int32
    kept = np.array([1 - (run.dropout if tables.keys_T is not None else 0) for run in drawn.runs])
    assert np.array_equal(tables.scales_LS.numpy(), (slots.scales_LS / kept).astype(np.float32))
    assert np.array_equal(tables.module_keys_L.numpy(), slots.module_keys_L.astype(np.int32))
    ints = (tables.runs_S4, tables.samples_P2, tables.tiles_X2, tables.items_I2, tables.starts_LS, tables.module_keys_L)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in ints)


@given(batches())
def test_width_holds_every_rank_and_many_says_what_the_simple_gemm_cannot(drawn: Drawn) -> None:
    keys = torch.zeros(drawn.num_tokens, dtype=torch.int32)
    tables = drawn.build(keys)
    largest = max((int(rank) for rank in drawn.slots.rows_LS5[:, :, RANK].ravel()), default=0)
    assert tables.width == rank_width(largest)
    assert tables.has_dropout == any(run.dropout for run in drawn.runs)
    assert not drawn.build(None).has_dropout
    assert tables.many == (tables.width > 64 or tables.runs_in_a_tile > 1)


@given(batches())
def test_empty_runs_behind_the_tokens_belong_to_no_tile(drawn: Drawn) -> None:
    """As batches are filled up with: they change the tables' shape and nothing of the others' rows."""
    behind, slots = 2**31 - 1, drawn.slots
    empty = [Run(behind, behind, ()), Run(behind, behind, (0, 0))]
    rows, starts, scales = (
        np.concatenate([a, np.zeros_like(a, shape=(a.shape[0], 2, *a.shape[2:]))], 1)
        for a in (slots.rows_LS5, slots.starts_LS, slots.scales_LS)
    )
    found = build_tables(
        [*drawn.runs, *empty], replace(slots, rows_LS5=rows, starts_LS=starts, scales_LS=scales), drawn.num_tokens, None, CPU
    )
    plain = drawn.build()
    assert torch.equal(found.tiles_X2, plain.tiles_X2) and found.runs_in_a_tile == plain.runs_in_a_tile
    assert torch.equal(found.runs_S4[:-2], plain.runs_S4) and torch.equal(found.samples_P2[:-2], plain.samples_P2)
    assert found.order_S[:-2].tolist() == plain.order_S.tolist() or not all(run.t1 - run.t0 for run in drawn.runs)


@pytest.mark.parametrize(
    ("rank", "width"), [(0, 16), (1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (128, 128), (129, 192), (256, 256)]
)
def test_rank_width(rank: int, width: int) -> None:
    assert rank_width(rank) == width


def test_a_run_whose_samples_do_not_add_up_is_a_bug() -> None:
    drawn = make([[3, 4]], [0], [[8]], [0.0])
    with pytest.raises(AssertionError, match="0:8 has samples of 7 tokens"):
        build_tables([Run(0, 8, (3, 4))], drawn.slots, 8, None, CPU)
