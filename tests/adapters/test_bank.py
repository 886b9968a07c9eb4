"""The bank: slots never overlap, are aligned, carry exactly what was written, and leave nothing behind."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tlora.adapter_shape import ROW_ALIGNMENT
from tlora.adapters.bank import AdapterBank
from tlora.adapters.layout import AdapterLayout, make_layout
from tlora.adapters.state import init_state
from tlora.job import LoraConfig

TARGETS = {"layers.0.q_proj": (8, 12), "layers.0.v_proj": (8, 4), "layers.1.q_proj": (8, 12)}
CPU = torch.device("cpu")


def make_bank(dtype: torch.dtype = torch.float32) -> AdapterBank:
    return AdapterBank(TARGETS, dtype, CPU)


def layout_of(rank: int, modules: Mapping[str, tuple[int, int]] = TARGETS, **more: object) -> AdapterLayout:
    return make_layout(LoraConfig(r=rank, **more), modules)  # type: ignore[arg-type]


def numbered(layout: AdapterLayout, start: int = 1) -> torch.Tensor:
    return torch.arange(start, start + layout.numel, dtype=torch.float32)


def check_rows(bank: AdapterBank, live: Mapping[str, tuple[AdapterLayout, torch.Tensor]]) -> None:
    """Every slot holds its own numbers, all else is zero, and no two slots touch."""
    for module in TARGETS:
        here = {job: {s.module: (s, a, b) for s, a, b in layout.views(params)}.get(module) for job, (layout, params) in live.items()}
        here = {job: found for job, found in here.items() if found}
        if not here:
            continue
        rows = bank.linear(module)
        owner = torch.zeros(len(rows.a_RK), dtype=torch.bool)
        for job, (shape, a, b) in here.items():
            slot = bank.slot(job, module)
            assert slot is not None
            span, scale = slot
            assert len(span) == shape.rank and scale == shape.scale and span.start % ROW_ALIGNMENT == 0
            assert not owner[span.start : span.stop].any(), f"{job} shares rows with another"
            owner[span.start : span.stop] = True
            assert torch.equal(rows.a_RK[span.start : span.stop], a) and torch.equal(rows.b_RN[span.start : span.stop], b)
        for tensor in (rows.a_RK, rows.b_RN, rows.da_RK, rows.db_RN):
            assert tensor.shape[0] == len(owner) and not tensor[~owner].any()


operations = st.lists(st.tuples(st.booleans(), st.integers(1, 50), st.integers(1, 7)), min_size=1, max_size=30)


@given(operations)
def test_any_order_of_coming_and_going(drawn: list[tuple[bool, int, int]]) -> None:
    bank, live, count = make_bank(), dict[str, tuple[AdapterLayout, torch.Tensor]](), 0
    for add, rank, modules in drawn:
        if add or not live:
            chosen = {m: shape for i, (m, shape) in enumerate(TARGETS.items()) if modules >> i & 1}
            layout = layout_of(rank, chosen)
            params = numbered(layout, 1000 * count + 1)
            bank.add(f"job{count}", layout)
            bank.write(f"job{count}", params)
            live[f"job{count}"] = (layout, params)
            count += 1
        else:
            job = sorted(live)[rank % len(live)]
            bank.remove(job)
            del live[job]
        assert set(bank.jobs()) == set(live) and all(job in bank for job in live)
        check_rows(bank, live)


def test_a_gradient_is_flat_as_the_parameters_are_and_can_be_put_back() -> None:
    bank = make_bank()
    layouts = {"a": layout_of(3), "b": layout_of(5, {"layers.0.v_proj": (8, 4)}), "c": layout_of(17)}
    for start, (job, layout) in enumerate(layouts.items()):
        bank.add(job, layout)
        bank.set_gradient(job, numbered(layout, 1000 * start))
    for start, (job, layout) in enumerate(layouts.items()):
        assert torch.equal(bank.gradient(job), numbered(layout, 1000 * start))
        for shape, da, db in layout.views(numbered(layout, 1000 * start)):
            span, _ = bank.slot(job, shape.module) or (range(0), 0.0)
            rows = bank.linear(shape.module)
            assert torch.equal(rows.da_RK[span.start : span.stop], da) and torch.equal(rows.db_RN[span.start : span.stop], db)
    for module in TARGETS:  # the rows between adapters stay zero
        rows = bank.linear(module)
        owned = [span for job in layouts if (slot := bank.slot(job, module)) for span in slot[0]]
        free = [row for row in range(len(rows.da_RK)) if row not in owned]
        assert free and not rows.da_RK[free].any() and not rows.db_RN[free].any()
    assert torch.equal(bank.take_grad("c"), numbered(layouts["c"], 2000)) and not bank.gradient("c").any()
    assert torch.equal(bank.gradient("a"), numbered(layouts["a"], 0))


def test_rows_are_used_again() -> None:
    bank = make_bank()
    for i in range(100):
        bank.add(f"job{i}", layout_of(16))
        if i >= 2:
            bank.remove(f"job{i - 2}")
    assert len(bank.linear("layers.0.q_proj").a_RK) <= 64


@pytest.mark.parametrize("ranks", [[3, 40, 17, 1], [256, 1], [16, 16, 16]])
def test_the_tensors_hold_the_padded_rows_and_no_more(ranks: list[int]) -> None:
    bank, padded = make_bank(), 0
    for i, rank in enumerate(ranks):
        bank.add(f"job{i}", layout_of(rank))
        padded += -(-rank // ROW_ALIGNMENT) * ROW_ALIGNMENT
        rows = bank.linear("layers.1.q_proj")
        assert {len(t) for t in (rows.a_RK, rows.b_RN, rows.da_RK, rows.db_RN)} == {padded}


@pytest.mark.parametrize("at", range(12))
def test_memory_that_runs_out_half_way_leaves_the_bank_as_it_was(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tensors at each of three linears: whichever does not fit, no row is held and all goes on."""
    bank, first, layout = make_bank(), layout_of(3), layout_of(20)
    bank.add("first", first)
    bank.write("first", numbered(first))
    calls, real = [0], torch.Tensor.new_zeros

    def new_zeros(self: torch.Tensor, *size: int) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == at + 1:
            raise torch.OutOfMemoryError("no memory")
        return real(self, *size)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    with pytest.raises(torch.OutOfMemoryError):
        bank.add("second", layout)
    monkeypatch.undo()
    assert calls[0] == at + 1 and bank.jobs() == ["first"] and "second" not in bank
    assert all(set(bank.linear(module).used) == {"first"} for module in TARGETS)
    check_rows(bank, {"first": (first, numbered(first))})
    bank.add("second", layout)
    bank.write("second", numbered(layout, 500))
    check_rows(bank, {"first": (first, numbered(first)), "second": (layout, numbered(layout, 500))})


