"""Replicas in turn with the optimizer of a GPU: on a CPU its kernels go through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.group.test_engine_reports import heard as heard
from tests.group.test_engine_reports import sets as sets
from tests.group.test_engine_reports import until_idle
from tests.group.test_replicas import Sets, assert_same, ended, spanning
from tests.kernels.interpreter import DEVICE, MARKS, interpreted
from tests.tiny import make_model
from tests.tolerances import TRAINED, assert_close
from tlora.adapters.state import AdapterState
from tlora.group.engine import Engine
from tlora.group.job_run import JobRun
from tlora.group.reports import Report
from tlora.job import JobSpec
from tlora.supermodel.load import make_base
from tlora.supermodel.supermodel import SuperModel

pytest.importorskip("triton")
with interpreted():
    from tlora.supermodel.device_optimizer import DeviceOptimizer

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")]  # dynamo looks


def trained(job: JobSpec, sets: Sets, heard: list[Report], budget: int) -> AdapterState:
    heard.clear()
    model = SuperModel(make_base(make_model().to(DEVICE), "tiny"), deterministic=True)
    model.optimizer = DeviceOptimizer(model.bank)
    engine = Engine(model, budget, heard.append)
    with torch.compiler.set_stance("force_eager"):
        engine.join(JobRun(job, sets[0], None))
        until_idle(engine)
    return ended(heard, job.name)


@pytest.mark.slow
def test_replicas_take_the_optimizer_of_a_gpu(sets: Sets, heard: list[Report]) -> None:
    """Its bytes follow from no budget, and it is the job without replicas up to rounding."""
    two, narrow, one = (
        trained(spanning(gpus, batch_size=3, max_steps=3), sets, heard, budget) for gpus, budget in ((2, 64), (2, 25), (1, 64))
    )
    start = trained(spanning(1, batch_size=3, max_steps=1, learning_rate=0), sets, heard, 64).params
    assert_same(two, narrow)
    assert not torch.equal(two.params, one.params), "the order of additions is not seen here"
    assert_close(two.params - start, one.params - start, TRAINED[torch.float32])
