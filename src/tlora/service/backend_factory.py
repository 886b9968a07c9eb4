"""Where a server's jobs are trained and their data is read, as the controller knows it: the border that tests put fakes behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tlora.cluster.controller import Backend
from tlora.cluster.reconciler import LocalJob
from tlora.job import JobSpec
from tlora.protocol import JobRequest, JobSubmitted
from tlora.scheduler.state import ClusterState
from tlora.service.base_shapes import precision_of
from tlora.service.config import ServerConfig
from tlora.service.intake import Answer, IntakeClient, IntakeSettings
from tlora.service.machine import Devices

_INTAKE_SLOTS = 2  # batches of jobs whose data is read at a time: one tenant never holds both


class Cluster(Backend, Protocol):
    """What the controller needs of `cluster.local.LocalBackend`; tests give one whose workers are fake."""

    more_to_come: Callable[[], bool]

    @property
    def began_at_seconds(self) -> float: ...
    def submit(self, spec: JobSubmitted, job: LocalJob, at_seconds: float | None = None) -> None: ...
    def ask(self, request: JobRequest, at_seconds: float = 0.0) -> None: ...
    def forget(self, job_id: str) -> None: ...
    def expect(self, base_model: str, spec: JobSpec) -> None: ...
    def drain(self, host: str, *, finish: bool = False, undo: bool = False) -> None: ...
    def follow(self, state: ClusterState) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class ReadsData(Protocol):
    """What the controller needs of `intake.IntakeClient`."""

    def start(self) -> None: ...
    def put(self, key: str, line: bytes) -> None: ...
    def forget(self, key: str) -> None: ...
    def close(self) -> None: ...
    @property
    def pid(self) -> int | None: ...


@dataclass(frozen=True)
class BackendFactory:
    """Where jobs are trained. `make` gives the cluster over base models, name -> directory or hub id, a mapping that may grow;
    `intake` what reads their data, from its settings, its log and what to call with its answers.
    """

    places: Devices
    make: Callable[[Mapping[str, str]], Cluster]
    intake: Callable[[IntakeSettings, Path, Callable[[Answer], None]], ReadsData] = IntakeClient


def intake_settings(config: ServerConfig, device: str) -> IntakeSettings:
    """Of the intake process, on a machine with that device."""
    return IntakeSettings(str(config.directory / "bases"), precision_of(config, device), config.limits, _INTAKE_SLOTS)
