"""One base on the interpreted kernels and on the plain path: the same loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch

from tests.kernels.interpreter import DEVICE, MARKS, interpret, interpreted
from tests.numerics.two_jobs import samples
from tests.tiny import make_batch, make_model
from tests.tolerances import assert_close
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel import supermodel
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

if find_spec("triton") is not None:
    with interpreted():
        from tlora.kernels import pass_operations  # noqa: F401


def on_both_paths(test: Callable[..., None]) -> Callable[..., None]:
    """The marks of a test that runs a whole base on the kernels."""
    for mark in (pytest.mark.slow, pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"), MARKS[0]):
        test = mark(test)
    return test


def check_family(family: str, lengths: tuple[int, ...] = (1, 33, 17), lora: LoraConfig | None = None) -> None:
    """`check_both_paths` of a tiny base, with one job over samples of `lengths`."""
    batch = make_batch({"a": list(samples(3, lengths))}, device=DEVICE)
    check_both_paths(lambda: SuperModel(make_base(make_model(family).to(DEVICE), family)), lora or LoraConfig(r=4), batch)


def check_both_paths(make: Callable[[], SuperModel], lora: LoraConfig, batch: PackedBatch, loss_bound: float = 1e-5) -> None:
    """Of the job `a` with `lora` over `batch`; layers run as they are, not compiled."""
    found = []
    with torch.compiler.set_stance("force_eager"):
        for fast in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if fast:
                    interpret(patch)
                else:
                    patch.setattr(supermodel, "why_not_fused", lambda *_: "this test takes the plain path")
                shared = make()
                assert (shared.fast_path is not None) == fast
                shared.join("a", lora, TrainConfig(lr_scheduler_type="constant", seed=1))
                loss = shared.forward_backward(batch)["a"].mean
                found.append((loss, shared.bank.take_grad("a")))
    assert found[0][0] == pytest.approx(found[1][0], rel=loss_bound)
    assert_close(found[0][1], found[1][1], 1e-4)
