"""A copy of a job's state for a save, while its group trains on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tlora.adapters.state import AdapterState
from tlora.group.isolation import Failure, try_call
from tlora.group.reports import TrainingProgress
from tlora.kernels.transfer import download


@dataclass(frozen=True)
class Snapshot:
    """A private copy of a job's state at the time of its save: on the host, or still on the device, which has written it once `after` has
    passed.
    """

    state: AdapterState
    progress: TrainingProgress
    after: torch.Event | None = None

    def on_host(self) -> Snapshot:
        """The same state on the host, copied by the calling thread while the device works on."""
        if self.after is None:
            return self
        state = self.state
        moved = [f.result() for f in download([state.params, state.exp_avg, state.exp_avg_sq], state.params.device, self.after)]
        return Snapshot(replace(state, params=moved[0], exp_avg=moved[1], exp_avg_sq=moved[2]), self.progress)


def on_host(snapshot: Snapshot | Failure) -> Snapshot | Failure:
    return snapshot if isinstance(snapshot, Failure) else try_call(snapshot.on_host)
