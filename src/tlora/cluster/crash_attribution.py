"""Which jobs may have killed their workers: each such job gets its next worker alone for a while, and fails if its workers still die.

Kept in a file of the store while any job is suspected, so that a restarted controller continues with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from tlora import durable
from tlora.errors import CheckpointError
from tlora.json_file import read_object

FILE = "blame.json"
MOST_DEATHS = 3  # of workers in a row, without progress of a job: then it fails, if it was alone in the last
_MORE_STEPS_ALONE = 4  # to its nth power: the steps that a job must get further alone after it was among others in n workers that died
_TRUSTED_AFTER = 10  # times as many steps after those, without such a death: then one of the deaths is forgotten


@dataclass(slots=True)
class Suspect:
    """The suspicion against one job, in optimizer steps unless stated otherwise."""

    furthest: int = 0  # as any worker has reported
    deaths: int = 0  # of workers in a row, without a step of the job that it had not taken before
    suspicions: int = 0  # deaths of workers that it shared with others
    alone_until: int | None = None  # it has its worker to itself
    trusted_at: int | None = None  # one of its suspicions is forgotten

    @property
    def is_clean(self) -> bool:
        return not (self.deaths or self.suspicions or self.alone_until)


_SUSPECTS: TypeAdapter[dict[str, Suspect]] = TypeAdapter(dict[str, Suspect])


class CrashAttribution:
    """Suspects by job name. `changed`: the file is out of date. Steps alone change nothing that must outlive a controller."""

    def __init__(self) -> None:
        self.of: dict[str, Suspect] = {}
        self.changed = False

    def is_alone(self, job_id: str) -> bool:
        """Whether the job must have its worker to itself."""
        suspect = self.of.get(job_id)
        return suspect is not None and suspect.alone_until is not None

    def see_steps(self, job_id: str, steps: int) -> None:
        """A suspect that has taken its steps alone joins the others again. New progress clears the earlier deaths: a job whose worker other
        jobs kill again and again loses only time.
        """
        suspect = self.of.setdefault(job_id, Suspect())
        if suspect.alone_until is not None and steps >= suspect.alone_until:
            suspect.alone_until, self.changed = None, True
        if steps > suspect.furthest:
            self.changed |= suspect.deaths > 0
            suspect.furthest, suspect.deaths = steps, 0
        while (trusted_at := suspect.trusted_at) is not None and steps >= trusted_at:
            suspect.suspicions -= 1
            self._put_off_trust(suspect, trusted_at)

    def die(self, job_ids: Iterable[str], together: bool) -> list[str]:
        """A worker has died that computed these jobs, `together` or a single one. Any of them may have killed it. Returns those that have
        killed too many.
        """
        guilty: list[str] = []
        for job_id in job_ids:
            suspect = self.of.setdefault(job_id, Suspect())
            suspect.deaths += 1
            self.changed = True
            if together:
                suspect.suspicions += 1
                alone_until: int = suspect.furthest + _MORE_STEPS_ALONE**suspect.suspicions
                suspect.alone_until = alone_until
                self._put_off_trust(suspect, alone_until)
            elif suspect.deaths >= MOST_DEATHS:
                guilty.append(job_id)
        return guilty

    def forget(self, job_id: str) -> None:
        suspect = self.of.pop(job_id, None)
        self.changed |= suspect is not None and not suspect.is_clean

    def _put_off_trust(self, suspect: Suspect, steps: int) -> None:
        """Restart the wait for trust at `steps`. So an often suspected job is alone for at most a tenth of its steps without deaths."""
        alone = _TRUSTED_AFTER * _MORE_STEPS_ALONE**suspect.suspicions
        suspect.trusted_at, self.changed = steps + alone if suspect.suspicions else None, True

    # -- the file ------------------------------------------------------------------------------------------------------

    def recall(self, directory: Path, note: Callable[[str], None]) -> None:
        """Restore what an earlier controller held against its jobs; a damaged file is reported to `note`."""
        path = directory / FILE
        if path.exists():
            try:
                self.of = _SUSPECTS.validate_python(read_object(path))
            except (OSError, ValueError) as error:
                note(f"{path}: which jobs may have killed workers cannot be read ({str(error).splitlines()[0]}): it is learned anew")

    def keep(self, directory: Path) -> None:
        """Write the changes. After a full disk the next call writes them."""
        if self.changed:
            suspects = {job_id: asdict(suspect) for job_id, suspect in self.of.items() if not suspect.is_clean}
            try:
                durable.write_file(directory / FILE, json.dumps(suspects) + "\n")
            except CheckpointError:
                return
            self.changed = False
