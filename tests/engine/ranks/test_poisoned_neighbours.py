"""Bad neighbours on one GPU of a job that spans several, and of one that lies on another: the bytes of both stay."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.ranks.test_span_exchange import World, story
from tests.group.test_engine_reports import dataset, spec
from tests.group.test_engine_reports import sets as sets
from tests.group.test_replicas import Sets, assert_same, ended, trained
from tests.numerics.poisons import POISONS, Poison
from tlora.adapters.state import AdapterState, init_state
from tlora.data.dataset import Dataset, Writer
from tlora.engine.messages import Faulty
from tlora.group.job_run import JobRun
from tlora.group.reports import Ended


def join(poison: Poison, world: World, rank: int, directory: Path) -> None:
    """The bad job joins on one rank."""
    bad, engine = poison.make(benign=False), world.engines[rank]
    writer = Writer(directory)
    for sample in bad.samples:
        writer.add(sample)
    writer.finish({})
    job = spec(bad.name, **bad.lora.model_dump(), **bad.train.model_dump(exclude={"max_steps"}), max_steps=bad.steps)
    state = init_state(engine.model.layout(job), job.seed, engine.model.bank.sum_dtype, engine.model.device)
    if bad.spoil is not None:
        bad.spoil(state)
    engine.join(JobRun(job, Dataset(directory), None), state)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AdapterState]:
    """What each job of the story comes to without neighbours; the data are those of `sets`."""
    directory = tmp_path_factory.mktemp("alone")
    train, evaluation = dataset(directory / "train", 12, 0), dataset(directory / "eval", 3, 1)
    return {job.name: trained(job, train, evaluation if job.eval_steps else None) for job in story()[0]}


# A job without samples never comes so far: its data is refused.
@pytest.mark.parametrize(
    ("rank", "poison"),
    [
        pytest.param(
            rank,
            poison,
            id=f"{rank}-{poison.name}",
            marks=[pytest.mark.soak] if (number + rank) % 2 else [pytest.mark.slow] if number else [],
        )
        for number, poison in enumerate(poison for poison in POISONS if poison.make(benign=False).samples)
        for rank in (0, 1)
    ],
)
def test_a_bad_neighbour_changes_no_byte(sets: Sets, alone: dict[str, AdapterState], tmp_path: Path, poison: Poison, rank: int) -> None:
    """On rank 1, the home of one spanning job that also has a part of the other, or on rank 0, which has a part and a job of its own."""
    jobs, spans = story()
    world = World(jobs, spans, sets, 3, [60] * 3)
    with poison.around():
        join(poison, world, rank, tmp_path / "bad")
        world.run(random.Random(rank))
        for job in jobs:
            home = spans[job.name].lead_rank if job.name in spans else 0
            assert_same(ended(world.heard[home], job.name), alone[job.name])
    assert world.faults == list[Faulty]()
    (end,) = [report for report in world.heard[rank] if isinstance(report, Ended) and report.job_id == "bad"]
    assert end.status == "failed" or not poison.raises
