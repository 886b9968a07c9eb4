"""Over a base with wide norms: in deterministic mode no measured time chooses between forms of a kernel, which round differently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.utils import fresh_cache

from tests.gpu.test_fast_path_promises import batch_of, join
from tests.tiny import make_model
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
WIDE: dict[str, Any] = {"hidden_size": 8192, "intermediate_size": 1024, "num_attention_heads": 64, "num_key_value_heads": 8}


@pytest.mark.parametrize("deterministic", [True, False])
def test_no_time_chooses_the_form_of_a_reduction(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise times do choose: this test sees them."""
    timed: list[str] = []
    benchmark: Any = CachingAutotuner.benchmark_all_configs

    def note(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if tuner.heuristic_type in (HeuristicType.REDUCTION, HeuristicType.PERSISTENT_REDUCTION):
            timed.append(tuner.fn.__name__)
        return benchmark(tuner, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", note)
    torch._dynamo.reset()
    with fresh_cache():
        model = make_model("llama", torch.bfloat16, **WIDE, num_hidden_layers=1).to("cuda")
        shared = SuperModel(make_base(model, "wide"), deterministic)
        join(shared, "a")
        shared.forward_backward(batch_of("a", 0))
    torch._dynamo.reset()
    assert bool(timed) != deterministic, timed
