"""A run that may begin: what `train` hands to the processes that compute it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tlora.engine.messages import Hello
from tlora.engine.watcher import Watcher
from tlora.errors import ConfigError
from tlora.job import RunSpec
from tlora.store.fingerprint import BaseGuard
from tlora.store.job_result import JobResult
from tlora.store.model_card import library_versions
from tlora.version import __version__


@dataclass(frozen=True)
class CheckedRun:
    """A run that has been checked as far as its files allow."""

    run: RunSpec
    resume: bool
    overwrite: bool
    watcher: Watcher
    guard: BaseGuard
    digest: str = ""  # of the jobs file as it was read, where a launcher's ranks have read it too
    again: bool = False  # after the loss of a GPU: jobs that fitted before must fit now
    ended: Mapping[str, JobResult] = field(default_factory=dict[str, JobResult])  # by an earlier run

    def check_alike(self, hello: Hello) -> None:
        """Raises ConfigError for a rank with other software or another jobs file than this one, which only a launcher can have started."""
        ours, what = library_versions() | {"tlora": __version__}, ""
        if differ := [name for name, version in ours.items() if hello.software.get(name) != version]:
            what = f"{differ[0]} {hello.software.get(differ[0])}, and rank 0 {ours[differ[0]]}. Install the same everywhere"
        elif hello.run_digest not in ("", self.digest):
            what = "another jobs file, or other options, than rank 0. Launch all with the same command"
        if what:
            raise ConfigError(f"rank {hello.rank} on {hello.host} has {what}")