def test_growing_keeps_weights_and_half_summed_gradients() -> None:
    bank, layout = make_bank(), layout_of(3)
    bank.add("first", layout)
    bank.write("first", numbered(layout))
    bank.linear("layers.0.q_proj").da_RK[:3] = 5
    for i in range(9):
        bank.add(f"other{i}", layout_of(40))
    grad = bank.take_grad("first")
    assert float(grad.sum()) == 5 * 3 * 8
    rows, _ = bank.slot("first", "layers.0.q_proj") or (range(0), 0.0)
    assert torch.equal(bank.linear("layers.0.q_proj").a_RK[rows.start : rows.stop].flatten(), numbered(layout)[: 3 * 8])


def test_adapters_for_which_room_was_made_move_nothing() -> None:
    """Of three layouts, one over fewer linears."""
    layouts = {"a": layout_of(5), "b": layout_of(20), "c": layout_of(33, {"layers.0.q_proj": (8, 12)})}
    bank = make_bank()
    bank.make_room(layouts.values())
    version = bank.version
    before = {module: bank.linear(module).a_RK for module in TARGETS}
    live: dict[str, tuple[AdapterLayout, torch.Tensor]] = {}
    for name, layout in layouts.items():
        bank.add(name, layout)
        live[name] = layout, numbered(layout)
        bank.write(name, live[name][1])
    assert bank.version == version and all(bank.linear(module).a_RK is rows for module, rows in before.items())
    assert [len(bank.linear(module).a_RK) for module in TARGETS] == [96, 48, 48]
    check_rows(bank, live)
    bank.make_room(layouts.values())
    assert all(bank.linear(module).a_RK is rows for module, rows in before.items())


def test_taking_a_gradient_takes_the_jobs_own_in_layout_order_and_forgets_it() -> None:
    bank, layouts = make_bank(), {"a": layout_of(3), "b": layout_of(20)}
    for job, layout in layouts.items():
        bank.add(job, layout)
    for module in TARGETS:
        linear = bank.linear(module)
        for i, job in enumerate(layouts):
            rows, _ = bank.slot(job, module) or (range(0), 0.0)
            linear.da_RK[rows.start : rows.stop], linear.db_RN[rows.start : rows.stop] = 10 * i + 1, 10 * i + 2
    for i, (job, layout) in enumerate(layouts.items()):
        for _, da, db in layout.views(bank.take_grad(job)):
            assert bool((da == 10 * i + 1).all()) and bool((db == 10 * i + 2).all())
        assert not bank.take_grad(job).any()


