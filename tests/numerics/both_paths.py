"""One base on the interpreted kernels and on the plain path: the same loss and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.kernels.interpreter import interpret
from tests.tolerances import assert_close
from tlora.job import LoraConfig, TrainConfig
from tlora.supermodel import supermodel
from tlora.supermodel.batch import PackedBatch
from tlora.supermodel.supermodel import SuperModel


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
