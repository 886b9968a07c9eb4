"""Layouts and fresh adapters: PEFT's distribution, seeds that keep modules apart, copies that are copies."""

from __future__ import annotations

import math

import peft
import torch
from torch import nn

from tlora.adapters.layout import make_layout
from tlora.adapters.state import init_state
from tlora.job import LoraConfig

TARGETS = {"a.q_proj": (300, 200), "b.q_proj": (300, 200), "b.down_proj": (50, 300)}


def test_layout_follows_patterns_and_rslora() -> None:
    lora = LoraConfig(r=4, lora_alpha=8, rank_pattern={"b.q_proj": 9}, alpha_pattern={"down_proj": 2}, use_rslora=True)
    shapes = {s.module: (s.rank, s.scale) for s in make_layout(lora, TARGETS).shapes}
    assert shapes == {"a.q_proj": (4, 4.0), "b.q_proj": (9, 8 / 3), "b.down_proj": (4, 1.0)}


def test_views_tile_the_flat_vector() -> None:
    layout = make_layout(LoraConfig(r=3), TARGETS)
    flat = torch.arange(layout.numel)
    assert torch.equal(torch.cat([v.flatten() for _, a, b in layout.views(flat) for v in (a, b)]), flat)
    assert layout.numel == 3 * sum(k + n for k, n in TARGETS.values())


def test_a_fresh_adapter_is_drawn_as_peft_draws_one() -> None:
    """Same law: uniform in ±1/sqrt(K), B zero. The draws differ, so mean, deviation and bounds are compared."""
    net = nn.Sequential()
    net.q_proj = nn.Linear(300, 200)
    theirs = peft.get_peft_model(net, peft.LoraConfig(r=64, target_modules=["q_proj"]))
    their_a = next(p for n, p in theirs.named_parameters() if "lora_A" in n).detach()
    layout = make_layout(LoraConfig(r=64), {"q_proj": (300, 200)})
    _, a, b = next(layout.views(init_state(layout, 1, torch.float32).params))
    bound = 1 / math.sqrt(300)
    for drawn in (a, their_a):
        assert 0.99 * bound < float(drawn.abs().max()) <= bound * (1 + 1e-6)
        assert abs(float(drawn.mean())) < 5 * bound / math.sqrt(3 * drawn.numel())
        assert abs(float(drawn.std()) * math.sqrt(3) / bound - 1) < 0.02
    assert not b.any()


def test_seed_and_module_each_give_another_start_and_neighbours_do_not() -> None:
    layout = make_layout(LoraConfig(r=4), TARGETS)
    starts = {s.module: a for s, a, _ in layout.views(init_state(layout, 2**32 - 1, torch.float32).params)}
    alone = make_layout(LoraConfig(r=4), {"b.q_proj": TARGETS["b.q_proj"]})
    _, same, _ = next(alone.views(init_state(alone, 2**32 - 1, torch.float32).params))
    _, other, _ = next(alone.views(init_state(alone, 0, torch.float32).params))
    assert torch.equal(starts["b.q_proj"], same)
    assert not torch.equal(same, other) and not torch.equal(starts["a.q_proj"], starts["b.q_proj"])


def test_fp64_starts_where_fp32_does() -> None:
    layout = make_layout(LoraConfig(r=4), TARGETS)
    wide, narrow = (init_state(layout, 3, dtype).params for dtype in (torch.float64, torch.float32))
    assert wide.dtype == torch.float64 and float((wide - narrow).abs().max()) < 1e-8


def test_a_clone_is_its_own() -> None:
    state = init_state(make_layout(LoraConfig(r=2), TARGETS), 0, torch.float32)
    copy = state.clone()
    for name in ("params", "exp_avg", "exp_avg_sq"):
        getattr(state, name).fill_(7)
    state.step = 5
    assert not copy.exp_avg.any() and not copy.exp_avg_sq.any() and copy.step == 0 and float(copy.params.max()) < 1