def test_forgetting_one_gradient_keeps_the_others() -> None:
    bank = make_bank()
    for job in ("a", "b"):
        bank.add(job, layout_of(2))
        rows, _ = bank.slot(job, "layers.0.v_proj") or (range(0), 0.0)
        bank.linear("layers.0.v_proj").db_RN[rows.start : rows.stop] = 1
    bank.linear("layers.0.q_proj").da_RK[:2] = torch.nan  # a's
    bank.zero_grad("a")
    assert not bank.take_grad("a").any() and float(bank.take_grad("b").sum()) == 2 * 4


def test_no_trace_is_left_not_even_in_the_padding() -> None:
    bank = make_bank()
    bank.add("a", layout_of(3))
    rows = bank.linear("layers.0.q_proj")
    for tensor in (rows.a_RK, rows.b_RN, rows.da_RK, rows.db_RN):
        tensor.fill_(torch.nan)
    bank.remove("a")
    bank.add("b", layout_of(9))
    assert not any(t.any() for t in (rows.a_RK, rows.b_RN, rows.da_RK, rows.db_RN)) and not bank.take_grad("b").any()


def test_a_job_has_no_slot_where_it_adapts_nothing() -> None:
    bank = make_bank()
    bank.add("a", layout_of(2, {"layers.0.q_proj": (8, 12)}))
    bank.add("b", layout_of(2))
    assert bank.slot("a", "layers.1.q_proj") is None and bank.slot("b", "layers.1.q_proj") is not None


def read_rows(address: int, count: int) -> torch.Tensor:
    """What lies at an address, as fp32."""
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32).clone()


def check_addresses(bank: AdapterBank, layouts: Mapping[str, AdapterLayout]) -> None:
    for job, layout in layouts.items():
        assert list(bank.addresses(job)) == [s.module for s in layout.shapes]
        for s, a, b in layout.views(numbered(layout, 1000 * ord(job))):
            at, linear = bank.addresses(job)[s.module], bank.linear(s.module)
            assert (at.rank, at.scale) == (s.rank, s.scale)
            assert torch.equal(read_rows(at.a, a.numel()), a.flatten()) and torch.equal(read_rows(at.b, b.numel()), b.flatten())
            rows, _ = bank.slot(job, s.module) or (range(0), 0.0)
            linear.da_RK[rows.start : rows.stop], linear.db_RN[rows.start : rows.stop] = ord(job), -ord(job)
            assert bool((read_rows(at.da, a.numel()) == ord(job)).all()) and bool((read_rows(at.db, b.numel()) == -ord(job)).all())


def test_addresses_are_those_of_the_rows_also_after_the_tensors_have_moved() -> None:
    bank, layouts = make_bank(), dict[str, AdapterLayout]()
    for job, rank in (("a", 3), ("b", 20), ("c", 90)):
        layouts[job] = layout_of(rank, {m: TARGETS[m] for m in list(TARGETS)[: 1 + rank % 3]})
        bank.add(job, layouts[job])
        bank.write(job, numbered(layouts[job], 1000 * ord(job)))
        check_addresses(bank, layouts)
    assert "layers.0.v_proj" not in bank.addresses("a")
    same = bank.addresses("c")
    assert bank.addresses("c") is same
    bank.remove("b")
    assert bank.addresses("c") is same, "nothing has moved"
    bank.add("b", layouts["b"])
    bank.write("b", numbered(layouts["b"], 1000 * ord("b")))
    check_addresses(bank, layouts)


def test_addresses_hold_after_memory_ran_out_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linears before the one that did not fit have grown."""
    bank, layout = make_bank(), layout_of(3)
    bank.add("a", layout)
    bank.write("a", numbered(layout, 1000 * ord("a")))
    check_addresses(bank, {"a": layout})
    calls, real = [0], torch.Tensor.new_zeros

    def new_zeros(self: torch.Tensor, *size: int) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 6:
            raise torch.OutOfMemoryError("no memory")
        return real(self, *size)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    with pytest.raises(torch.OutOfMemoryError):
        bank.add("b", layout_of(60))
    monkeypatch.undo()
    check_addresses(bank, {"a": layout})


def test_a_second_slot_for_one_job_is_a_bug() -> None:
    bank = make_bank()
    bank.add("a", layout_of(2))
    with pytest.raises(AssertionError, match="a has a slot already"):
        bank.add("a", layout_of(2))


@pytest.mark.parametrize(
    ("dtype", "sums"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)], ids=str
)
def test_sums_are_in_full_precision(dtype: torch.dtype, sums: torch.dtype) -> None:
    bank, layout = make_bank(dtype), layout_of(2)
    bank.add("a", layout)
    bank.write("a", init_state(layout, 0, sums).params)
    assert bank.linear("layers.0.q_proj").a_RK.dtype == dtype and bank.linear("layers.0.q_proj").da_RK.dtype == sums
    assert bank.take_grad("a").dtype == sums
