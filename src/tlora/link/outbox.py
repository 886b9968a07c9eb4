"""A worker's unacknowledged reports: numbered when first sent, kept until acknowledged. Pure: no socket, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from tlora.worker_protocol import Envelope, HeldJob, JobEnd, JobReport, Left, Report, Stepped

MOST_UNDER_WAY = 256  # reports that are sent and not taken; what comes behind them waits, and of a job's steps only the last


class Outbox:
    """`last_taken` is the number of the last report that was taken."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Report]] = []
        self._under_way: deque[Envelope] = deque()
        self._last_sent = self.last_taken = 0

    def put(self, report: Report, generation: int) -> None:
        if isinstance(report, Stepped):
            for place, (_, earlier) in enumerate(self._waiting):
                if isinstance(earlier, Stepped) and (earlier.job_id, earlier.attempt) == (report.job_id, report.attempt):
                    self._waiting[place] = (generation, report)
                    return
        self._waiting.append((generation, report))

    def fresh(self) -> list[Envelope]:
        """Reports to be sent for the first time."""
        found: list[Envelope] = []
        while self._waiting and len(self._under_way) < MOST_UNDER_WAY:
            generation, report = self._waiting.pop(0)
            self._last_sent += 1
            found.append(Envelope(self._last_sent, generation, report))
            self._under_way.append(found[-1])
        return found

    def again(self) -> list[Envelope]:
        """Reports that were sent and have not been taken, in their order: for a new connection, or when nothing was heard for a while."""
        return list(self._under_way)

    def taken(self, seq: int) -> None:
        while self._under_way and self._under_way[0].seq <= seq:
            self.last_taken = self._under_way.popleft().seq

    @property
    def has_fresh(self) -> bool:
        """Whether a report can be sent now."""
        return bool(self._waiting) and len(self._under_way) < MOST_UNDER_WAY

    def ends(self) -> list[HeldJob]:
        """Jobs whose end is reported here but not acknowledged yet."""
        reports = [said.report for said in self._under_way] + [report for _, report in self._waiting]
        ends = [report for report in reports if isinstance(report, JobEnd)]
        return [HeldJob(end.job_id, end.attempt, end.steps if isinstance(end, Left) else 0, resident=False) for end in ends]


class ReportInbox:
    """The receiving end: decides which reports of one incarnation are new. Each is taken once, in order."""

    def __init__(self, last_seq: int = 0) -> None:
        """`last_seq`: the last number that an earlier controller has taken. `told` is the last one that was acknowledged."""
        self.seq = self.told = last_seq
        self._asked_again = False

    def take(self, said: Envelope) -> bool:
        """Whether the report is the next one. One that comes too early will be sent again."""
        if said.seq != self.seq + 1:
            self._asked_again |= said.seq <= self.seq
            return False
        self.seq = said.seq
        return True

    def due(self) -> int | None:
        """The number to acknowledge, if the worker does not know it."""
        if self.seq == self.told and not self._asked_again:
            return None
        self.told, self._asked_again = self.seq, False
        return self.seq


def with_attempt(report: Report, attempt: int) -> Report:
    """The report with that attempt's number, if it is about a job."""
    return replace(report, attempt=attempt) if isinstance(report, JobReport) else report
