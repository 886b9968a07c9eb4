"""A run on several GPUs, from its first attempt to its last: where the ranks depend on each other and one is lost, the run begins again on
the GPUs that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tlora.data.prepare import DataWorker
from tlora.engine.earlier_run import earlier_ends
from tlora.engine.ranks.checked_run import CheckedRun
from tlora.engine.ranks.coordinator import Coordinator, LostBeforeTrainingError
from tlora.engine.ranks.rank_group import RankGroup
from tlora.engine.results import Results
from tlora.errors import CapacityError, RankError
from tlora.store.fingerprint import BaseGuard
from tlora.store.run_directory import earlier_base, hold_run_directory
from tlora.supermodel.load import find_directory
from tlora.wording.numbers import place_names, places_text


def train_on_ranks(order: CheckedRun, devices: Sequence[str], data_worker: DataWorker | None, started: RankGroup | None) -> Results:
    """As `train`, on one process for each of the `devices`; `started`: those processes, if they were started ahead.

    A run is begun again, as far as the base fits on what is left, where the loss of a GPU has ended one that shared its base, or
    came before the training of one whose ranks read each other's memory.
    """
    rank_group = started if started is not None and started.count == len(devices) else None
    results: Results | None = None
    while devices:
        rank_group = rank_group or RankGroup(len(devices))
        try:
            results, devices = _attempt(order, devices, data_worker, rank_group, rank_group is started)
            if devices:
                order.watcher.note(f"starting again from the last checkpoints, on {places_text(len(devices), devices[0])}")
                run = order.run
                ended = {name: end.result for name, end in earlier_ends(run.jobs, Path(run.output_dir)).items()}
                guard = BaseGuard(run.base_model, find_directory(run.base_model), earlier_base(run, True))
                order = replace(order, resume=True, overwrite=False, guard=guard, again=True, ended=ended)
        except LostBeforeTrainingError as lost:
            devices = _left(devices, rank_group)
            if not devices:
                raise RankError(f"{lost}, as are all others. Start the run again") from None
            order.watcher.note(f"{lost}; starting again on {places_text(len(devices), devices[0])}")
            order = replace(order, again=True)
        except CapacityError as error:
            if results is None:
                raise
            order.watcher.note(f"{error}. All jobs are saved: resume with --resume on as many {place_names(devices[0])[1]} as before")
            break
        data_worker = rank_group = None
    assert results is not None, "a run without GPUs"
    return results


def _attempt(
    order: CheckedRun, devices: Sequence[str], data_worker: DataWorker | None, rank_group: RankGroup, has_started: bool
) -> tuple[Results, Sequence[str]]:
    """The results, and the devices to begin again on; none where the run has come to its end. Raises LostBeforeTrainingError."""
    with ExitStack() as stack:
        stack.callback(rank_group.close)
        if not has_started:
            rank_group.start()
        coordinator = Coordinator(order, rank_group, devices)
        coordinator.prepare(data_worker)
        held = stack.enter_context(hold_run_directory(coordinator.run, order.resume, order.overwrite, order.watcher.note))
        stack.callback(order.guard.close)
        results = coordinator.train(held)
    return results, _left(devices, rank_group) if coordinator.may_begin_again else []


def _left(devices: Sequence[str], rank_group: RankGroup) -> list[str]:
    """Without those whose ranks are lost by their own fault."""
    return [device for rank, device in enumerate(devices) if rank not in rank_group.lost or rank_group.lost[rank].by_another]
