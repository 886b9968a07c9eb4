"""`tlora tune` on a GPU: every candidate computes the same or is left out with a reason; what is chosen is no slower than the rule."""

from __future__ import annotations

import pytest
import torch

from tlora.engine.tune import MARGIN, choose
from tlora.kernels.tile_trials import Jobs, make_problem
from tlora.kernels.tiles import Key

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
LAUNCHES = {
    Key("forward", torch.bfloat16, 3072, 1024, 1): (),
    Key("input_gradient", torch.bfloat16, 1024, 6144, 2): (3072, 3072),
    Key("shrink", torch.bfloat16, 0, 1024, 3): (),
    Key("sum", torch.bfloat16, 1024, 0, 3): (),
}


@pytest.mark.parametrize(("key", "widths"), LAUNCHES.items(), ids=str)
def test_a_launch_is_tuned(key: Key, widths: tuple[int, ...]) -> None:
    """Widths of Qwen3-0.6B's MLP. A fault may be a lack of shared memory; other results or bits would be a bug of the kernels."""
    choice = choose(key, widths, torch.device("cuda"))
    assert choice.tile == choice.rule or choice.gain > MARGIN
    assert 0 < choice.seconds <= choice.rule_seconds < 0.1
    assert not [fault for fault in choice.faults if "differs" in fault or "other bits" in fault]


def test_a_launch_is_tuned_on_the_whole_gpu() -> None:
    key = Key("forward", torch.bfloat16, 64, 64, 1)
    problem = make_problem(key, (), Jobs(((64,),), 16), torch.device("cuda"))
    assert problem.group.programs == torch.cuda.get_device_properties("cuda").multi_processor_count
