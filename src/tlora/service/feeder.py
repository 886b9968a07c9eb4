"""Jobs on their way from requests to the controller: handed over by a thread, so that no request waits for what the controller does."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from sqlalchemy.exc import SQLAlchemyError

from tlora.service.order_reader import Accepted

STORE_SECONDS = 2.0  # between two tries of a store that does not answer


class Feeder:
    """`put` in any thread; `take_up` gets one job after the other, and a set that lives as long as those that waited together: paths that
    need not be looked for, as many orders name the same files.
    """

    def __init__(self, take_up: Callable[[Accepted, set[str]], None]) -> None:
        self._take_up = take_up
        self._inbox: queue.SimpleQueue[Sequence[Accepted] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, jobs: Sequence[Accepted]) -> None:
        self._inbox.put(jobs)

    def close(self) -> None:
        """Take nothing more up than what has begun; does not wait."""
        self._inbox.put(None)

    def _run(self) -> None:
        while True:
            found = [self._inbox.get()]
            while not self._inbox.empty():  # this is the only thread that takes from it
                found.append(self._inbox.get())
            if None in found:  # the store has all jobs: the next server takes up those that are left
                return
            self._take_up_all([job for jobs in found if jobs is not None for job in jobs])

    def _take_up_all(self, jobs: Sequence[Accepted]) -> None:
        there = set[str]()
        for number, job in enumerate(jobs):
            try:
                self._take_up(job, there)
            except SQLAlchemyError:  # the store does not answer: these jobs are accepted, and wait for it
                logging.getLogger(__name__).exception("accepted jobs wait for the store")
                time.sleep(STORE_SECONDS)
                self._inbox.put(jobs[number:])
                return
            except Exception:  # of this job alone: the others are taken up all the same
                logging.getLogger(__name__).exception("%s: is taken up when the server starts again", job.row.id)
