"""The files of all jobs of a group: each report goes to its job's recorder."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from tlora.group.reports import Computed, Ended, Noted, Report, Status
from tlora.store.job_result import JobResult
from tlora.store.recorder import Outcome, Recorder


class Records:
    """Receives a group's reports. `ending`: jobs after their last step whose files are being written; `results`: those that have ended."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._recorders: dict[str, Recorder] = {}
        self.ending: dict[str, Future[Outcome]] = {}
        self.results: dict[str, JobResult] = {}

    def add(self, name: str, recorder: Recorder) -> None:
        """Call before the job joins."""
        self._recorders[name] = recorder

    def drop(self, name: str) -> None:
        """The job does not join after all: it has no result."""
        self._recorders.pop(name).drop()

    def hand_over(self, name: str) -> None:
        """A job that was finished before does not join; its adapter is exported once more."""
        self.ending[name] = self._recorders[name].hand_over()

    def listen(self, report: Report) -> None:
        match report:
            case Noted(line):
                self._note(line)
            case Computed():
                pass
            case Ended(name, _, status, reason, None):
                self._end(name, status, reason)
            case Ended(name):
                self.ending[name] = self._recorders[name].end(report)
            case _:
                self._recorders[report.job_id].listen(report)

    def see_ended(self, *, wait: bool = False) -> None:
        """Set the results of the jobs in `ending` whose files are written by now, or, with `wait`, of all of them."""
        errors: list[BaseException] = []
        for name, written in list(self.ending.items()):
            if wait or written.done():
                error = written.exception()
                del self.ending[name]  # last: an interrupted wait begins anew
                if error is None:
                    self._end(name, *written.result())
                else:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _end(self, name: str, status: Status, reason: str) -> None:
        self.results[name] = self._recorders.pop(name).result(status, reason)
        if status == "failed":
            self._note(f"{name} failed: {reason}")
        elif status == "done" and (why := self.results[name].reason):
            self._note(f"{name}: {why}")
